"""Reads and writes files in TorchRL's layout. Each module handles one component of a buffer.

Data that do not fit into TorchRL's files are stored in additional files (``shmbuffer.*``), and
under a key of this package in TorchRL's JSON files. If TorchRL saves the buffer again, that key is
lost.
"""
