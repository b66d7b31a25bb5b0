"""Where the items are: one storage a file."""

from shmbuffer.replay.storages.lazy_memmap import LazyMemmapStorage
from shmbuffer.replay.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.replay.storages.list import ListStorage
from shmbuffer.replay.storages.storage import Storage
from shmbuffer.replay.storages.tensor import TensorStorage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage", "TensorStorage"]
