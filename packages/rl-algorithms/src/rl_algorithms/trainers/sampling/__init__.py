"""Validation, records and checks of sampled answers."""
