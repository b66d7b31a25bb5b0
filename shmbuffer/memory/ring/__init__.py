"""Reads and writes of items: rows, records and priorities."""
