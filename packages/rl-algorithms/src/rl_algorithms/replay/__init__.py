"""Replay of what a run has recorded of its training."""
