"""Generation: one folder per backend, and the configuration that all share."""
