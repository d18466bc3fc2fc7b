"""Files that several processes share: locks, and files for one user alone."""
