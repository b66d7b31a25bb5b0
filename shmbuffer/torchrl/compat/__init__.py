"""Files as TorchRL lays them out, written and read: one module for each part of a buffer.

What TorchRL has no place for is in files of our own (``shmbuffer.*``), and under our key in its
JSON, which a later save by TorchRL drops.
"""
