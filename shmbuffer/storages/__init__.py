"""Storages, which contain the items of a buffer. Each module has one storage or a shared part."""
