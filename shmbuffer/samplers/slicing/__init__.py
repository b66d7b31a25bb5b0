"""Trajectories of a storage, and slices of them: what every slice sampler is made of.

options      ──▶ boundaries   ──▶ following           ──▶ trajectories      ──▶ cuts
the user's       where one        what was written        which items           slices, and flags
arguments        ends             since the last look     follow each other     of their steps

`windows` are given once each. The entries of items are read by `samplers.item_entries`.
"""
