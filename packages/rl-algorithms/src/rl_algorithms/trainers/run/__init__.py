"""The folder, record, result and figures of a run."""
