"""Queues between workers."""
