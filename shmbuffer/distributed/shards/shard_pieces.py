"""Draws a piece of a batch from each shard, and joins the pieces."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from shmbuffer.buffers.data_path.drawing import drawn
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.nearby import engine_of
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring, Totals
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form.tensor_nodes import is_collection


class Piece(NamedTuple):
    """The part of a batch that one shard draws."""

    data: Any  # ``[n, ...]``, collated and transformed
    info: dict[str, Any]  # each ``[n]``: index, generation, and weights within this shard alone
    totals: Totals  # totals of the shard, read in the critical section that drew the items
    identity: int  # identity of the shard; see `identity_of`


NOTHING = Totals(0.0, 0.0, None, 0)
"""Totals of a shard without items."""

_uuids: weakref.WeakKeyDictionary[Ring, bytes] = weakref.WeakKeyDictionary()


def identity_of(node: str, uuid: bytes) -> int:
    """Returns the 63-bit number that identifies a shard in samples.

    Args:
        node: name of the shard's node.
        uuid: UUID of the shard's directory, so that a new directory gets a different number.
    """
    digest = hashlib.blake2b(node.encode(), key=uuid, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def identity_in(buffer: ReplayBuffer, node: str) -> int:
    """Returns the identity of a shard; see `identity_of`.

    Args:
        buffer: the shard's buffer.
        node: name of the shard's node.

    Raises:
        EmptyBufferError: the shard has no schema, because nothing has been written to it.
    """
    ring = ring_in(buffer)
    uuid = _uuids.get(ring)
    if uuid is None:
        uuid = _uuids[ring] = engine_of(buffer).superblock.uuid
    return identity_of(node, uuid)


def ring_in(buffer: ReplayBuffer) -> Ring:
    """Returns the ring of a shard's buffer. Raises EmptyBufferError before the first write."""
    ring: Ring | None = ring_of(buffer.storage)
    if ring is None:
        raise EmptyBufferError("nothing has been written to this shard yet")
    return ring


def draw_piece(
    buffer: ReplayBuffer, node: str, count: int, key: int, beta: float | None, largest: float
) -> Piece:
    """Draws a piece of a batch from a shard.

    Args:
        buffer: the shard's buffer.
        node: name of the shard's node.
        count: number of items.
        key: key of the random number generator.
        beta: exponent of the importance weights, or None without weights.
        largest: largest priority in any shard. New items of this shard get at least this priority.

    Raises:
        EmptyBufferError: the shard has no items.
    """
    ring = ring_in(buffer)
    raise_largest(ring, largest)
    plan = buffer.plan
    if plan.draws:
        data, info = buffer._reads.finish(*drawn(plan, count, pins=False, key=key, beta=beta))
        totals = ring.drawn_from()
        assert totals is not None
    else:
        sampler = buffer.sampler
        before, sampler._rng = sampler._rng, torch.Generator().manual_seed(key)
        try:
            totals = ring.totals()
            data, info = buffer._reads.read(*sampler.sample(buffer.storage, count))
        finally:
            sampler._rng = before
    return Piece(data, info, totals, identity_in(buffer, node))


def draw_pieces(
    buffer: ReplayBuffer, node: str, orders: Sequence[tuple[Any, ...]]
) -> list[Piece | None]:
    """Draws several pieces from a shard.

    Args:
        buffer: the shard's buffer.
        node: name of the shard's node.
        orders: for each piece, the arguments of `draw_piece` after ``node``.

    Returns:
        A piece for each order, or None if the shard is empty.
    """
    found: list[Piece | None] = []
    for order in orders:
        try:
            found.append(draw_piece(buffer, node, *order))
        except EmptyBufferError:
            found.append(None)
    return found


def apply_update(
    buffer: ReplayBuffer,
    node: str,
    shard: int,
    index: Ints,
    priority: Floats,
    generation: Ints | None,
) -> tuple[int, int, int]:
    """Sets priorities of items in a shard.

    Args:
        buffer: the shard's buffer.
        node: name of the shard's node.
        shard: identity of the shard from which the items were sampled. If the shard's directory
            has been replaced since, all priorities are lost.
        index: index of each item, ``[n]`` or ``[n, ndim]``.
        priority: priority of each item, ``[n]``.
        generation: generation of each item, ``[n]``, or None.

    Returns:
        The numbers of priorities that were applied, stale and lost.
    """
    ring = ring_of(buffer.storage)
    if ring is None or identity_in(buffer, node) != shard:
        return 0, 0, len(priority)
    found = buffer.update_priority(index, priority, generation=generation)
    return found.applied, found.stale, 0


def news_of(buffer: ReplayBuffer, node: str) -> tuple[int | None, Totals, int]:
    """Returns the identity, the totals and the capacity of a shard.

    The identity is None if nothing has been written to the shard.
    """
    capacity = buffer.storage.max_size
    try:
        return identity_in(buffer, node), ring_in(buffer).totals(), capacity
    except EmptyBufferError:
        return None, NOTHING, capacity


def raise_largest(ring: Ring, largest: float) -> None:
    """Makes the priority of new items in a prioritized ring at least ``largest``."""
    seen = ring.tree.max_priority
    if largest > 0 and (seen is None or largest > seen) and ring.tree.prioritized:
        ring.raise_max_priority(largest)


def join_parts(parts: Sequence[Any], places: Sequence[torch.Tensor] | None = None) -> Any:
    """Joins the data or the infos of several pieces in new memory.

    Args:
        parts: tensors, TensorDicts, or tuples, dicts or lists of them, of the same structure.
        places: for each part, the positions of its rows in the result. None concatenates the parts.

    Raises:
        TypeError: the parts are objects of another type.
    """
    first = parts[0]
    if type(first) is torch.Tensor:
        return torch.cat(list(parts), 0) if places is None else _scattered(parts, places)
    if type(first) is TensorDict and first.batch_dims == 1:
        entries = {
            key: join_parts([part.get(key) for part in parts], places) for key in [*first.keys()]
        }
        return TensorDict(entries, [sum(map(len, parts))], device=first.device)
    if isinstance(first, LazyStackedTensorDict):
        items = join_parts([[item.clone() for item in part.unbind(0)] for part in parts], places)
        return lazy_stack(items, 0)
    if is_collection(first) or isinstance(first, torch.Tensor):
        whole = torch.cat(list(parts), 0)
        return whole if places is None else whole[torch.cat(list(places)).argsort()]
    if isinstance(first, dict):
        return {key: join_parts([part[key] for part in parts], places) for key in first}
    if isinstance(first, tuple):
        columns = [join_parts(column, places) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        rows = [item for part in parts for item in part]
        if places is None:
            return rows
        return [rows[at] for at in torch.cat(list(places)).argsort().tolist()]
    raise TypeError(
        f"the shards have sampled objects of type {type(first).__name__}, which cannot be joined "
        "into one batch; return tensors, TensorDicts, or tuples, dicts or lists from the collate_fn"
    )


def _scattered(parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins tensors by copying each row once, to its position in ``places``."""
    rows = sum(part.shape[0] for part in parts)
    whole = parts[0].new_empty((rows, *parts[0].shape[1:]))
    for part, where in zip(parts, places, strict=True):
        whole.index_copy_(0, where, part)
    return whole
