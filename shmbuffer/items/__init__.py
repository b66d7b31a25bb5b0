"""Items, whatever they are made of, on their way into a ring and out of it; without torch.

What the NumPy client and TorchRL's buffers have in common: the form of an item and its leaves, rows
of arrays, records, and the numbers and priorities that go with items.
"""
