"""The storages of a buffer, one per module."""
