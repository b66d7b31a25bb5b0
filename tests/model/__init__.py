"""Exhaustive small models of the slot protocol and of other protocols."""
