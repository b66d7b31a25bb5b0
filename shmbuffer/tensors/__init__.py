"""The functions of ``items/`` for tensors and TensorDicts instead of arrays.

form/      data taken apart into leaves, checked, described, and put together
records/   items of any size as records
"""
