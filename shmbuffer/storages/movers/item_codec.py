"""Codecs for the items of a list in this process, which are stored as objects or record bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.records.forms import RefusedError
from shmbuffer.memory.mapped.record_batch import RecordBody, join
from shmbuffer.memory.record_format import Codec, locate
from shmbuffer.storages.movers.record_codec import TensorRecordCodec
from shmbuffer.storages.movers.storage_mover import by_leaf, to_device
from shmbuffer.tensors.form.tensor_batches import is_batch, unbound
from shmbuffer.tensors.form.tensor_containers import take_of
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.records.tensor_decoder import RawBatch

_RECORD = "shmbuffer.record"  # key of a record body in a state


class ItemCodec:
    """Stores items as objects, and moves their tensors to ``device`` unless it is None.

    ``records`` decodes the bodies that a `BodyCodec` has saved.
    """

    def __init__(self, device: torch.device | None, records: TensorRecordCodec) -> None:
        self.device = device
        self._records = records

    def keep(self, item: Any) -> Any:
        """Returns the stored form of an item."""
        return item if self.device is None else to_device(item, self.device)

    def encode(self, data: Any, single: bool) -> list[Any]:
        """Returns the stored form of one item if ``single``, else of each item of a batch."""
        if single:
            return [self.keep(data)]
        items = unbound(data)
        return items if self.device is None else [self.keep(item) for item in items]

    def give(self, kept: Any) -> Any:
        """Returns the item that belongs to a stored form."""
        return kept

    def give_all(self, kept: list[Any]) -> Any:
        """Returns the items that belong to stored forms, as a list or a `RawBatch`."""
        return kept

    def accept(self, saved: Any) -> Any:
        """Converts a saved item, which is a record body or the item itself, to its stored form.

        Raises:
            SchemaMismatchError: the body was compressed with a function that is not available.
        """
        if type(saved) is not RecordBody:
            return self.keep(saved)
        self._require_function(saved)
        return self._accept_body(saved)

    def accept_state(self, saved: Any) -> Any:
        """Returns the stored form of an item from a state. The tensors of the item are copied."""
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
                "an item was compressed with a compression_fn; load it into a storage with the "
                "matching decompression_fn. Nothing was changed"
            )


class BodyCodec(ItemCodec):
    """Stores items as record bodies, or as objects if a record cannot hold them."""

    def encode(self, data: Any, single: bool) -> list[Any]:
        """Returns the stored form of one item if ``single``, else of each item of a batch."""
        if not (single or is_batch(data)):
            data = unbound(data)  # the loops below may need it twice
        if self.device is not None or _is_on_cpu(data):  # records do not store devices
            try:
                return self._records.encode(data, single).bodies()
            except RefusedError:  # records cannot hold every object
                pass
        return [super().keep(data)] if single else [self.keep(item) for item in unbound(data)]

    def keep(self, item: Any) -> Any:
        """Returns the stored form of an item."""
        return self.encode(item, True)[0]

    def give(self, kept: Any) -> Any:
        """Decodes a body. Returns any other stored form unchanged."""
        return self._decoded(kept) if type(kept) is RecordBody else kept

    def give_all(self, kept: list[Any]) -> Any:
        """Returns a `RawBatch` if all items are bodies, otherwise a list of items."""
        if kept and set(map(type, kept)) == {RecordBody}:
            return RawBatch(join(kept), self._records.decoder)
        return [self.give(one) for one in kept]

    def _accept_body(self, body: RecordBody) -> RecordBody:
        return body


def for_state(kept: Any) -> Any:
    """Converts a stored form for a state, to the tagged bytes of a body or to the item."""
    if type(kept) is not RecordBody:
        return kept
    return {_RECORD: torch.frombuffer(bytearray(kept), dtype=torch.uint8)}


def cloned(item: Any) -> Any:
    """Returns the item with copies of its tensors."""
    return by_leaf(item, _copied)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) or is_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_on_cpu(data: Any) -> bool:
    """True if all tensors and TensorDicts in the data are on the CPU."""
    where, take = getattr(data, "device", None), take_of(type(data))
    if isinstance(where, torch.device) and where.type != "cpu":
        return False
    return take is None or all(map(_is_on_cpu, take(data)[-1]))
