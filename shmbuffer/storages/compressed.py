"""Storage whose tensors are compressed, in a list of one process or in shared records."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch
import zstandard

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory import Engine
from shmbuffer.memory.mapped.record_batch import RecordBody
from shmbuffer.memory.mapped.recorded import read_storage_settings
from shmbuffer.saves.checkpointers.list_checkpointer import CompressedListStorageCheckpointer
from shmbuffer.storages.movers.item_codec import BodyCodec
from shmbuffer.storages.movers.record_codec import (
    Compress,
    Decompress,
    TensorRecordCodec,
    with_metadata,
)
from shmbuffer.storages.record_list import RecordList, RecordOptions
from shmbuffer.tensors.form.tensor_batches import collate, stack_lazily
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensors import bytes_of
from shmbuffer.tensors.records.tensor_decoder import RawBatch
from shmbuffer.torchrl.compat import compressed_files


class CompressedListStorage(RecordList):
    """A list of items whose tensors are compressed without loss.

    Tensors, arrays and bytes are compressed at any depth of TensorDicts, tensorclasses, lazy
    stacks, dicts, tuples and lists. Dtypes, shapes and batch sizes are preserved. If two entries of
    an item have the same size and common bytes, such as an observation and the next one, zstd
    stores these bytes only once. Batches are compressed and decompressed together, in several
    threads if this is faster.

    In one process, an item that a record cannot contain is stored as a Python object, as in a
    `ListStorage`. Examples are items with a complex number, a set, a sparse tensor or a nested
    tensor, and items with keys other than strings, numbers, None and tuples of these. Such an item
    is not compressed, `get` returns the stored object itself, and `bytes` does not count it.

    A buffer returns a batch as one dense TensorDict if its items have the same structure and
    shapes, and as a lazy stack otherwise.

    Without ``scratch_dir`` and ``shared_init``, the items are in a list of this process, and
    passing the storage to another process raises RuntimeError. With one of these arguments, the
    items are *records* in a ring of bytes. Any number of processes can write and read this ring,
    and it is kept when they end; see `RecordList`.

    Args:
        max_size: capacity in items. None means no limit, and is only possible in one process.
        compression_fn: function from a tensor to a uint8 tensor. None compresses with zstd.
        decompression_fn: function from the result of ``compression_fn`` to the tensor, or to its
            bytes as uint8. If it has two positional arguments, the second is a dict with the
            tensor's ``"shape"``, ``"dtype"`` and ``"device"``. None decompresses with zstd.
            The directory does not contain the functions, so other processes must pass both to
            ``attach``.
        compression_level: zstd level, from 1 (fast) to 22 (small).
        device: device of the tensors in the items that are read. None means the CPU. With None, a
            list in one process does not compress an item with a tensor on another device, and
            stores the item as a Python object.
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        compress: keys or nested keys of the entries to compress, including all entries below them
            (``["obs", ("next", "obs")]``). Other entries are stored raw. None compresses each entry
            of at least 64 bytes if the result is smaller. Only for records.
        dictionary_bytes: size of a zstd dictionary in bytes, usually 100,000. A dictionary helps if
            items are too small to compress well individually. It is trained on the first items and
            stored in the directory. 0 means no dictionary. Only for records.
        max_bytes: capacity in bytes of the stored records, including headers. Required with a
            directory. The oldest items are removed when either capacity is reached.
        pad_output: form of a batch whose items differ in shape; see `LazyStackStorage`.
        **options: ``scratch_dir``, ``shared_init``, ``existsok``, ``auto_cleanup``, ``checksum``,
            ``reserve`` (``"all"`` or False), ``timeout``, ``prefault``, ``on_progress``; see
            `LazyMemmapStorage`.

    Several threads can read and write concurrently. They compress and decompress in parallel if
    ``compression_fn`` and ``decompression_fn`` allow this.

    Raises:
        ValueError: the level is out of range, or a directory was requested without ``max_size`` or
            ``max_bytes``. Also if ``compress`` or ``dictionary_bytes`` was passed without a
            directory or together with ``compression_fn``.
        TypeError: ``compress`` is not a list of keys, or ``pad_output`` has an invalid type.
        SchemaMismatchError, ...: see `LazyMemmapStorage`.

    Cost: zstd at level 3 compresses four images of 84 x 84 bytes in about 0.15 ms, and decompresses
        them in a third of this time. Each `get` decompresses every item that it returns.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import CompressedListStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=CompressedListStorage(1000), batch_size=3)
        >>> rb.extend(TensorDict({"obs": torch.zeros(10, 3, 84, 84)}, [10])).shape
        torch.Size([10])
        >>> rb.storage.bytes() < 10 * 100
        True
        >>> rb.sample()["obs"].shape
        torch.Size([3, 3, 84, 84])

    Source: ``torchrl.data.CompressedListStorage``.
    """

    family = "CompressedListStorage"
    storage_options = RecordList.storage_options | {"compression_fn", "decompression_fn"}
    _default_checkpointer = CompressedListStorageCheckpointer

    def __init__(
        self,
        max_size: int | None,
        *,
        compression_fn: Compress | None = None,
        decompression_fn: Decompress | None = None,
        compression_level: int = 3,
        device: torch.device | str | int | None = "cpu",
        compress: Iterable[str | tuple[str, ...]] | None = None,
        dictionary_bytes: int = 0,
        **options: Unpack[RecordOptions],
    ) -> None:
        if isinstance(compress, str):
            raise TypeError(
                f"compress must be a list of keys such as [{compress!r}], got {compress!r}"
            )
        if compression_level not in range(1, 23):
            raise ValueError(
                f"compression_level must be a zstd level from 1 to 22, got {compression_level!r}"
            )
        if dictionary_bytes < 0:
            raise ValueError(f"dictionary_bytes must be at least 0, got {dictionary_bytes}")
        self.compression_level = int(compression_level)
        self._functions = compression_fn, decompression_fn
        self._of_records: dict[str, Any] = {
            "compress": None if compress is None else list(compress),
            "dictionary_bytes": int(dictionary_bytes),
        }
        in_directory = options.get("scratch_dir") is not None or options.get("shared_init", False)
        self._require_records(in_directory)
        super().__init__(max_size, device=device, **options)

    @classmethod
    def from_engine(cls, engine: Engine, **options: Any) -> Self:
        """Creates a storage for an open buffer, and takes ownership of its handle.

        Raises:
            ValueError: ``compression_fn`` was passed, but the items in the directory are compressed
                with zstd.
        """
        recorded = read_storage_settings(engine.settings, engine.where)
        own = options.get("compression_fn")
        if own is not None and not recorded.get("own_functions", True):
            raise ValueError(
                f"{engine.where}: its items are compressed with zstd, so other clients could not "
                "read items that were compressed with a compression_fn; leave compression_fn out"
            )
        return super().from_engine(engine, **options)

    def _require_records(self, is_directory: bool) -> None:
        """Raises ValueError for an option of zstd records if the storage has no such records."""
        requested = [f"{name}={value!r}" for name, value in self._of_records.items() if value]
        if requested and not is_directory:
            raise ValueError(
                f"{type(self).__name__}({', '.join(requested)}) is only for records; pass "
                "scratch_dir or shared_init=True, and max_bytes, or leave it out"
            )
        if requested and self._functions[0] is not None:
            raise ValueError(
                f"{type(self).__name__}({', '.join(requested)}) is an option of zstd, which is "
                "replaced by compression_fn; leave one of them out"
            )

    def _create_item_codec(self) -> BodyCodec:
        # If only one function was passed, the other one uses zstd for each tensor separately.
        own = self._functions != (None, None)
        functions = (self.compression_fn, self.decompression_fn) if own else self._functions
        return BodyCodec(self.device, self._record_codec(*functions))

    def _create_record_codec(self) -> TensorRecordCodec:
        return self._record_codec(*self._functions)

    def _record_codec(
        self, compress: Compress | None, decompress: Decompress | None
    ) -> TensorRecordCodec:
        return TensorRecordCodec(
            level=self.compression_level,
            keys=self._of_records["compress"],
            compress=compress,
            decompress=decompress,
            dictionary_bytes=self._of_records["dictionary_bytes"],
            device=self.device,
        )

    def _recorded_arguments(self) -> dict[str, Any]:
        own = self._functions[0] is not None
        level = self.compression_level
        return {"compression_level": level, "own_functions": own, **self._of_records}

    @classmethod
    def _arguments_from(cls, recorded: dict[str, Any]) -> dict[str, Any]:
        names = ("compression_level", "compress", "dictionary_bytes")
        return {name: recorded[name] for name in names if name in recorded}

    @property
    def compression_fn(self) -> Compress:
        """Function that compresses a tensor of an item to a uint8 tensor."""
        return self._functions[0] or partial(compress_tensor, level=self.compression_level)

    @property
    def decompression_fn(self) -> Decompress:
        """Function that decompresses the result of `compression_fn`."""
        return self._functions[1] or decompress_tensor

    def _read_torchrl(self, path: Path) -> list[tuple[Any] | None]:
        """Reads items that TorchRL has saved; see `compressed_files.read_items`."""
        decompress = with_metadata(self.decompression_fn)
        return compressed_files.read_items(path, decompress, reads_zlib=self._functions[1] is None)

    def _collate(self, data: Any) -> Any:
        # Records of the same structure and shapes are decoded directly to one dense TensorDict.
        if isinstance(data, RawBatch):
            dense = data.dense()
            if dense is not None:
                return dense
            stack = data.decoder.stack(data.batch)
            if stack is not None:
                return stack
            data = data.items()
        if type(data) is not list:
            return data
        return stack_lazily(data) if data and all(map(is_collection, data)) else collate(data)

    def bytes(self) -> int:
        """Returns the total size of the compressed items in bytes, with headers. Cost: O(items)."""
        if self.shared:
            store = self.mover()
            return 0 if store is None else int(store.records.live())
        return sum(len(item) for item in self.copy_out()[0] if type(item) is RecordBody)

    @staticmethod
    def to_bytestream(data_to_bytestream: Any) -> builtins.bytes:
        """Converts a tensor, an array or bytes to bytes in C order.

        Other data are pickled, for compatibility with TorchRL. This package neither calls this
        method nor unpickles its result.
        """
        data = data_to_bytestream
        if isinstance(data, torch.Tensor):
            return bytes_of(data).tobytes()
        if isinstance(data, (np.ndarray, np.generic)):
            return data.tobytes()
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        return pickle.dumps(data)


def compress_tensor(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """Compresses the bytes of a tensor with zstd."""
    frame = zstandard.compress(bytes_of(tensor), level)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decompress_tensor(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
    """Restores the bytes of a tensor from a result of `compress_tensor`, as a uint8 tensor."""
    content, expected = bytes_of(chunk), metadata["shape"].numel() * metadata["dtype"].itemsize
    try:
        size = zstandard.frame_content_size(content)
        if size != expected:  # checked before memory is allocated for a size from a file
            raise zstandard.ZstdError(f"{size} bytes instead of {expected}")
        return torch.frombuffer(bytearray(zstandard.decompress(content)), dtype=torch.uint8)
    except zstandard.ZstdError as error:
        raise CorruptBufferError(
            f"a compressed item cannot be decompressed ({error}); its bytes are damaged or were "
            "not compressed with zstd"
        ) from error
