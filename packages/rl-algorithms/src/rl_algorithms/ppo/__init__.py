"""Proximal policy optimization with a critic (PPO)."""
