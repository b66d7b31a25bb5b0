"""Maintenance and inspection of a buffer: recovery, durability, check and history."""
