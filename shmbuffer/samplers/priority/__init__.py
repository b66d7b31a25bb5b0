"""Priorities of a sampler: their location and their changes."""
