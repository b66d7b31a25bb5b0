"""The storage of compressed items: a list, or records, each tensor of it compressed on its own."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterable
from typing import Any, Self, Unpack

import numpy as np
import torch

from shmbuffer.memory import Engine
from shmbuffer.memory.format.recorded import of_storage
from shmbuffer.saves.checkpointers.list import CompressedListStorageCheckpointer
from shmbuffer.storages.item_codec import BodyCodec, ItemCodec, PackedCodec, bytes_of
from shmbuffer.storages.record_codec import Compress, Decompress, RecordCodec
from shmbuffer.storages.record_list import RecordList, RecordOptions
from shmbuffer.tensors.form.batches import collate, stack_lazily
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.form.packing import Packed
from shmbuffer.tensors.records.decoder import RawBatch


class CompressedListStorage(RecordList):
    """Items whose tensors are compressed when they are written, and come back as they were.

    Every tensor and array of an item is compressed: of TensorDicts and tensorclasses at any depth,
    lazy stacks, dicts, tuples and lists; bytes too. Text, numbers and other objects are kept as
    they are. dtype, shape, batch size and device come back exactly. What entries of one size in an
    item have in common, as an observation and the next one do, is stored once, where zstd
    compresses. Batches are compressed and decompressed in one go, in several threads where that
    pays.

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
        device: where tensors of what is read are; None is where they were when they were written,
            of records the CPU.
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
        self._packing: PackedCodec | None = None  # made when it is asked for
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

    def _made_item_codec(self) -> ItemCodec:
        if self.device is None:  # records do not store devices
            return self.packing
        # A function whose counterpart was not given meets zstd, tensor by tensor.
        own = self._functions != (None, None)
        functions = (self.compression_fn, self.decompression_fn) if own else self._functions
        return BodyCodec(self._record_codec(*functions), self.packing)

    def _made_record_codec(self) -> RecordCodec:
        return self._record_codec(*self._functions)

    def _record_codec(
        self, compress: Compress | None, decompress: Decompress | None
    ) -> RecordCodec:
        return RecordCodec(
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

    def _loaded(self, saved: list[Any]) -> list[Any]:
        if not self.shared:
            return super()._loaded(saved)
        codec = self._made_item_codec()
        return [codec.give(codec.loaded(one)) for one in saved]

    @property
    def compression_fn(self) -> Compress:
        """What compresses a tensor, of a list of this process."""
        return self.packing.compress

    @property
    def decompression_fn(self) -> Decompress:
        """What decompresses it."""
        return self.packing.decompress

    @property
    def packing(self) -> PackedCodec:
        """How an item is compressed in one process, and in files of such a storage."""
        if self._packing is None:
            self._packing = PackedCodec(self.compression_level, *self._functions, self.device)
        return self._packing

    def packed(self, kept: Any) -> Packed:
        """What is kept of an item, as files have it."""
        return self.packing.keep(kept) if self.shared else BodyCodec.packed(kept)

    def unpacked(self, packed: Packed) -> Any:
        """What is kept, or the item itself where that is a record."""
        if self.shared:
            return self._made_item_codec().give(packed)
        kept = BodyCodec.unpacked(packed)
        if isinstance(kept, Packed):
            self.packing.give(kept)  # an item that cannot be given is an error now
        elif isinstance(self.codec, BodyCodec):
            self.codec.require_function(kept)
        else:
            return self.codec.keep(BodyCodec(self._made_record_codec(), self.packing).give(kept))
        return kept

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
        return sum(map(BodyCodec.nbytes, self.copy_out()[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_packing": None}

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
