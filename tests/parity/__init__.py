"""Every layout of ranks computes the same as one process."""
