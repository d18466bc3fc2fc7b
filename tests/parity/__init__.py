"""Every layout of the ranks computes what one process computes."""
