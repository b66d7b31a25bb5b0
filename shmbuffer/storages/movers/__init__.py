"""Movers, which copy items between tensors and the ring of a storage. Each module has one kind."""
