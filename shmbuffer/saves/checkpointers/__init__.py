"""Checkpointers, which save and load storages: one kind in each file."""

from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.saves.checkpointers.compact_episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.list import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.tensor import TensorStorageCheckpointer

__all__ = [
    "CompressedListStorageCheckpointer",
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "TensorStorageCheckpointer",
]
