"""Direct preference optimisation (DPO)."""
