"""Decodes records into items or into columns of leaves."""
