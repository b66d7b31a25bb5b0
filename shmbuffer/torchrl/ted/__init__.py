"""Converts episode data to a compact form that stores each observation once, and back.

TorchRL's episode data format (TED) stores the observation of step t + 1 twice: at the root of item
t + 1, and under ``"next"`` in item t. The hooks in this package remove the second copy on saving
and restore it on loading. `FlatStorageCheckpointer` and related classes use them, and they can be
passed to ``register_save_hook``.

    TED2Flat    all items consecutively, in time order                   Flat2TED
    TED2Nested  the same bytes as nested tensors, one row per trajectory Nested2TED
    H5Split     one TensorDict per row of these, for HDF5                H5Combine
"""
