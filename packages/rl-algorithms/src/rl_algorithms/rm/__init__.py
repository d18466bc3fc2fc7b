"""Reward models (RM), which learn to score answers from preferences."""
