"""Storages, which contain the items of a buffer. Each module defines a storage or a part of one."""
