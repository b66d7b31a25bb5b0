"""Reads and writes the items of a ring, without torch.

The NumPy client and TorchRL's buffers share this package. It handles the structure of items and
their leaves, rows of arrays, records, and the indices and priorities of items.
"""
