"""The storage of compressed items: a list, or records, each tensor of it compressed on its own."""

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
from shmbuffer.memory.format.record_batch import RecordBody
from shmbuffer.memory.format.recorded import of_storage
from shmbuffer.saves.checkpointers.list import CompressedListStorageCheckpointer
from shmbuffer.storages.item_codec import BodyCodec
from shmbuffer.storages.record_codec import Compress, Decompress, TensorRecordCodec, with_metadata
from shmbuffer.storages.record_list import RecordList, RecordOptions
from shmbuffer.tensors.form.batches import collate, stack_lazily
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.form.tensors import bytes_of
from shmbuffer.tensors.records.decoder import RawBatch
from shmbuffer.torchrl.compat import compressed


class CompressedListStorage(RecordList):
    """Items whose tensors are compressed when they are written, and come back as they were.

    Every tensor and array of an item is compressed: of TensorDicts and tensorclasses at any depth,
    lazy stacks, dicts, tuples and lists; bytes too. dtype, shape and batch size come back exactly.
    What entries of one size in an item have in common, as an observation and the next one do, is
    stored once, where zstd compresses. Batches are compressed and decompressed in one go, in
    several threads where that pays.

    In one process, an item that a record cannot hold is stored as the Python object that it is, as
    in a `ListStorage`: an item with a complex number, a set or another object, a sparse or nested
    tensor, or a key other than text, a number, None or a tuple of them. Such an item is not
    compressed, `get` returns the stored object itself, and `bytes` does not count it.

    A batch of a buffer is one dense TensorDict where its items agree in form and shapes, else a
    lazy stack.

    Without ``scratch_dir`` and ``shared_init`` it is a list of this process, which cannot be passed
    to another one (RuntimeError). With one of them items are *records* in a ring of bytes, which
    any number of processes write and read, and which survives them; see `RecordList` for what that
    means.

    Args:
        max_size: capacity in items; None: no limit, in one process only.
        compression_fn: called with a tensor, gives a uint8 tensor; None compresses with zstd.
        decompression_fn: called with what ``compression_fn`` gave, or with that and a dict
            (``"shape"``, ``"dtype"``, ``"device"`` of the tensor) if it takes two positional
            arguments; gives the tensor, or its bytes as uint8. None decompresses zstd. Other
            processes give both to ``attach``: functions are not recorded.
        compression_level: of zstd, 1 (fast) to 22 (small).
        device: where tensors of what is read are. None is the CPU; in one process, an item with a
            tensor on another device is then stored as the object that it is, and not compressed.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        compress: of records: which entries are compressed, by key or nested key, with all that is
            in them (``["obs", ("next", "obs")]``); the others are raw. None: those from 64 bytes on
            that get smaller.
        dictionary_bytes: of records: size of a dictionary for zstd, learned from the first items
            and kept in the directory, for items too small to compress well alone; 100,000 is usual.
            0: no dictionary.
        max_bytes: capacity in bytes, of records as they are stored, headers included; needed with a
            directory. The oldest items go when either capacity is reached.
        pad_output: what a batch of a buffer is where items differ in shape; see `LazyStackStorage`.
        **options: ``scratch_dir``, ``shared_init``, ``existsok``, ``auto_cleanup``, ``checksum``,
            ``reserve``, ``timeout``, ``prefault``, ``on_progress``: see `LazyMemmapStorage`.

    Several threads may read and write at once: they compress and decompress side by side, as far as
    ``compression_fn`` and ``decompression_fn`` can.

    Raises:
        ValueError: another level; a directory without ``max_size`` or ``max_bytes``; what is for
            records without a directory, or beside a ``compression_fn``.
        TypeError: ``compress`` is no list of keys; ``pad_output`` is something else.
        SchemaMismatchError, ...: see `LazyMemmapStorage`.

    Cost: zstd at level 3 takes about 0.15 ms for four images of 84 x 84 bytes, and a third of that
        to decompress. `get` decompresses each item that it gives, every time.

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
            raise TypeError(f"compress is a list of keys, [{compress!r}], got {compress!r}")
        if compression_level not in range(1, 23):
            raise ValueError(
                f"compression_level is a level of zstd, 1 to 22, got {compression_level!r}"
            )
        if dictionary_bytes < 0:
            raise ValueError(f"dictionary_bytes is a size, or 0, got {dictionary_bytes}")
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
        """See `RecordList.from_engine`."""
        recorded = of_storage(engine.settings, engine.where)
        own = options.get("compression_fn")
        if own is not None and not recorded.get("own_functions", True):
            raise ValueError(
                f"{engine.where}: its items are compressed with zstd, and nobody else there could "
                "read those of a compression_fn; leave it out"
            )
        return super().from_engine(engine, **options)

    def _require_records(self, is_directory: bool) -> None:
        """ValueError where something is asked for that is only there for records, or for zstd."""
        asked = [f"{name}={value!r}" for name, value in self._of_records.items() if value]
        if asked and not is_directory:
            raise ValueError(
                f"{type(self).__name__}({', '.join(asked)}) is for records: give scratch_dir or "
                "shared_init=True, and max_bytes, or leave it out"
            )
        if asked and self._functions[0] is not None:
            raise ValueError(
                f"{type(self).__name__}({', '.join(asked)}) is for zstd, in the place of which a "
                "compression_fn was given; leave one of them out"
            )

    def _made_item_codec(self) -> BodyCodec:
        # A function whose counterpart was not given meets zstd, tensor by tensor.
        own = self._functions != (None, None)
        functions = (self.compression_fn, self.decompression_fn) if own else self._functions
        return BodyCodec(self.device, self._record_codec(*functions))

    def _made_record_codec(self) -> TensorRecordCodec:
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

    def _recorded(self) -> dict[str, Any]:
        own = self._functions[0] is not None
        level = self.compression_level
        return {"compression_level": level, "own_functions": own, **self._of_records}

    @classmethod
    def _recalled(cls, recorded: dict[str, Any]) -> dict[str, Any]:
        names = ("compression_level", "compress", "dictionary_bytes")
        return {name: recorded[name] for name in names if name in recorded}

    @property
    def compression_fn(self) -> Compress:
        """The function that compresses a tensor of a list in this process."""
        return self._functions[0] or partial(compress_tensor, level=self.compression_level)

    @property
    def decompression_fn(self) -> Decompress:
        """The function that decompresses it."""
        return self._functions[1] or decompress_tensor

    def _read_torchrl(self, path: Path) -> list[tuple[Any] | None]:
        """Reads the items that TorchRL has saved; see `compat.compressed.read_items`."""
        decompress = with_metadata(self.decompression_fn)
        return compressed.read_items(path, decompress, reads_zlib=self._functions[1] is None)

    def _collate(self, data: Any) -> Any:
        # What was kept as records is one TensorDict, where their forms and shapes agree.
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
        """Bytes that the items take, compressed; of records with their headers. Cost: O(items)."""
        if self.shared:
            store = self.mover()
            return 0 if store is None else int(store.records.live())
        return sum(len(kept) for kept in self.copy_out()[0] if type(kept) is RecordBody)

    @staticmethod
    def to_bytestream(data_to_bytestream: Any) -> builtins.bytes:
        """The bytes of a tensor (in C order), an array, or bytes; else pickled, as in TorchRL.

        Nothing in this package unpickles it, and the storage itself does not use it.
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
    """Gives the bytes of the tensor that `compress_tensor` has compressed."""
    content, expected = bytes_of(chunk), metadata["shape"].numel() * metadata["dtype"].itemsize
    try:
        size = zstandard.frame_content_size(content)
        if size != expected:  # before anything is allocated for what a file says
            raise zstandard.ZstdError(f"{size} bytes where {expected} belong")
        return torch.frombuffer(bytearray(zstandard.decompress(content)), dtype=torch.uint8)
    except zstandard.ZstdError as error:
        raise CorruptBufferError(
            f"a compressed item cannot be decompressed ({error}): it was not compressed with "
            "zstd, or its bytes are damaged"
        ) from error
