"""Memory and layouts of a run, from its configuration alone: no torch, no weights."""
