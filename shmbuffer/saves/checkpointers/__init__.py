"""Checkpointers, which save and load storages. Each file contains one kind."""
