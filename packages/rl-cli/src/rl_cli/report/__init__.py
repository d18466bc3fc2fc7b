"""Reports of runs: tables, curves, answers before and after, and HTML pages."""
