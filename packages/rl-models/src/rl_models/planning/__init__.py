"""What a run needs, worked out from configurations alone: no torch, no weights."""
