"""Movers, which carry items between tensors and the ring of a storage: one kind in each file."""
