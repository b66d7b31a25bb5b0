"""The storage of compressed items: a list, or records, each tensor of it compressed on its own."""

from __future__ import annotations

import builtins
import os
import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.memory.recorded import of_storage
from shmbuffer.replay.checkpointers.list import CompressedListStorageCheckpointer
from shmbuffer.replay.form.batches import collate, stack_lazily
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.storages.compressing import Compress, Compressing, Decompress, bytes_of
from shmbuffer.replay.storages.fetched import Fetched
from shmbuffer.replay.storages.keeping import Keeping
from shmbuffer.replay.storages.location import Location
from shmbuffer.replay.storages.ragged_output import PadOutput
from shmbuffer.replay.storages.record_codec import RecordCodec
from shmbuffer.replay.storages.record_list import RecordList
from shmbuffer.replay.storages.record_shelf import RecordShelf
from shmbuffer.replay.storages.recording import Recording

if TYPE_CHECKING:
    from shmbuffer.memory import Engine
    from shmbuffer.memory.progress import OnProgress
    from shmbuffer.replay.form.packing import Packed


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
        max_size: capacity in items; None is without a limit, in one process.
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
            0 is none.
        share_frames: of records: frames that consecutive items of a batch have in common (of stacks
            of frames, and of the same entry in ``"next"``) are stored once. Exact on reading back.
        scratch_dir: the directory of the files.
        shared_init: see the table of `LazyMemmapStorage`.
        max_bytes: capacity in bytes, of records as they are stored, headers included; needed with a
            directory. The oldest items go when either capacity is reached.
        existsok: see the table of `LazyMemmapStorage`.
        auto_cleanup: see `LazyMemmapStorage`.
        checksum: see `LazyMemmapStorage`.
        reserve: see `LazyMemmapStorage`.
        timeout: see `LazyMemmapStorage`.
        prefault: of records, see `LazyMemmapStorage`.
        on_progress: see `LazyMemmapStorage`.
        pad_output: what a batch of a buffer is where items differ in shape; see
            `LazyStackStorage`.

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
        compilable: bool = False,
        compress: Iterable[str | tuple[str, ...]] | None = None,
        dictionary_bytes: int = 0,
        share_frames: bool = False,
        scratch_dir: str | os.PathLike[str] | None = None,
        shared_init: bool = False,
        max_bytes: int | None = None,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        checksum: bool = True,
        reserve: bool = True,
        timeout: float = 60.0,
        prefault: str = "off",
        on_progress: OnProgress | None = None,
        pad_output: PadOutput = None,
    ) -> None:
        location = Location.of(
            scratch_dir,
            shared_init=shared_init,
            existsok=existsok,
            auto_cleanup=auto_cleanup,
            checksum=checksum,
            reserve=reserve,
            timeout=timeout,
            prefault=prefault,
            on_progress=on_progress,
        )
        if isinstance(compress, str):
            raise TypeError(f"compress is a list of keys, [{compress!r}], got {compress!r}")
        of_records = {
            "compress": None if compress is None else list(compress),
            "dictionary_bytes": int(dictionary_bytes),
            "share_frames": bool(share_frames),
        }
        self._compress_as(compression_level, compression_fn, decompression_fn, of_records)
        self._require_records(location)
        self._be(
            max_size,
            device=device,
            compilable=compilable,
            location=location,
            max_bytes=max_bytes,
            pad_output=pad_output,
        )

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        compression_fn: Compress | None = None,
        decompression_fn: Decompress | None = None,
        device: torch.device | str | int | None = "cpu",
        pad_output: PadOutput = None,
    ) -> CompressedListStorage:
        """The storage of a buffer that is open already, as ``attach`` and the coordinator have it.

        Args:
            engine: the open handle; the storage owns it from now on.
            compression_fn: see the class.
            decompression_fn: see the class.
            device: where samples are sent.
            pad_output: see the class.

        Raises:
            ValueError: a ``compression_fn``, where items are compressed with zstd.
        """
        recorded = of_storage(engine.settings, engine.where)
        if compression_fn is not None and not recorded.get("own_functions", True):
            raise ValueError(
                f"{engine.where}: its items are compressed with zstd, and nobody else there could "
                "read those of a compression_fn; leave it out"
            )
        keys = recorded.get("compress")
        of_records = {
            "compress": None
            if keys is None
            else [tuple(key) if isinstance(key, list) else key for key in keys],  # JSON's tuples
            "dictionary_bytes": int(recorded.get("dictionary_bytes", 0)),
            "share_frames": bool(recorded.get("share_frames", False)),
        }
        level = recorded.get("compression_level", 3)
        storage = cls.__new__(cls)
        storage._compress_as(level, compression_fn, decompression_fn, of_records)
        storage._be_at(engine, device=device, pad_output=pad_output)
        return storage

    def _compress_as(
        self,
        level: int,
        compress: Compress | None,
        decompress: Decompress | None,
        of_records: dict[str, Any],
    ) -> None:
        """Know how items are compressed."""
        if level not in range(1, 23):
            raise ValueError(f"compression_level is a level of zstd, 1 to 22, got {level!r}")
        if of_records["dictionary_bytes"] < 0:
            raise ValueError(
                f"dictionary_bytes is a size, or 0, got {of_records['dictionary_bytes']}"
            )
        self.compression_level = int(level)
        self._functions = compress, decompress
        self._compressing: Compressing | None = None  # made when it is asked for
        self._of_records = of_records

    def _require_records(self, location: Location) -> None:
        """ValueError where something is asked for that is only there for records, or for zstd."""
        asked = [f"{name}={value!r}" for name, value in self._of_records.items() if value]
        if asked and not location.is_directory:
            raise ValueError(
                f"{type(self).__name__}({', '.join(asked)}) is for records: give scratch_dir or "
                "shared_init=True, and max_bytes, or leave it out"
            )
        if asked and self._functions[0] is not None:
            raise ValueError(
                f"{type(self).__name__}({', '.join(asked)}) is for zstd, in the place of which a "
                "compression_fn was given; leave one of them out"
            )

    def _made_keeping(self) -> Keeping:
        # Functions of the user's are called item by item, and records do not know of devices.
        if self._functions != (None, None) or self.device is None:
            return self.compressing
        return Recording(self._made_codec(), self.compressing)

    def _made_codec(self) -> RecordCodec:
        compress, decompress = self._functions
        return RecordCodec(
            level=self.compression_level,
            keys=self._of_records["compress"],
            compress=compress,
            decompress=decompress,
            share=self._of_records["share_frames"],
            dictionary_bytes=self._of_records["dictionary_bytes"],
            device=self.device,
        )

    def _recorded(self) -> dict[str, Any]:
        own = self._functions[0] is not None
        return {
            "compression_level": self.compression_level,
            "own_functions": own,
            **self._of_records,
        }

    def _loaded(self, saved: list[Any]) -> list[Any]:
        keeping = self._made_keeping() if self.shared else self.keeping
        kept = [keeping.loaded(one) for one in saved]
        return [keeping.give(one) for one in kept] if self.shared else kept

    @property
    def compression_fn(self) -> Compress:
        """What compresses a tensor, of a list of this process."""
        return self.compressing.compress

    @property
    def decompression_fn(self) -> Decompress:
        """What decompresses it."""
        return self.compressing.decompress

    @property
    def compressing(self) -> Compressing:
        """How an item is compressed in one process, and in files of such a storage."""
        if self._compressing is None:
            self._compressing = Compressing(self.compression_level, *self._functions, self.device)
        return self._compressing

    def pack(self, item: Any) -> Packed:
        """An item whose tensors are compressed one by one, for a file of one's own.

        Raises:
            TypeError: ``compression_fn`` gave something else than a uint8 tensor.
        """
        return self.compressing.keep(item)

    def unpack(self, packed: Packed) -> Any:
        """The item again.

        Raises:
            CorruptBufferError: these are no bytes that zstd has written.
            RuntimeError: ``decompression_fn`` gave something else than what was compressed.
        """
        return self.compressing.give(packed)

    def packed(self, kept: Any) -> Packed:
        """What is kept of an item, as files have it."""
        return self.pack(kept) if self.shared else Recording.packed(kept)

    def unpacked(self, packed: Packed) -> Any:
        """What is kept, or the item itself where that is a record."""
        if self.shared:
            return self._made_keeping().give(packed)
        kept = Recording.unpacked(packed)
        keeping = self.keeping
        if isinstance(kept, bytes) and not isinstance(keeping, Recording):
            return keeping.keep(Recording(self._made_codec(), self.compressing).give(kept))
        return kept

    def _collate(self, data: Any) -> Any:
        # What was kept as records is one TensorDict, where their forms and shapes agree.
        if isinstance(data, Fetched):
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
        """Size of what is compressed, in bytes; of records all that they take, headers included.

        Cost: O(items).
        """
        if isinstance(self._shelf, RecordShelf):
            return 0 if self._shelf.records is None else self._shelf.records.live()
        return sum(map(Recording.nbytes, self.copy_out().items))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compressing": None}

    @staticmethod
    def to_bytestream(data_to_bytestream: Any) -> builtins.bytes:
        """The bytes of a tensor (in C order), an array, or bytes.

        Anything else is pickled, as TorchRL does it. Nothing in this package unpickles it, and the
        storage itself does not use it for such things.
        """
        data = data_to_bytestream
        if isinstance(data, torch.Tensor):
            return bytes_of(data).tobytes()
        if isinstance(data, (np.ndarray, np.generic)):
            return data.tobytes()
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        return pickle.dumps(data)
