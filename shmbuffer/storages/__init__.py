"""The storages of a buffer, one per module."""

from shmbuffer.storages.compressed import CompressedListStorage
from shmbuffer.storages.lazy_memmap import LazyMemmapStorage
from shmbuffer.storages.lazy_stack import LazyStackStorage
from shmbuffer.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.read_only import ReadOnlyStorage
from shmbuffer.storages.storage import Storage
from shmbuffer.storages.tensor import TensorStorage

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
