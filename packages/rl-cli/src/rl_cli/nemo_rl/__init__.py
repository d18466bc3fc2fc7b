"""What comes along from NeMo RL: its recipes, and imports in scripts."""
