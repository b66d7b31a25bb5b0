"""Codecs for a list in one process, whose items are stored as objects or as bodies of records."""

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

_RECORD = "shmbuffer.record"  # key of the bytes of a record body in a `state_dict`


class ItemCodec:
    """Stores items as Python objects.

    Args:
        device: device to which tensors in the items are moved. None does not move them.
        records: codec for bodies of records, which a save by a `BodyCodec` contains.
    """

    def __init__(self, device: torch.device | None, records: TensorRecordCodec) -> None:
        self.device = device
        self._records = records

    def keep(self, item: Any) -> Any:
        """Converts an item to its stored form."""
        return item if self.device is None else to_device(item, self.device)

    def encode(self, data: Any, single: bool) -> list[Any]:
        """Returns the stored forms of the items in a batch, or of one item if ``single``."""
        if single:
            return [self.keep(data)]
        items = unbound(data)
        return items if self.device is None else [self.keep(item) for item in items]

    def give(self, kept: Any) -> Any:
        """Converts a stored form back to the item."""
        return kept

    def give_all(self, kept: list[Any]) -> Any:
        """Converts stored forms back to items, as a list or a `RawBatch`."""
        return kept

    def accept(self, saved: Any) -> Any:
        """Converts a saved item, a record body or a Python object, to its stored form.

        Raises:
            SchemaMismatchError: the body was compressed with a ``compression_fn``, but the storage
                has no ``decompression_fn``.
        """
        if type(saved) is not RecordBody:
            return self.keep(saved)
        self._require_function(saved)
        return self._accept_body(saved)

    def accept_state(self, saved: Any) -> Any:
        """Converts an item from a `state_dict` to its stored form, with copies of its tensors."""
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
    """Stores items as bodies of records, or as Python objects if a record cannot contain them."""

    def encode(self, data: Any, single: bool) -> list[Any]:
        """Returns the stored forms of the items in a batch, or of one item if ``single``."""
        if not (single or is_batch(data)):
            data = unbound(data)  # a list, because the loops below can need the items twice
        if self.device is not None or _is_on_cpu(data):  # records do not store devices
            try:
                return self._records.encode(data, single).bodies()
            except RefusedError:  # stored as objects instead
                pass
        return [super().keep(data)] if single else [self.keep(item) for item in unbound(data)]

    def keep(self, item: Any) -> Any:
        """Converts an item to its stored form."""
        return self.encode(item, True)[0]

    def give(self, kept: Any) -> Any:
        """Decodes the body of a record. Returns a Python object unchanged."""
        return self._decoded(kept) if type(kept) is RecordBody else kept

    def give_all(self, kept: list[Any]) -> Any:
        """Returns a `RawBatch` if all items are bodies of records, otherwise a list of items."""
        if kept and set(map(type, kept)) == {RecordBody}:
            return RawBatch(join(kept), self._records.decoder)
        return [self.give(one) for one in kept]

    def _accept_body(self, body: RecordBody) -> RecordBody:
        return body


def for_state(kept: Any) -> Any:
    """Converts the stored form of an item to the form in a `state_dict`.

    The body of a record becomes a dict with its bytes. A Python object is not changed.
    """
    if type(kept) is not RecordBody:
        return kept
    return {_RECORD: torch.frombuffer(bytearray(kept), dtype=torch.uint8)}


def cloned(item: Any) -> Any:
    """Returns an item with copies of its tensors and arrays."""
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
