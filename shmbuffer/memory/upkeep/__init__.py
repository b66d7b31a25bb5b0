"""Keeping a buffer whole and showing it: recovery, durability, check, history."""
