"""Defines the base class of the NumPy client, with its settings, counters and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import numpy as np

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.form.arrays import named
from shmbuffer.items.form.kit import ARRAYS
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.indices import as_int
from shmbuffer.items.keys import OWN_KEYS, WEIGHT_KEYS
from shmbuffer.items.limits import Limits
from shmbuffer.items.maximum import MaxPriority
from shmbuffer.items.raw_priorities import as_beta
from shmbuffer.memory import Engine, RateLimiter, Ring, Schema, weights
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import path_of
from shmbuffer.memory.mapped import recorded
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.memory.weights import Weights
from shmbuffer.numpy.rows import ArrayRows

if TYPE_CHECKING:
    from shmbuffer.numpy.array_records import ClientRecords

Rows: TypeAlias = "ArrayRows | ClientRecords"

_DEFAULT_BETA = 0.4
_PLAIN_FAMILY = ("ReplayBuffer", "PrioritizedReplayBuffer")
"""Buffer classes that treat a dict as a PyTree and do not read priorities from the data."""


class Handle:
    """Base class for the NumPy client, to which subclasses add reads and writes."""

    _rows_lock = ForkLock()  # held while a thread creates the rows

    def __init__(
        self,
        engine: Engine,
        *,
        batch_size: int | None,
        beta: float | None,
        rng: np.random.Generator | int | None,
        dtypes: Mapping[str | tuple[str, ...], str] | None,
    ) -> None:
        settings = engine.settings
        extra = recorded.read_buffer_arguments(settings, engine.where)
        self._engine = engine
        self._rows: Rows | None = None
        self._max_priority: MaxPriority | None = None
        self._capacity, self._ndim = settings.capacity, settings.ndim
        self._batch_size = extra.get("batch_size") if batch_size is None else batch_size
        if self._batch_size is not None:
            self._batch_size = as_int("batch_size", self._batch_size)
            if self._batch_size < 1:
                raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        default_beta = _DEFAULT_BETA if extra.get("beta") is None else extra["beta"]
        self._beta = as_beta(default_beta if beta is None else beta)
        self._rng = None if rng is None else np.random.default_rng(rng)
        self._dtype_names = {path_of(key): name for key, name in (dtypes or {}).items()}
        for name in self._dtype_names.values():
            if name not in DTYPES:
                raise ValueError(
                    f"dtypes: {name!r} is not a dtype that can be stored; use one of {list(DTYPES)}"
                )
        named_entries = extra.get("buffer") not in _PLAIN_FAMILY
        self._mapping = "tensordict" if named_entries else "dict"
        key = extra.get("priority_key") or "td_error"
        key = tuple(key) if isinstance(key, list) else key
        self._priority_key: str | tuple[str, ...] | None = key if named_entries else None
        weight_key = extra.get("weight_key")
        self._weight_keys = WEIGHT_KEYS if weight_key is None else (weight_key,)
        self._optional = OWN_KEYS
        if named_entries:
            self._optional |= {one for one in (key, weight_key) if isinstance(one, str)}
        self._reduction = extra.get("reduction") or "max"
        self._max_within_buffer = bool(extra.get("max_priority_within_buffer"))
        self._has_alpha = settings.alpha is not None
        dim = extra.get("dim_extend")
        self._dim_extend = self._ndim - 1 if dim is None else dim
        self._limits = Limits(_Source(engine), "")
        if self._open_rows() is None and settings.record_bytes:
            # The schema of records does not depend on the first write.
            nbytes = settings.record_bytes
            engine.define(Schema((), self._capacity, (), {"kind": "records"}, nbytes))

    @property
    def scratch_dir(self) -> Path | None:
        """Directory of the buffer, or None for a private buffer."""
        return self._engine.path

    @property
    def batch_size(self) -> int | None:
        """Default number of items in a sample, or None without a default."""
        return self._batch_size

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of this handle.

        Raises:
            ValueError: the new value is negative or not finite.
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = as_beta(value)

    @property
    def priority_key(self) -> str | tuple[str, ...] | None:
        """Key of the priorities in the data, or None if the buffer's class does not read them."""
        return self._priority_key

    @property
    def prioritized(self) -> bool:
        """True if items are sampled by priority."""
        ring = self._ring()
        return self._has_alpha if ring is None else ring.tree.prioritized

    @property
    def dtypes(self) -> dict[tuple[str, ...], str]:
        """Name of each leaf's dtype in torch, by its path. Empty before the first write."""
        ring = self._ring()
        return {} if ring is None else {leaf.path: leaf.dtype for leaf in ring.schema.leaves}

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """Rate limiter, which all processes share, or None if none is set."""
        return self._engine.limiter

    def __len__(self) -> int:
        """Returns the number of elements in the buffer."""
        ring = self._ring()
        return 0 if ring is None else ring.length

    def stats(self) -> dict[str, Any]:
        """Returns the same dict of numbers as `shmbuffer.ReplayBuffer.stats`."""
        counted = self._engine.stats()
        ring = self._ring()
        capacity = self._capacity if ring is None else ring.elements
        size = counted["length"]
        return {
            **counted,
            "size": size,
            "capacity": capacity,
            "utilization": size / capacity,
            "prefetch_queue_size": 0,
            "initialized": True,
        }

    # -- weights -------------------------------------------------------------------------------

    def publish(
        self, state_dict: Mapping[str, Any], step: int, *, timeout: float = weights.TIMEOUT_S
    ) -> int:
        """Publishes weights, which are a dict from names to arrays.

        See `shmbuffer.ReplayBuffer.publish`.
        """
        return weights.publish_arrays(self._engine.seat, state_dict, step, timeout, named)

    def newest(self, than: int | None = None) -> Weights | None:
        """Returns the newest weights as arrays, or None if no version is newer than ``than``.

        See `shmbuffer.ReplayBuffer.newest`.
        """
        return weights.newest_arrays(self._engine.seat, than)

    # -- leaving -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes all committed items to the disk, so that they survive a power cut.

        Raises:
            DurabilityError: the disk reported an error.
        """
        self._engine.flush()

    def close(self) -> None:
        """Detaches from the buffer. Committed items remain in its directory.

        Further calls have no effect.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a handle cannot be sent to another process; send {str(self._engine.where)!r} "
            "instead, and call shmbuffer.numpy.attach() there"
        )

    def __repr__(self) -> str:
        leaves = ", ".join(f"{'.'.join(path)}: {dtype}" for path, dtype in self.dtypes.items())
        return f"shmbuffer.numpy.{type(self).__name__}({self._engine.where}, {{{leaves}}})"

    # -- inside: the ring ----------------------------------------------------------------------

    def _ring(self) -> Ring | None:
        """Returns the ring, or None before the first write."""
        rows = self._rows or self._open_rows()
        return None if rows is None else rows.ring

    def _open_rows(self) -> Rows | None:
        """Returns the rows of the ring, and creates them if necessary. None before any write."""
        ring = self._engine.ring()
        if ring is None:
            return None
        with self._rows_lock:
            if self._rows is None:
                self._rows = self._create_rows(ring)
        return self._rows

    def _create_rows(self, ring: Ring) -> Rows:
        """Creates the object that reads and writes the rows or records of a ring."""
        prioritized = ring.tree.prioritized
        if prioritized and self._max_within_buffer:
            self._max_priority = MaxPriority(ring)
            ring.tree.initial = self._max_priority.default
        rows: Rows
        if ring.records is not None:
            from shmbuffer.numpy.array_records import ClientRecords  # with zstandard

            rows = ClientRecords(self._engine, ring, named=self._mapping == "tensordict")
        else:
            leaves = Leaves.of_schema(ARRAYS, ring.schema, self._engine.where)
            leaves.allow(self._optional)
            key = self._priority_key if prioritized else None
            rows = ArrayRows(ring, leaves, key)
        self._limits = Limits(_Source(self._engine, ring), "")
        return rows

    def _need(self) -> Rows:
        """Returns the rows of the ring.

        Raises:
            EmptyBufferError: nothing has been written yet.
        """
        rows = self._rows or self._open_rows()
        if rows is None:
            raise EmptyBufferError("Cannot sample from an empty storage; write to it first")
        return rows


@dataclass(frozen=True)
class _Source:
    """Provides the engine and the ring of a handle to `Limits`."""

    open_engine: Engine
    known: Ring | None = None

    def engine(self) -> Engine:
        """Returns the engine of the handle."""
        return self.open_engine

    def ring(self) -> Ring | None:
        """Returns the ring, or None before the first write."""
        return self.known or self.open_engine.ring()
