"""Encodes items and batches of tensors and TensorDicts as records."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from shmbuffer.items.records import encoder
from shmbuffer.items.records.columns import Columns
from shmbuffer.items.records.compression import Zstd
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.tensors.form.tensor_batches import is_batch, unbound
from shmbuffer.tensors.records.tensor_columns import of_batch
from shmbuffer.tensors.records.tensor_memory import Compress, compressed


class TensorEncoder(encoder.Encoder):
    """Encodes items that may contain tensors and TensorDicts (`items.records.encoder`).

    Raises:
        ValueError: both ``own`` and ``zstd`` are given.
        TypeError: ``keys`` is a str instead of a list of keys.
    """

    def __init__(
        self,
        *,
        zstd: Zstd | None = None,
        # The user's ``compression_fn``, which replaces zstd. It is called with each non-empty leaf
        # as a tensor on the CPU. NumPy arrays whose dtype torch does not have, and bytes, are
        # passed as uint8. It returns a uint8 tensor.
        own: Compress | None = None,
        # Keys of the leaves that are compressed. With ``own``, None stands for all except text.
        keys: Iterable[Any] | None = None,
    ) -> None:
        if own is not None and zstd is not None:
            raise ValueError("compression_fn and zstd cannot be combined; leave one of them out")
        super().__init__(zstd=zstd, keys=keys)
        if own is not None:
            self.own = partial(compressed, own)

    def listed(self, data: Any) -> Any:
        """Returns a batch unchanged, and converts other data to a list of items."""
        return data if is_batch(data) and len(data.shape) else unbound(data)

    def items(self, data: Any) -> list[Any]:
        """Returns a list of the items in a list or batch."""
        return unbound(data)

    def columns(self, data: Any) -> list[tuple[Ints, Columns]]:
        """Returns the columns of the items, and the row numbers that belong to each.

        A batch is not split into items if this can be avoided.
        """
        count = len(data) if self.own is None and is_batch(data) else 0
        columns = of_batch(data) if count else None
        return super().columns(data) if columns is None else [(np.arange(count), columns)]
