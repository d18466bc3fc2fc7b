"""Curves of small models that learn by each method."""
