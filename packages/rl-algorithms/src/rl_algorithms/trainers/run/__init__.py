"""The folder, record, result and key figures of a run."""
