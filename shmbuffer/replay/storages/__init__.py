"""Where the items are: one storage a file."""

from shmbuffer.replay.storages.compressed import CompressedListStorage
from shmbuffer.replay.storages.lazy_memmap import LazyMemmapStorage
from shmbuffer.replay.storages.lazy_stack import LazyStackStorage
from shmbuffer.replay.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.replay.storages.list import ListStorage
from shmbuffer.replay.storages.read_only import ReadOnlyStorage
from shmbuffer.replay.storages.storage import Storage
from shmbuffer.replay.storages.tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "ReadOnlyStorage",
    "Storage",
    "TensorStorage",
]
