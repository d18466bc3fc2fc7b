"""Versioned, verified weight updates from a trainer to its generators."""
