"""Comparison of two runs: the first step and the first thing in which they differ."""
