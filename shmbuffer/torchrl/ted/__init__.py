"""Converts episode data to a compact form that stores each observation once, and back.

TorchRL's episode data format (TED) stores the observation of step t + 1 twice: at the root of item
t + 1, and under ``"next"`` in item t. The save hooks in this package remove the second copy, and
the load hooks restore it. `FlatStorageCheckpointer` and related classes use these hooks. They can
also be passed to ``register_save_hook`` and ``register_load_hook``.

    save hook   result                                                   load hook
    TED2Flat    all items consecutively, in time order                   Flat2TED
    TED2Nested  the same bytes as nested tensors, one row per trajectory Nested2TED
    H5Split     one TensorDict per trajectory, for HDF5                  H5Combine
"""
