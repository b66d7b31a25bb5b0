"""Items of tensors: what ``items/`` does for arrays, for tensors and TensorDicts.

form/      data taken apart into leaves, checked, described, and put together
records/   items of any size as records
"""
