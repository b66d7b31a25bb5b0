"""Records of items with tensors, also by a user's function; of batches, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from shmbuffer.items.records import encoder
from shmbuffer.items.records.columns import Columns
from shmbuffer.items.records.compression import Zstd
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.tensors.form.batches import is_batch, unbound
from shmbuffer.tensors.records.columns import of_batch
from shmbuffer.tensors.records.memory import Compress, compressed


class TensorEncoder(encoder.Encoder):
    """Makes records of items, tensors and TensorDicts too; see `items.records.encoder`.

    Raises:
        ValueError: ``own`` beside ``zstd``.
        TypeError: ``keys`` is text, and no list of keys.
    """

    def __init__(
        self,
        *,
        zstd: Zstd | None = None,
        # the user's ``compression_fn``, in place of zstd: called with each tensor that has a number
        # in it (on the CPU), with the numbers of each numpy array as a tensor where torch has their
        # dtype, else with their bytes, and with bytes. Gives a uint8 tensor
        own: Compress | None = None,
        keys: Iterable[Any] | None = None,  # with ``own``, None is all but text
    ) -> None:
        if own is not None and zstd is not None:
            raise ValueError("compression_fn replaces zstd; leave one of them out")
        super().__init__(zstd=zstd, keys=keys)
        if own is not None:
            self.own = partial(compressed, own)

    def listed(self, data: Any) -> Any:
        """See `items.records.encoder`."""
        return data if is_batch(data) and len(data.shape) else unbound(data)

    def items(self, data: Any) -> list[Any]:
        """See `items.records.encoder`."""
        return unbound(data)

    def columns(self, data: Any) -> list[tuple[Ints, Columns]]:
        """See `items.records.encoder`; of a batch as it is, where it can be."""
        count = len(data) if self.own is None and is_batch(data) else 0
        columns = of_batch(data) if count else None
        return super().columns(data) if columns is None else [(np.arange(count), columns)]
