"""Checkpoint formats: Hugging Face folders and exact sharded state."""
