"""Reads and writes items: rows, records and priorities."""
