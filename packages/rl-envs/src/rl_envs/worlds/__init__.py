"""Worlds: one folder each, with `tasks.py` (a `TaskSource`) and `environment.py`."""
