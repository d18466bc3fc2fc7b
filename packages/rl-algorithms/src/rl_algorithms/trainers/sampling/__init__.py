"""Validation and checks of what was sampled."""
