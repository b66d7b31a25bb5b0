"""Trajectories of a storage and slices of them, which all slice samplers use.

options      ──▶ boundaries   ──▶ following           ──▶ trajectories      ──▶ cuts
the user's       where one        what was written        which items           slices, and flags
arguments        ends             since the last look     follow each other     of their steps

`windows` delivers each window once. `samplers.item_entries` reads entries of items.
"""
