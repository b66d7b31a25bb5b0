"""Splits data into the leaves of an item and builds data from leaves, without torch."""
