"""Folders of runs, and requests to a run from outside."""
