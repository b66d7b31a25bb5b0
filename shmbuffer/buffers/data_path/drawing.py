"""Reads the items of a sample: in one native call, after the sampler's choice, or from a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.data_path.sample_info import ANCHORS
from shmbuffer.items import limits
from shmbuffer.items.keys import GENERATION
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.sampler import ATTEMPTS, draw_key, in_storage
from shmbuffer.saves.checkpoints import has_its_own
from shmbuffer.tensors import pinned

Choice = tuple[Any, dict[Any, Any]]
"""The result of a sampler: indices, and a dict with further entries of the sample."""


def drawn(
    plan: Plan, count: int, *, pins: bool, key: int | None = None, beta: float | None = None
) -> Batch:
    """Draws, gathers, validates and weights items in one native call.

    Args:
        plan: plan of the buffer, whose ``draws`` must be True.
        count: number of items.
        pins: True if the items are gathered in pinned memory.
        key: seed of the draw. If None, takes the next seed from the sampler.
        beta: exponent of the importance weights. If None, uses the sampler's beta.

    Returns:
        The items, and the entries of the sample.
    """
    storage, by_priority = plan.storage, plan.by_priority
    key = draw_key(plan.sampler, storage) if key is None else key
    if by_priority is None:
        beta = None
    elif beta is None:
        beta = by_priority.beta
    with pinned.read_into_pinned(pins):
        data, index, tickets, weights = storage.draw(count, key, beta)
    if by_priority is not None and by_priority.dtype is not torch.float32:
        weights = by_priority._weights(index, weights)
    return data, plan.info.entries(in_storage(storage, index), weights, tickets)


def chosen(
    plan: Plan, index: Any, known: dict[Any, Any], again: Callable[[Any], Choice] | None = None
) -> Batch:
    """Reads the items that a sampler chose. If an item was overwritten, other items are chosen.

    Args:
        plan: plan of the buffer.
        index: index of the chosen items.
        known: the sampler's further entries.
        again: function that chooses items again. If None, calls the sampler.

    Returns:
        The items, and the entries of the sample.

    Raises:
        IndexError: items were overwritten during each of 16 attempts.
    """
    for _ in range(ATTEMPTS):
        if plan.info.generation:
            known = _tracked(plan, index, known)
        data = _held(plan, index, known) if plan.reader is None else _read(plan, index, known)
        if data is not None:
            return data, plan.info.of_choice(index, known)
        with plan.choosing():
            drawn = known.get(ANCHORS, index)
            index, known = again(drawn) if again else plan.sampler._again(plan.storage, drawn)
    raise written_over(plan)


def expanded(plan: Plan, index: Any, known: dict[Any, Any]) -> Choice:
    """Adds the further items of each sample unit to a draw, such as the steps of a window.

    If an item was overwritten in the meantime, the sampler draws again.
    """
    if plan.unit is None:
        return index, known
    for _ in range(ATTEMPTS):
        found = plan.unit._expand(index, known, plan.storage)
        if found is not None:
            return found[0], {**found[1], ANCHORS: index}
        index, known = plan.sampler._again(plan.storage, index)
    raise written_over(plan)


def written_over(plan: Plan) -> IndexError:
    """Returns the error for a sample that was overwritten during each attempt to read it."""
    return IndexError(
        f"the items that the {type(plan.sampler).__name__} chose were overwritten during each of "
        f"{ATTEMPTS} attempts to read them; use a larger buffer, or write more slowly"
    )


def take_batch(plan: Plan, ring: Ring, count: int) -> Batch | None:
    """Takes the oldest ``count`` items from a queue. Returns None if the buffer is not a queue."""

    def read(elements: Ints, generation: Ints) -> Batch | None:
        index, tickets = torch.from_numpy(elements), torch.from_numpy(generation)
        where = in_storage(plan.storage, index)
        data = _held(plan, where, {GENERATION: tickets})
        return None if data is None else (data, plan.info.entries(where, None, tickets))

    return limits.take_oldest(ring, count, read)


def _tracked(plan: Plan, index: Any, known: dict[Any, Any]) -> dict[Any, Any]:
    """Adds the tickets of the chosen items to ``known``.

    Returns ``known`` unchanged if it contains tickets, if the storage is shared or does not belong
    to this package, or if an item has no ticket.
    """
    backed = plan.ring_backed
    if GENERATION in known or backed is None or backed.shared:
        return known
    tickets = backed.tickets(index)
    return known if (tickets < 0).any() else {**known, GENERATION: tickets}


def _read(plan: Plan, index: Any, known: dict[Any, Any]) -> Any:
    """Reads the items of each sample unit, and returns the assembled sample.

    Returns None if an item was overwritten.
    """
    assert plan.ring_backed is not None
    found = plan.reader.read(index, known[GENERATION])
    return None if found is None else plan.ring_backed.to_device(plan.reader.build(found))


def _held(plan: Plan, index: Any, known: dict[Any, Any]) -> Any:
    """Returns the items at ``index``, or None if an item was overwritten or removed.

    If the buffer is not shared, a removed item raises IndexError instead.
    """
    storage = plan.storage
    if plan.limits.ring is not None:
        plan.limits.ring.require_linked()
    tickets = known.get(GENERATION)
    try:
        if tickets is None:
            return storage.get(index) if has_its_own(storage, "get") else storage.fetch(index)
        return storage.fetch_held(index, tickets)
    except IndexError:
        if not plan.shared:
            raise
        return None
