"""Trajectories of a storage, and slices of them: what every slice sampler is made of.

following           ──▶ trajectories      ──▶ cuts           ──▶ marks
what was written,       which items           starts, rows       what a sample says of its steps
since the last look     follow each other

boundaries says where one ends, and given what the user gives for that; single_entries reads one.
"""
