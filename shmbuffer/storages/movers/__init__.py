"""Movers, which write items to the ring of a storage and read them. Each module defines one."""
