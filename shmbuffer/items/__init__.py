"""Reads and writes the items of a ring, without torch.

The NumPy client and TorchRL's buffers share these modules: the structure of an item and its leaves,
rows of arrays, records, and the indices and priorities of items.
"""
