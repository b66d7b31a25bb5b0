"""How items go in and out: rows, records, priorities."""
