"""Replicas of a generator: workers, restarts, the queue of rows."""
