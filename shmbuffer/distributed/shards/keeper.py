"""The actor on a node: it owns the buffer there, and draws from it for learners elsewhere.

    Host ──▶ Keeper ──▶ Owner ──▶ buffer in <scratch_dir>/<node>

Ray starts it again on its node where it dies, and it opens the directory as it finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.distributed.host import Host
from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.shards.message import packed
from shmbuffer.distributed.shards.pieces import identity_in, is_prioritized, piece_of, ring_in
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Totals
from shmbuffer.replay.storages.tensor import TensorStorage


class InNode:
    """Makes the storage of a node: that of all nodes, in a directory of its own.

    Args:
        storage: a ``functools.partial`` of a storage with ``scratch_dir``.
        node: name of the node, which names the directory.
    """

    def __init__(self, storage: Any, node: str) -> None:
        self._storage, self._node = storage, node

    def __call__(self) -> Any:
        """The storage; what is in its directory stays."""
        base = self._storage.keywords["scratch_dir"]
        return self._storage(scratch_dir=Path(base) / self._node)


class Keeper(Host):
    """The owner of one shard.

    Args:
        made_of: see `Host`.
        node: name of its node.
    """

    def __init__(self, made_of: bytes, node: str) -> None:
        super().__init__(made_of)
        self._node = node
        if self._owner is not None:
            self._owner.node = node

    def draw(self, count: int, key: int, beta: float | None, largest: float) -> Any:
        """A `Piece`, as a message."""
        return self._told(
            lambda owner: piece_of(owner.buffer, self._node, count, key, beta, largest)
        )

    def update(
        self,
        shard: int,
        index: NDArray[np.int64],
        priority: NDArray[np.float64],
        generation: NDArray[np.int64] | None,
    ) -> Any:
        """Set priorities of items of ``shard``: a message, ``(applied, stale, lost), totals``."""
        return self._told(
            lambda owner: updated(owner, self._node, shard, index, priority, generation)
        )

    def news(self) -> Any:
        """``(identity, totals, capacity)`` of the shard as it is now, as a message."""
        return self._told(lambda owner: news_of(owner, self._node))

    def leave(self) -> None:
        """The buffer ends."""
        if self._owner is not None:
            self._owner.leave()

    def face(self) -> Any:
        """What a client has to know of the buffer, as a message."""
        return self._told(face_of)

    def _told(self, tell: Callable[[Owner], Any]) -> NDArray[np.uint8]:
        """What is told, or the error to raise, as a message."""
        if self._owner is None:
            return packed((False, self._failure))
        try:
            with self._owner.lock:
                return packed((True, tell(self._owner)))
        except Exception as error:  # raised again where it was asked for
            return packed((False, self._error(error)))


def updated(
    owner: Owner,
    node: str,
    shard: int,
    index: NDArray[np.int64],
    priority: NDArray[np.float64],
    generation: NDArray[np.int64] | None,
) -> tuple[tuple[int, int, int], Totals]:
    """Set priorities where the items are still those of this shard."""
    buffer = owner.buffer
    ring = ring_in(buffer)
    if identity_in(buffer, node) != shard:
        return (0, 0, len(priority)), ring.totals()
    if generation is None:
        found = buffer.update_priority(index, priority)
    else:
        found = buffer.update_priority(index, priority, generation=generation)
    return (found.applied, found.stale, 0), ring.totals()


def news_of(owner: Owner, node: str) -> tuple[int | None, Totals, int]:
    """What the shard is, and what its items weigh."""
    buffer = owner.buffer
    capacity = buffer.storage.max_size
    try:
        totals = ring_in(buffer).totals()
    except EmptyBufferError:
        return None, Totals(0.0, 0.0, None, 0), capacity
    return identity_in(buffer, node), totals, capacity


def face_of(owner: Owner) -> dict[str, Any]:
    """How the buffer of a shard looks to who samples."""
    buffer = owner.buffer
    sampler: Any = buffer.sampler
    prioritized = is_prioritized(buffer)
    return {
        "batch_size": buffer.batch_size,
        "priority_key": buffer._priority_key,
        "weight_keys": buffer._weight_keys,
        "samples_tensordicts": buffer._mapping == "tensordict",
        "by_item": not isinstance(buffer.storage, TensorStorage),
        "beta": sampler.beta if prioritized else None,
        "reduction": sampler.reduction if prioritized else "max",
    }
