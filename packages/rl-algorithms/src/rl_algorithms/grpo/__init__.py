"""Group relative policy optimization (GRPO)."""
