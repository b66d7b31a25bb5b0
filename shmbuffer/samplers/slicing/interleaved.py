"""Warns about rows of several environments that were written as one sequence.

    extend([a0, b0, c0])  extend([a1, b1, c1])   ──▶  a0 b0 c0 a1 b1 c1

The rows of a vector environment belong to one stream unless the writer names the streams. The ring
does not record that the rows were collected in several environments, but their observations show
it. In the example, the next observation of an item equals the observation of the item three
positions later.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import KeyPath, key_of
from shmbuffer.samplers.item_entries import pick
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_structure import leaves_of

_LEAST, _MOST = 64, 8192  # minimum and maximum number of items in a stream that are compared
_BYTES = 2**24  # approximate limit on the bytes of the observations that are compared
_LAGS = 32  # number of distances that are tried
_PAIRS = 8  # minimum number of pairs at a distance; with fewer, the distance is not considered
_FOLLOWS = 0.2  # a larger fraction of matches at distance 1 indicates a single environment
_AGREES = 0.8  # at least this fraction at another distance indicates several environments
_ENDS: tuple[KeyPath, ...] = (("next", "done"), ("done",))


class Interleaved:
    """Checks the newest items of a ring until it is clear whether a stream mixes environments."""

    def __init__(self) -> None:
        self._wanted = _LEAST  # the next check waits for this number of items; 0: no more checks

    def check(self, storage: Any, ring: Ring) -> None:
        """Warns once if consecutive items of a stream were collected in different environments.

        Cost: one to eight reads of up to 8,192 items, when the first slices are drawn from a
            buffer.
        """
        length = ring.length
        if not self._wanted or length < self._wanted or ring.width > 1:
            return
        ends = length == ring.capacity or length >= _MOST
        self._wanted = 0 if ends else 2 * length
        try:
            lag = _lag_of(storage, _newest_of_a_stream(ring))
        except (IndexError, RuntimeError):  # items were overwritten, or their shapes differ
            return
        if lag is None:
            return
        self._wanted = 0
        if lag[0] > 1:
            places, entry = lag
            warnings.warn(
                "slices and windows follow the items of a stream, but the next observation of an "
                f"item ({key_of(entry)!r}) is the observation of the item {places} places later. "
                f"These look like rows of {places} interleaved environments, which slices would "
                f"mix. Write them with extend(rows, streams=range({places})) or with a Recorder. "
                f"If they are {places}-step transitions of one environment, ignore this warning",
                stacklevel=2,
            )


def _newest_of_a_stream(ring: Ring) -> Ints:
    """Returns slots of the newest items in the stream of the newest item, oldest first.

    Only the newest 8,192 slots of the ring are considered.
    """
    count = min(ring.capacity, _MOST)
    slots: Ints = (ring.head - np.arange(count, 0, -1)) % ring.capacity
    slots = slots[ring.live.holds(slots)]
    sources = ring.live.sources[slots]
    return slots[sources == sources[-1]] if len(slots) else slots


def _lag_of(storage: Any, slots: Ints) -> tuple[int, KeyPath] | None:
    """Returns how many positions later an item's next observation is stored as an observation.

    Returns:
        The distance in items, and the path of the entry that contains the next observation. The
        distance is 1 if the items come from one environment or have no such entry. None if there
        are too few items, or if no distance has enough matches.
    """
    if len(slots) < _LEAST:
        return None
    leaves = leaves_of(storage.get(int(slots[-1])))
    pairs = [
        (leaf.nbytes, path, after)
        for path, leaf in leaves.items()
        for after in (("next", *path), (*path[:-1], f"next_{path[-1]}"))
        if isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool and after in leaves
    ]
    if not pairs:
        return 1, ()
    nbytes, path, after_path = max(pairs)
    batch = storage.get(torch.from_numpy(slots[-max(_LEAST, _BYTES // max(nbytes, 1)) :]))
    before, after = pick(batch, path), pick(batch, after_path)
    if before is None or after is None or before.shape != after.shape:
        return 1, ()
    count = len(before)
    before, after = before.reshape(count, -1), after.reshape(count, -1)
    done = next((one for key in _ENDS if (one := pick(batch, key)) is not None), None)
    goes_on = cpu.ones(count, dtype=torch.bool)
    if done is not None:
        goes_on = ~done.reshape(count, -1).any(-1)

    def share(lag: int) -> float:
        """Returns the fraction of items whose next observation is found ``lag`` items later.

        Returns 0 if there are too few pairs of items at this distance.
        """
        which = goes_on[:-lag]
        if int(which.sum()) < _PAIRS:
            return 0.0
        return float((after[:-lag][which] == before[lag:][which]).all(-1).float().mean())

    if share(1) > _FOLLOWS:
        return 1, path
    for first in torch.nonzero(goes_on[: count // 2])[:4].flatten().tolist():
        same = (before[first + 2 :] == after[first]).all(-1)
        for lag in (torch.nonzero(same)[:_LAGS].flatten() + 2).tolist():
            if share(lag) >= _AGREES:
                return lag, after_path
    return None
