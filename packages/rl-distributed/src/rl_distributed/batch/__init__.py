"""Batches: columns by name, sharding plans, packing, micro-batches."""
