"""Reward models (RM): a number for an answer, learned from preferences."""
