"""How a storage is saved and loaded: one checkpointer a file."""

from shmbuffer.replay.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.replay.checkpointers.compact_episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from shmbuffer.replay.checkpointers.list import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
)
from shmbuffer.replay.checkpointers.tensor import TensorStorageCheckpointer

__all__ = [
    "CompressedListStorageCheckpointer",
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "TensorStorageCheckpointer",
]
