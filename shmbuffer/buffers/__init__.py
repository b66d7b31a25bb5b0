"""The buffers of the family, made of rooms of which each knows those above it.

data_path   the parts of a buffer, and the way of data through them
flow        items for consumers, room for rollouts, weights for collectors
calls       the objects that a buffer passes its calls on to: writes, reads, items, saves
"""
