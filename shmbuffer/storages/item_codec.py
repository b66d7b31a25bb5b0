"""How a list in this process keeps an item: as it is, or as the body of its record."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.records.forms import RefusedError
from shmbuffer.memory.format.record_batch import RecordBody, join
from shmbuffer.memory.record_format import Codec, locate
from shmbuffer.storages.mover import by_leaf, to_device
from shmbuffer.storages.record_codec import TensorRecordCodec
from shmbuffer.tensors.form.batches import is_batch, unbound
from shmbuffer.tensors.form.containers import take_of
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.records.decoder import RawBatch

_RECORD = "shmbuffer.record"  # the key of a body in a state


class ItemCodec:
    """Items are kept as they are; ``device`` is where their tensors are sent, None leaves them.

    ``records`` reads the bodies that a `BodyCodec` has saved.
    """

    def __init__(self, device: torch.device | None, records: TensorRecordCodec) -> None:
        self.device = device
        self._records = records

    def keep(self, item: Any) -> Any:
        """The form in which an item is kept."""
        return item if self.device is None else to_device(item, self.device)

    def encode(self, data: Any, single: bool) -> list[Any]:
        """The kept form of one item where ``single``, else of each item of a batch."""
        if single:
            return [self.keep(data)]
        items = unbound(data)
        return items if self.device is None else [self.keep(item) for item in items]

    def give(self, kept: Any) -> Any:
        """The item, from its kept form."""
        return kept

    def give_all(self, kept: list[Any]) -> Any:
        """The items, from their kept forms: a list, or a `RawBatch`."""
        return kept

    def accept(self, saved: Any) -> Any:
        """The kept form of an item that a list has saved as a body, or as the item itself.

        Raises:
            SchemaMismatchError: a function that is not known here compressed the body.
        """
        if type(saved) is not RecordBody:
            return self.keep(saved)
        self._require_function(saved)
        return self._accept_body(saved)

    def accept_state(self, saved: Any) -> Any:
        """`accept` for an item of a state. Its tensors are copied."""
        if isinstance(saved, dict) and list(saved) == [_RECORD]:
            return self.accept(RecordBody(saved[_RECORD].numpy()))
        return self.accept(cloned(saved))

    def _accept_body(self, body: RecordBody) -> Any:
        return self.keep(self._decoded(body))

    def _decoded(self, body: RecordBody) -> Any:
        return self._records.decoder.items(join([body]))[0]

    def _require_function(self, body: RecordBody) -> None:
        if self._records.decompresses_own:
            return
        (located,) = locate(join([body]), "an item")
        if any(chunk.codec is Codec.OWN for chunk in located.form.chunks):
            raise SchemaMismatchError(
                "an item was compressed by a compression_fn; load it into a storage with the "
                "decompression_fn that belongs to it. Nothing was changed"
            )


class BodyCodec(ItemCodec):
    """Items are kept as the bodies of their records; what is no record is kept as it is."""

    def encode(self, data: Any, single: bool) -> list[Any]:
        """See `ItemCodec.encode`."""
        if not (single or is_batch(data)):
            data = unbound(data)  # it may be looked at twice
        if self.device is not None or _is_on_cpu(data):  # records do not store devices
            try:
                return self._records.encode(data, single).bodies()
            except RefusedError:  # a record does not hold everything
                pass
        return [super().keep(data)] if single else [self.keep(item) for item in unbound(data)]

    def keep(self, item: Any) -> Any:
        """See `ItemCodec.keep`."""
        return self.encode(item, True)[0]

    def give(self, kept: Any) -> Any:
        """See `ItemCodec.give`."""
        return self._decoded(kept) if type(kept) is RecordBody else kept

    def give_all(self, kept: list[Any]) -> Any:
        """See `ItemCodec.give_all`."""
        if kept and set(map(type, kept)) == {RecordBody}:
            return RawBatch(join(kept), self._records.decoder)
        return [self.give(one) for one in kept]

    def _accept_body(self, body: RecordBody) -> RecordBody:
        return body


def for_state(kept: Any) -> Any:
    """Makes an item of a state from what is kept: the tagged bytes of a body, or the item."""
    if type(kept) is not RecordBody:
        return kept
    return {_RECORD: torch.frombuffer(bytearray(kept), dtype=torch.uint8)}


def cloned(item: Any) -> Any:
    """An item whose tensors are copies."""
    return by_leaf(item, _copied)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) or is_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_on_cpu(data: Any) -> bool:
    """True if no tensor or TensorDict in the data is on another device than the CPU."""
    where, take = getattr(data, "device", None), take_of(type(data))
    if isinstance(where, torch.device) and where.type != "cpu":
        return False
    return take is None or all(map(_is_on_cpu, take(data)[-1]))
