"""Migration from NeMo RL: its recipes, and imports in scripts."""
