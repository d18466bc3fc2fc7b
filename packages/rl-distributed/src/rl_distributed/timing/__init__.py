"""Timers and traces."""
