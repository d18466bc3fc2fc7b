"""Training backends, one folder each."""
