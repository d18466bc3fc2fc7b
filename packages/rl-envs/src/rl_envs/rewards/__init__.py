"""Reward functions: how they are called, checked and combined."""
