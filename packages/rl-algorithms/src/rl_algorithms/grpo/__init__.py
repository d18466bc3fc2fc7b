"""Group-relative policy optimisation (GRPO)."""
