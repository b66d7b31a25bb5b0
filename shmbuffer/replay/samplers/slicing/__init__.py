"""Trajectories of a storage, and slices of them: what every slice sampler is made of.

pieces         ──▶ trajectories       ──▶ cutting        ──▶ marks
items in order     cut where one ends     starts, rows       what a sample says of its steps
                   (boundaries, entries)
"""
