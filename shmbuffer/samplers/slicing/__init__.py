"""Finds the trajectories of a storage and cuts slices from them, for all slice samplers.

options      ──▶ boundaries   ──▶ following           ──▶ trajectories      ──▶ cuts
the user's       where each       items written since     which items           slices, and flags
arguments        one ends         the last update         follow each other     of their steps

`windows` delivers each window once. `samplers.item_entries` reads entries of items.
"""
