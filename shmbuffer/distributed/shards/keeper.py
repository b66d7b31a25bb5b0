"""The actor on a node: it owns the buffer there, and draws from it for learners on other nodes.

    Host ──▶ Keeper ──▶ Owner ──▶ buffer in <scratch_dir>/<node>

If it dies, Ray starts it again on its node, and it recovers the directory. If the directory is
removed, the keeper ends itself, to be started again with a new one.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmbuffer.buffers import ReplayBuffer
from shmbuffer.buffers.data_path.sample_info import stack_dim_of
from shmbuffer.distributed.host import Host
from shmbuffer.distributed.nearby import engine_of
from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.shards.bank import BankState
from shmbuffer.distributed.shards.message import packed
from shmbuffer.distributed.shards.quota import Vault, has_quota
from shmbuffer.distributed.shards.shard_pieces import (
    Piece,
    identity_in,
    is_prioritized,
    pieces_of,
    ring_in,
)
from shmbuffer.errors import BufferUnlinkedError, EmptyBufferError
from shmbuffer.memory import Totals
from shmbuffer.memory.format.array_types import Bytes, Floats, Ints
from shmbuffer.watch.shards import NODE

_log = logging.getLogger(__name__)


class InNode:
    """Makes the storage of a node, from a ``functools.partial``, in a directory of its own."""

    def __init__(self, storage: Any, node: str) -> None:
        self._storage, self._node = storage, node

    def __call__(self) -> Any:
        """Makes it; the contents of its directory stay."""
        base = self._storage.keywords["scratch_dir"]
        return self._storage(scratch_dir=Path(base) / self._node)


class Keeper(Host):
    """The owner of one shard."""

    def __init__(self, made_of: bytes, node: str) -> None:
        self._node = node
        self._vault = Vault(node)
        super().__init__(made_of)
        if self._owner is not None:
            self._owner.node = node
            engine_of(self._owner.buffer).update_settings(extra={NODE: node})

    def answer(self, request: bytes) -> bytes:
        """See `Host.answer`."""
        answer = super().answer(request)
        owner = self._owner
        if owner is not None and has_quota(owner.buffer) and not pickle.loads(answer)[0]:
            self._vault.note_refusal(owner.buffer)
        return answer

    def flow(self, bank: int, state: BankState | None, order: str | int) -> Any:
        """A `KeeperReply`, as a message; see `Vault.obey`."""
        return self._told(lambda owner: self._vault.obey(owner.buffer, bank, state, order))

    def step(self, updates: list[Any], orders: list[tuple[Any, ...]]) -> Any:
        """Sets priorities, then draws, in one message: see `stepped`."""
        return self._told(lambda owner: stepped(owner, self._node, updates, orders))

    def news(self) -> Any:
        """``(identity, totals, capacity)`` of the shard, as a message."""
        return self._told(lambda owner: news_of(owner, self._node))

    def leave(self) -> None:
        """Closes the buffer."""
        if self._owner is not None:
            self._owner.leave()

    def face(self) -> Any:
        """The properties of the buffer that a client needs, as a message."""
        return self._told(face_of)

    def _error(self, error: Exception) -> bytes:
        if isinstance(error, BufferUnlinkedError):
            _log.error("the keeper of node %s ends: %s", self._node, error)
            os._exit(1)  # Ray starts it again, with a new directory
        return super()._error(error)

    def _told(self, tell: Callable[[Owner], Any]) -> Bytes:
        """A result, or the error to raise, as a message."""
        if self._owner is None:
            return packed((False, self._failure))
        try:
            with self._owner.lock:
                return packed((True, tell(self._owner)))
        except Exception as error:  # raised again by the client
            return packed((False, self._error(error)))


def stepped(
    owner: Owner, node: str, updates: list[Any], orders: list[tuple[Any, ...]]
) -> tuple[list[tuple[int, int, int]], list[Piece | None]]:
    """Sets priorities, the arguments of `updated`, then draws by the orders of `pieces_of`."""
    found = [updated(owner.buffer, node, *update) for update in updates]
    return found, pieces_of(owner.buffer, node, orders)


def updated(
    buffer: ReplayBuffer,
    node: str,
    shard: int,
    index: Ints,
    priority: Floats,
    generation: Ints | None,
) -> tuple[int, int, int]:
    """Sets priorities if the items are of this shard: how many were applied, stale and lost."""
    try:
        if identity_in(buffer, node) != shard:
            return 0, 0, len(priority)
    except EmptyBufferError:
        return 0, 0, len(priority)
    found = buffer.update_priority(index, priority, generation=generation)
    return found.applied, found.stale, 0


def news_of(owner: Owner, node: str) -> tuple[int | None, Totals, int]:
    """Identity, totals and capacity of the shard."""
    buffer = owner.buffer
    capacity = buffer.storage.max_size
    try:
        totals = ring_in(buffer).totals()
    except EmptyBufferError:
        return None, Totals(0.0, 0.0, None, 0), capacity
    return identity_in(buffer, node), totals, capacity


def face_of(owner: Owner) -> dict[str, Any]:
    """The properties of a shard's buffer that samples depend on."""
    buffer = owner.buffer
    sampler: Any = buffer.sampler
    prioritized = is_prioritized(buffer)
    return {
        "batch_size": buffer.batch_size,
        "priority_key": buffer._priority_key,
        "weight_keys": buffer._weight_keys,
        "samples_tensordicts": buffer._mapping == "tensordict",
        "stack_dim": stack_dim_of(buffer.storage),
        "beta": sampler.beta if prioritized else None,
        "reduction": sampler.reduction if prioritized else "max",
    }
