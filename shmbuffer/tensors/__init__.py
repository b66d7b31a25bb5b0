"""Counterparts of the functions in ``items/`` for tensors and TensorDicts instead of arrays.

form/      splits data into leaves, checks and describes them, and rebuilds data from them
records/   stores items of any size as records
"""
