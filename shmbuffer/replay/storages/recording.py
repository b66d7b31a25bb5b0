"""What a compressed list in this process keeps of an item: the body of a record.

A batch is compressed in one go, and so is a sample decompressed. An item that holds what a record
cannot hold (any Python object) is kept as `Compressing` does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.memory import RecordBatch
from shmbuffer.memory.records import HEADER_BYTES
from shmbuffer.replay.form.batches import is_batch, unbound
from shmbuffer.replay.form.packing import Packed
from shmbuffer.replay.storages.compressing import Compressing
from shmbuffer.replay.storages.fetched import Fetched
from shmbuffer.replay.storages.keeping import Keeping
from shmbuffer.replay.storages.record_codec import RecordCodec

_RECORD = "record"
_ALIGN = 8


class Recording(Keeping):
    """Items are kept as the bodies of their records, or as `Packed`.

    Args:
        codec: items to records and back.
        compressing: keeps what is no record.
    """

    def __init__(self, codec: RecordCodec, compressing: Compressing) -> None:
        super().__init__(compressing.device)
        self._codec = codec
        self._compressing = compressing

    def keep(self, item: Any) -> bytes | Packed:
        """See `Keeping.keep`."""
        try:
            batch = self._codec.encode(item, True, apart=True)
        except TypeError:  # a record does not hold everything
            return self._compressing.keep(item)
        return _bytes_of(batch)[0]

    def keep_all(self, data: Any) -> list[Any]:
        """See `Keeping.keep_all`."""
        if not is_batch(data):
            data = unbound(data)  # it may be looked at twice
        try:
            batch = self._codec.encode(data, False, apart=True)
        except TypeError:
            return [self.keep(item) for item in unbound(data)]
        return _bytes_of(batch)

    def give(self, kept: bytes | Packed) -> Any:
        """See `Keeping.give`."""
        if isinstance(kept, Packed):
            if kept.form == [_RECORD]:
                kept = kept.chunks[0].numpy().tobytes()
            else:
                return self._compressing.give(kept)
        return self._codec.decoder.items(_batch_of([kept]))[0]

    def give_all(self, kept: list[Any]) -> Any:
        """See `Keeping.give_all`."""
        if kept and set(map(type, kept)) == {bytes}:
            return Fetched(_batch_of(kept), self._codec.decoder)
        return [self.give(one) for one in kept]

    def saved(self, kept: bytes | Packed) -> dict[str, Any]:
        """See `Keeping.saved`."""
        return self.packed(kept)._asdict()

    def loaded(self, saved: dict[str, Any]) -> bytes | Packed:
        """See `Keeping.loaded`."""
        return self.unpacked(self._compressing.loaded(saved))

    @staticmethod
    def packed(kept: bytes | Packed) -> Packed:
        """What is kept, in the words of files: a record is one chunk."""
        if isinstance(kept, Packed):
            return kept
        return Packed([_RECORD], [], [torch.frombuffer(bytearray(kept), dtype=torch.uint8)])

    @staticmethod
    def unpacked(packed: Packed) -> bytes | Packed:
        """What `packed` was given."""
        return packed.chunks[0].numpy().tobytes() if packed.form == [_RECORD] else packed

    @staticmethod
    def nbytes(kept: bytes | Packed) -> int:
        """Size of what is kept."""
        return kept.nbytes if isinstance(kept, Packed) else len(kept)


def _bytes_of(batch: RecordBatch) -> list[bytes]:
    """The body of each record by itself, so that none keeps the memory of its batch."""
    return [batch.body(row).tobytes() for row in range(len(batch))]


def _batch_of(kept: list[bytes]) -> RecordBatch:
    """Records as one batch."""
    sizes = np.array([HEADER_BYTES + len(one) for one in kept], np.int64)
    strides = (sizes + _ALIGN - 1) & -_ALIGN
    # In front of each its header, which is the ring's, and what fills the one before up.
    fronts = [bytes(HEADER_BYTES + count) for count in range(_ALIGN)]
    parts: list[bytes] = []
    missing = 0
    for one in kept:
        parts += (fronts[missing], one)
        missing = -len(one) % _ALIGN
    parts.append(bytes(missing))
    data = np.frombuffer(bytearray().join(parts), np.uint8)
    return RecordBatch(data, np.cumsum(strides) - strides, sizes)
