"""The driver side: policies that run on groups of workers."""
