"""Checkpointers, which save and load storages: one kind in each file."""
