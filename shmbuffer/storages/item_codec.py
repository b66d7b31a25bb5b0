"""What a list in this process keeps of an item.

ItemCodec ─┬─ PackedCodec   each of its tensors compressed on its own
           └─ BodyCodec     the body of a record; a batch is coded in one go
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import zstandard

from shmbuffer.errors import CorruptBufferError, SchemaMismatchError
from shmbuffer.memory import RecordBatch
from shmbuffer.memory.format.record_batch import join
from shmbuffer.memory.record_format import Codec, locate
from shmbuffer.storages.mover import by_leaf, to_device
from shmbuffer.storages.record_codec import (
    Compress,
    Decompress,
    RecordCodec,
    with_metadata,
)
from shmbuffer.tensors.form.batches import is_batch, unbound
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.form.packing import RECORD, Packed, pack, unpack
from shmbuffer.tensors.form.tensors import contiguous
from shmbuffer.tensors.records.decoder import RawBatch

_KEPT_FORMS = 1024  # that items to come may share


_ITS_OWN = "load it into a storage of the kind that it is of. Nothing was changed"


class ItemCodec:
    """Items are kept as they are; ``device`` is where their tensors are sent, None leaves them."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def keep(self, item: Any) -> Any:
        """What is kept of an item."""
        return item if self.device is None else to_device(item, self.device)

    def encode(self, data: Any, single: bool) -> list[Any]:
        """What is kept of one item where ``single``, else of each item of a batch."""
        return [self.keep(data)] if single else self._keep_all(data)

    def _keep_all(self, data: Any) -> list[Any]:
        items = unbound(data)
        return items if self.device is None else [self.keep(item) for item in items]

    def give(self, kept: Any) -> Any:
        """The item, from what is kept of it."""
        return kept

    def give_all(self, kept: list[Any]) -> Any:
        """The items, from what is kept of them: a list, or `RawBatch`."""
        return kept

    def saved(self, kept: Any) -> Any:
        """What a state has of an item."""
        return kept

    def loaded(self, saved: Any) -> Any:
        """What is kept of an item of a state. Its tensors are copies."""
        if _is_packed(saved):
            raise SchemaMismatchError(f"an item of the state is compressed; {_ITS_OWN}")
        return self.keep(cloned(saved))


class PackedCodec(ItemCodec):
    """Items are kept as `Packed`."""

    def __init__(
        self,
        level: int,  # of zstd
        compress: Compress | None,  # called with a tensor, gives a uint8 tensor; None is zstd
        # called with what ``compress`` gave, and with a dict of the tensor's shape, dtype and
        # device if it takes two arguments; None is zstd
        decompress: Decompress | None,
        device: torch.device | None,  # where tensors of what is given are; None is where they were
    ) -> None:
        super().__init__(device)
        self.level = level
        self.decompresses_zstd = decompress is None
        self.compress: Compress = self._compress if compress is None else compress
        self.decompress: Decompress = self._decompress if decompress is None else decompress
        self.expand = with_metadata(self.decompress)
        """Called with a chunk and what belongs to it; gives the tensor, or its bytes."""
        self._codecs = threading.local()  # of zstd: one for each thread
        self._forms: dict[str, list[Any]] = {}  # items of one form share it

    def keep(self, item: Any) -> Packed:
        """See `ItemCodec.keep`."""
        packed = pack(item, self.compress, self.device)
        if len(self._forms) >= _KEPT_FORMS:
            self._forms.clear()
        return packed._replace(form=self._forms.setdefault(repr(packed.form), packed.form))

    def _keep_all(self, data: Any) -> list[Any]:
        return [self.keep(item) for item in unbound(data)]

    def give(self, kept: Packed) -> Any:
        """See `ItemCodec.give`."""
        return unpack(kept, self.expand)

    def give_all(self, kept: list[Packed]) -> list[Any]:
        """See `ItemCodec.give_all`."""
        return [self.give(one) for one in kept]

    def saved(self, kept: Packed) -> dict[str, Any]:
        """See `ItemCodec.saved`."""
        return kept._asdict()

    def loaded(self, saved: dict[str, Any]) -> Packed:
        """See `ItemCodec.loaded`."""
        if not _is_packed(saved):
            raise SchemaMismatchError(f"an item of the state is not compressed; {_ITS_OWN}")
        chunks = [chunk.clone() for chunk in saved["chunks"]]
        return Packed(saved["form"], list(saved["values"]), chunks)

    def _compress(self, tensor: torch.Tensor) -> torch.Tensor:
        codec = getattr(self._codecs, "compressor", None)
        if codec is None:
            codec = self._codecs.compressor = zstandard.ZstdCompressor(self.level)
        return torch.frombuffer(bytearray(codec.compress(bytes_of(tensor))), dtype=torch.uint8)

    def _decompress(self, chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        codec = getattr(self._codecs, "decompressor", None)
        if codec is None:
            codec = self._codecs.decompressor = zstandard.ZstdDecompressor()
        shape, dtype = metadata["shape"], metadata["dtype"]
        content = bytes_of(chunk)
        try:
            size = zstandard.frame_content_size(content)
            expected = size if shape is None else shape.numel() * dtype.itemsize
            if size != expected:  # before anything is allocated for what a file says
                raise zstandard.ZstdError(f"{size} bytes where {expected} belong")
            return torch.frombuffer(bytearray(codec.decompress(content)), dtype=torch.uint8)
        except zstandard.ZstdError as error:
            raise CorruptBufferError(
                f"a compressed item cannot be decompressed ({error}): it was not compressed with "
                "zstd, or its bytes are damaged"
            ) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order; of its own memory where they lie so."""
    flat = contiguous(tensor).reshape(-1)
    if flat.stride(0) != 1:  # one number, of which torch says that it is contiguous anyway
        flat = flat.new_empty(flat.shape).copy_(flat)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # of typeshed's 3.11


class BodyCodec(ItemCodec):
    """Items are kept as the bodies of their records, or as `Packed` where they are no record."""

    def __init__(self, codec: RecordCodec, compressing: PackedCodec) -> None:
        super().__init__(compressing.device)
        self._codec = codec
        self._compressing = compressing

    def keep(self, item: Any) -> Any:
        """See `ItemCodec.keep`."""
        return self.encode(item, True)[0]

    def encode(self, data: Any, single: bool) -> list[Any]:
        """See `ItemCodec.encode`."""
        if not (single or is_batch(data)):
            data = unbound(data)  # it may be looked at twice
        try:
            return _bytes_of(self._codec.encode(data, single))
        except TypeError:  # a record does not hold everything
            if single:
                return [self._compressing.keep(data)]
            return [self.keep(item) for item in unbound(data)]

    def give(self, kept: bytes | Packed) -> Any:
        """See `ItemCodec.give`."""
        found = self.unpacked(kept) if isinstance(kept, Packed) else kept
        if isinstance(found, Packed):
            return self._compressing.give(found)
        return self._codec.decoder.items(join([found]))[0]

    def give_all(self, kept: list[Any]) -> Any:
        """See `ItemCodec.give_all`."""
        if kept and set(map(type, kept)) == {bytes}:
            return RawBatch(join(kept), self._codec.decoder)
        return [self.give(one) for one in kept]

    def saved(self, kept: bytes | Packed) -> dict[str, Any]:
        """See `ItemCodec.saved`."""
        return self.packed(kept)._asdict()

    def loaded(self, saved: dict[str, Any]) -> bytes | Packed:
        """See `ItemCodec.loaded`."""
        kept = self.unpacked(self._compressing.loaded(saved))
        if not isinstance(kept, Packed):
            self.require_function(kept)
        return kept

    def require_function(self, body: bytes) -> None:
        """Raises SchemaMismatchError if a function that is not known here compressed a record."""
        if self._codec.decompresses_own:
            return
        (located,) = locate(join([body]), "an item")
        if any(chunk.codec is Codec.OWN for chunk in located.form.chunks):
            raise SchemaMismatchError(
                "an item was compressed by a compression_fn; load it into a storage with the "
                "decompression_fn that belongs to it. Nothing was changed"
            )

    @staticmethod
    def packed(kept: bytes | Packed) -> Packed:
        """What is kept, in the words of files: a record is one chunk."""
        if isinstance(kept, Packed):
            return kept
        return Packed([RECORD], [], [torch.frombuffer(bytearray(kept), dtype=torch.uint8)])

    @staticmethod
    def unpacked(packed: Packed) -> bytes | Packed:
        """What `packed` was given."""
        return packed.chunks[0].numpy().tobytes() if packed.form == [RECORD] else packed

    @staticmethod
    def nbytes(kept: bytes | Packed) -> int:
        """Size of what is kept."""
        return kept.nbytes if isinstance(kept, Packed) else len(kept)


def _bytes_of(batch: RecordBatch) -> list[bytes]:
    """The body of each record by itself, so that none keeps the memory of its batch."""
    return [batch.body(row).tobytes() for row in range(len(batch))]


def _is_packed(saved: Any) -> bool:
    """Whether an item of a state is what `PackedCodec.saved` gave."""
    return isinstance(saved, dict) and tuple(saved) == Packed._fields


def cloned(item: Any) -> Any:
    """An item whose tensors are copies."""
    return by_leaf(item, _copied)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) or is_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
