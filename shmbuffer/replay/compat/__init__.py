"""Files as TorchRL lays them out, written and read: one module for each part of a buffer.

Nothing here is unpickled. What TorchRL has no place for is beside its files, under names of our own
(``shmbuffer.*``), and under a key of our own in its JSON, which a later save by TorchRL drops.
"""
