"""Episode data in a compact form and back: every observation once instead of twice.

TorchRL's episode data format (TED) holds the observation of step t + 1 twice: at the root of item
t + 1, and under ``"next"`` in item t. These hooks for saving and loading leave the second one out
and bring it back; `FlatStorageCheckpointer` and its kin apply them, or ``register_save_hook``.

    TED2Flat    all items after each other, in the order of time         Flat2TED
    TED2Nested  the same bytes, one row of a nested tensor a trajectory  Nested2TED
    H5Split     a nested one as a TensorDict a trajectory, for HDF5      H5Combine
"""
