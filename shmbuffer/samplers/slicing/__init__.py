"""Samplers of trajectory slices, and the modules that find trajectories and cut slices from them.

options      ──▶ boundaries   ──▶ following           ──▶ trajectories      ──▶ cuts
the user's       where each       items written since     which items           slices, and flags
arguments        trajectory       the last update         follow each other     of their steps
                 ends

`windows` delivers each window once. `samplers.item_entries` reads single entries of items.
"""
