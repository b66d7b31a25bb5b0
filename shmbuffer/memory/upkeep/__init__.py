"""Maintains and inspects a buffer: recovery, durability, check and history."""
