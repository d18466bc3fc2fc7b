"""Direct preference optimization (DPO)."""
