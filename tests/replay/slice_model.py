"""A model of slices that is computed item by item and compared with the samplers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

Slice = tuple[int, ...]


class Item(NamedTuple):
    """A step of one lane."""

    number: int
    """Unique number of the item: it counts in the order of writing, with 1000 for each lane."""
    done: bool
    episode: int
    lane: int = 0
    source: int = 0


class History:
    """All steps that were ever written, in the order of writing."""

    def __init__(self, seed: int, *, lanes: int = 1, ends: float = 0.25) -> None:
        self._random = random.Random(seed)
        self._ends = ends
        self._lanes = lanes
        self._episodes = [lane * 1000 for lane in range(lanes)]
        self.rows: list[list[Item] | None] = []  # one item a lane; None for a slot without items

    def steps(self, count: int, source: int = 0) -> TensorDict:
        """Returns the next steps of every lane as they are written:

        ``[count]``, or ``[lanes, count]``.
        """
        new = [[self._step(lane, source, at) for lane in range(self._lanes)] for at in range(count)]
        self.rows += new
        return as_data([list(lane) for lane in zip(*new, strict=True)], self._lanes)

    def hole(self, count: int) -> None:
        """Records slots that were claimed and released without a write."""
        self.rows += [None] * count

    def chunk(self, most: int) -> int:
        """Draws a number of steps from 1 to ``most``."""
        return self._random.randint(1, most)

    def _step(self, lane: int, source: int, ahead: int) -> Item:
        done = self._random.random() < self._ends
        number = lane * 1000 + len(self.rows) + ahead
        item = Item(number, done, self._episodes[lane], lane, source)
        self._episodes[lane] += done
        return item

    def trajectories(self, capacity: int, *, episodes: bool = True) -> list[list[Item]]:
        """Returns the stored trajectories by lane and source, split at holes and episode ends."""
        streams: dict[tuple[int, int], list[list[Item]]] = {}
        open_: dict[tuple[int, int], list[Item]] = {}
        for row in self.rows[-capacity:]:
            if row is None:
                open_.clear()
                continue
            for item in row:
                key = item.lane, item.source
                if key not in open_:
                    open_[key] = []
                    streams.setdefault(key, []).append(open_[key])
                open_[key].append(item)
                if item.done and episodes:
                    del open_[key]
        return [one for key in sorted(streams) for one in streams[key]]


def as_data(lanes: list[list[Item]], width: int) -> TensorDict:
    """Returns items ``[lanes][steps]`` as a batch ``[steps]``, or ``[lanes, steps]``."""

    def column(name: str) -> torch.Tensor:
        values = torch.tensor([[getattr(item, name) for item in lane] for lane in lanes])
        return values if width > 1 else values[0]

    number = column("number")
    return TensorDict(
        {
            "number": number,
            "id": column("episode"),
            "source": column("source"),
            ("next", "done"): column("done").unsqueeze(-1),
        },
        number.shape,
    )


def slices(
    trajectories: Iterable[list[Item]],
    steps: int,
    *,
    strict: bool = True,
    left: bool | int = False,
    right: bool | int = False,
) -> set[Slice]:
    """Returns every slice that may be drawn."""
    found = set()
    for one in trajectories:
        numbers = [item.number for item in one]
        if strict and len(numbers) < steps:
            continue
        whole = min(steps, len(numbers))
        off = whole - 1 if left is True else min(left, whole - 1)
        beyond = whole - 1 if right is True else min(right, whole - 1)
        for begin in range(-off, len(numbers) - whole + beyond + 1):
            found.add(tuple(numbers[max(begin, 0) : begin + whole]))
    return found


def cut_up(numbers: torch.Tensor, last: torch.Tensor) -> list[Slice]:
    """Splits a batch into its slices; ``last`` marks the last step of each."""
    assert last.reshape(-1)[-1]
    ends = torch.nonzero(last.reshape(-1)).flatten() + 1
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    return [tuple(part.tolist()) for part in numbers.split(sizes)]


def drawn(rb: Any, batches: int = 1) -> Counter[Slice]:
    """Counts the slices of some batches, each given by the numbers of its steps."""
    found: Counter[Slice] = Counter()
    for _ in range(batches):
        sample = rb.sample()
        found.update(cut_up(sample["number"], sample["next", "truncated"]))
    return found
