"""Reads and writes files in TorchRL's layout. Each module handles one part of a buffer.

Data that do not fit into TorchRL's files are in additional files (``shmbuffer.*``), and under a key
of this package in TorchRL's JSON files. A later save by TorchRL removes that key.
"""
