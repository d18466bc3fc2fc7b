"""Numerics on tensors: attention over packed rows, log-probs."""
