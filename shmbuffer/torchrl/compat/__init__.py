"""Files as TorchRL lays them out, written and read: one module for each part of a buffer.

Data that TorchRL has no place for are in files of our own (``shmbuffer.*``), and under our key in
its JSON files, which a later save by TorchRL drops.
"""
