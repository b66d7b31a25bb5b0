"""H9: an acknowledged update applies until the next one, and to no other item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.torture import items
from tests.torture.history import NEVER
from tests.torture.image import Image


def broken_priorities(
    updates: NDArray[Any],
    image: Image,
    keys: items.Keys,
    *,
    since: int,
    uncertain: NDArray[np.bool_],
) -> Iterator[str]:
    """Describes what is wrong with the priorities of the items that are present.

    Args:
        updates: the updates, as in `History.updates`.
        image: the contents of the directory.
        keys: the keys of its committed slots.
        since: when a copy was last put back. Updates that were acknowledged before may be missing.
        uncertain: items without a known priority, because they were copied while they changed.
    """
    updates = updates[np.argsort(updates["key"], kind="stable")]
    returned = updates[(updates["ended"] != NEVER) & (updates["began"] >= since)]
    slots, tickets = image.committed, image.tickets[image.committed]
    latest = _latest(returned, tickets)
    raw = image.raw[slots]
    given = items.key_of_priority(raw)
    own = given == keys.astype(np.int64)
    at = np.searchsorted(updates["key"], np.maximum(given, 0).astype(np.uint64))
    at = np.minimum(at, max(len(updates) - 1, 0))
    for i, (slot, ticket) in enumerate(zip(slots.tolist(), tickets.tolist(), strict=True)):
        if uncertain[i]:
            continue
        if own[i]:
            if ticket in latest:
                yield f"H9: the item in slot {slot} has its first priority, and was updated"
        elif not len(updates) or updates["key"][at[i]] != given[i]:
            yield f"H9: nobody gave slot {slot} its priority, {raw[i]!r}"
        elif updates["ticket"][at[i]] != ticket:
            yield f"H9: the priority in slot {slot} was given to another item"
        elif latest.get(ticket, 0) > updates["ended"][at[i]]:
            yield f"H9: the item in slot {slot} has an older priority than the last one"
    yield from _applied(returned, tickets)


def _latest(returned: NDArray[Any], tickets: NDArray[np.int64]) -> dict[int, int]:
    """Returns when the last update of each ticket began, among updates that have returned."""
    there = returned[np.isin(returned["ticket"], tickets)]
    latest: dict[int, int] = {}
    for ticket, began in zip(there["ticket"].tolist(), there["began"].tolist(), strict=True):
        latest[ticket] = max(began, latest.get(ticket, 0))
    return latest


def _applied(returned: NDArray[Any], tickets: NDArray[np.int64]) -> Iterator[str]:
    """H9: a call applied at least as many rows as it named items that are still present."""
    whose = returned["key"].astype(np.int64) >> 32
    _, first, call = np.unique(
        np.stack([whose, returned["ended"]], axis=1),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    there = np.isin(returned["ticket"], tickets)
    named = np.bincount(call.ravel(), weights=there, minlength=len(first))
    applied = returned["applied"][first]
    for i in (named > applied).nonzero()[0][:5]:
        yield f"H9: an update named {named[i]:g} items that are there, and changed {applied[i]}"
