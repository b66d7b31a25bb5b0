"""The newest item of each stream, as the end of its trajectory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.items.indices import elements_of
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers.sampler import in_storage
from shmbuffer.storages import Storage


class Newest(NamedTuple):
    """Items of a storage."""

    index: Any  # for `Storage.get`
    tickets: torch.Tensor


def newest_of_streams(storage: Storage) -> Newest | None:
    """The newest item of each stream of each collector, or None; RuntimeError: not changeable."""
    if not storage.supports_conditional_update:
        raise RuntimeError(
            f"end_streams: a {type(storage).__name__} cannot change items in place; use a "
            "LazyTensorStorage or a LazyMemmapStorage. Nothing was changed"
        )
    ring = storage.ring()
    if ring is None:
        return None
    words = ring.live.words[: ring.live.used()].copy()
    held = np.flatnonzero(slots.committed(words))
    held = held[np.argsort(-((held - ring.head) % ring.capacity))]  # a change gives a new ticket
    found = held[np.unique(ring.live.sources[held], return_index=True)[1]]
    if not len(found):
        return None
    elements = elements_of(found, ring.width)
    tickets = np.repeat(slots.tickets(words[found]), ring.width)
    return Newest(in_storage(storage, torch.from_numpy(elements)), torch.from_numpy(tickets))


def patch_of(data: Any, end: Key, terminated: Key | None, truncated: Key | None) -> dict[Any, Any]:
    """The patch that makes ends of these items; raises as `Changes.end_streams`."""
    keys = [end, *(key for key in (terminated, truncated) if key is not None)]
    if len(set(keys)) < len(keys):
        raise ValueError(f"end_streams: the keys have to differ, got {keys}. Nothing was changed")
    flags = {key: data.get(key, None) for key in keys}
    if flags[end] is None:
        raise KeyError(f"end_streams: the items have no entry {end!r}. Nothing was changed")
    for key, flag in flags.items():
        if flag is not None and flag.dtype is not torch.bool:
            raise TypeError(f"end_streams: {key!r} is {flag.dtype}, not bool. Nothing was changed")
    patch = {end: torch.ones_like(flags[end])}
    if truncated is not None and flags[truncated] is not None:
        own = None if terminated is None else flags[terminated]
        over = flags[end] if own is None else flags[end] | own
        patch[truncated] = flags[truncated] | ~over
    return patch
