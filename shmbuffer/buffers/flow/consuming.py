"""Samples that are consumed: taken under leases, and acknowledged.

sample(lease=60.0) ──▶ items, with their lease ──▶ train ──▶ ack(batch)
sample()           ──▶ items, acknowledged before they are returned
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.items.keys import GENERATION, INDEX, LEASE
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.format.ledger import Acknowledged
from shmbuffer.memory.system.deadline import nanoseconds
from shmbuffer.samplers.taking import Consumes, consumes
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.deferred import is_as_made, to_come

_KEYS = INDEX, GENERATION, LEASE
_BYTES = 8  # of each


class Consuming(Parts):
    """Acknowledges items, and shows consumers."""

    @eager
    def ack(self, batch: Any) -> Acknowledged:
        """Acknowledge the items of a batch, so that the consumer does not get them again.

        Each item counts separately, and an `ack` may be repeated after an error. An item that was
        delivered again or overwritten since is refused and counted.

        Args:
            batch: a sample with ``lease=``, its ``info``, or part of either; or what `leased`
                gave; also pickled or saved meanwhile. Only the entries ``"index"``,
                ``"index_generation"`` and ``"index_lease"`` are read.

        Returns:
            `Acknowledged`: how many were acknowledged under their lease, and how many too late.

        Raises:
            KeyError: ``batch`` lacks these entries.
            ConsumerError: the consumer was removed.
            TypeError: the sampler has no consumer.

        Cost: one native call; 0.1 to 0.5 µs an item more for a part of a lazy stack whose items
            were read, and 2 µs for one that lost items, or was put together of several.
        """
        if (rows := _as_they_are(batch)) is not None:
            return self._consumer().ack_rows(self._storage, rows)
        rows = [_first_of_item(batch, key) for key in _KEYS]
        index, tickets, leases = (row.detach().cpu().numpy() for row in rows)
        return self._consumer().ack(self._storage, leases, index, tickets)

    def leased(self) -> dict[str, torch.Tensor]:
        """Every item that this handle holds under a lease, for `ack`.

        Saved with ``dumps(path, extra={"leased": rb.leased()})``, it lets a restarted learner
        acknowledge what its save had trained on, unless others got it meanwhile.

        Returns:
            ``"index"``, ``"index_generation"`` and ``"index_lease"``, int64 ``[n]``.

        Cost: O(capacity), some milliseconds a million.
        """
        held = self._consumer().opened(self._storage).held()
        found = (torch.from_numpy(one.astype("int64")) for one in held)
        return dict(zip(_KEYS, found, strict=True))

    def consumers(self) -> list[ConsumerStatus]:
        """The state of each consumer: position, counts, and the items that clients hold."""
        ring = ring_of(self._storage)
        return [] if ring is None else ring.consumers.status()

    def remove_consumer(self, name: str) -> bool:
        """Remove a consumer, so that writers do not wait for it; returns whether it existed.

        The next call of a learner that uses it is a `ConsumerError`.
        """
        ring: Ring | None = ring_of(self._storage)
        return ring is not None and ring.consumers.remove(name)

    # -- inside --------------------------------------------------------------------------------

    def _consumer(self) -> Consumes:
        if consumes(self._sampler):
            return self._sampler
        raise TypeError(
            f"the sampler is a {type(self._sampler).__name__}, which delivers nothing to "
            "acknowledge; give the buffer a ConsumingSampler, or consume_after_n_samples, or its "
            "sampler a consumer"
        )

    def _delivering(
        self, lease: float | None, draw: Callable[[int], Batch]
    ) -> Callable[[int], Batch]:
        """A draw that leases what it takes, where the sampler consumes."""
        if not consumes(self._sampler):
            if lease is not None:
                self._consumer()  # raises
            return draw
        if lease is not None:
            nanoseconds(lease)  # a ValueError before anything is taken
        return lambda count: self._delivered(lease, draw, count)

    def _delivered(self, lease: float | None, draw: Callable[[int], Batch], count: int) -> Batch:
        with self._consumer().taking(lease) as taking:
            batch = draw(count)
            if lease is None:
                taking.acknowledge()
        return batch


def _as_they_are(batch: Any) -> list[torch.Tensor] | None:
    """The entries of a sample, if the core can read them in place; else None."""
    entries: Any = None
    if type(batch) is TensorDict:
        entries = batch._tensordict
    elif isinstance(batch, LazyStackedTensorDict):
        entries = to_come(batch) or _next_to_each_other(batch)
    if entries is None:
        return None
    rows: list[Any] = [entries.get(key) for key in _KEYS]
    for row in rows:
        if type(row) is not torch.Tensor or row.dtype is not torch.int64 or row.dim() != 1:
            return None
        if not row.is_cpu or not row.is_contiguous() or row.numel() != rows[0].numel():
            return None
    return rows


def _next_to_each_other(stack: LazyStackedTensorDict) -> dict[str, torch.Tensor] | None:
    """The entries of a stack whose items have rows of one sample, in order; else None."""
    items = stack.tensordicts
    if not items or any(type(item) is not TensorDict for item in (items[0], items[-1])):
        return None
    found, count = {}, len(items)
    for key in _KEYS:
        first, last = (one._tensordict.get(key) for one in (items[0], items[-1]))
        if not all(type(one) is torch.Tensor and not one.dim() for one in (first, last)):
            return None
        if last.data_ptr() - first.data_ptr() != _BYTES * (count - 1):
            return None
        found[key] = first.as_strided((count,), (1,), first.storage_offset())
    if is_as_made(stack):  # so have those between; to look at each takes as long as all the rest
        return found
    begin = found[INDEX].data_ptr()
    try:  # what has the row of one of them has that of all
        places = [item._tensordict[INDEX].data_ptr() for item in items]
    except (KeyError, AttributeError):
        return None
    return found if places == list(range(begin, begin + _BYTES * count, _BYTES)) else None


def _first_of_item(batch: Any, key: str) -> torch.Tensor:
    """The first row of each item, for items with dimensions."""
    try:
        found = batch[key]
    except (KeyError, TypeError, IndexError):
        raise KeyError(
            f"ack: there is no entry {key!r}; give it a batch of sample(lease=...), or the info of "
            "sample(lease=..., return_info=True)"
        ) from None
    rows = cpu.as_tensor(found)
    if rows.ndim < 2:
        return rows.reshape(-1)
    return rows.reshape(len(rows), -1)[:, 0]
