"""Incremental updates of the trajectory index give the same result as a new index."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    RingOverrunError,
    TensorDictReplayBuffer,
)
from shmbuffer.samplers.slicing.boundaries import Boundaries
from tests.kit.rings import ring_of
from tests.replay.trajectory_oracle import (
    boundaries,
    followed,
    in_pieces,
    listed,
    require_whole,
)
from tests.selection import seeds

END = ("next", "done")
PATHS = ("id",), ("step",), ("cut",), END
KEYS: dict[str, dict[str, Any]] = {
    "flag": {"end_key": END},
    "id": {"traj_key": "id"},
    "flag and id": {"end_key": END, "traj_key": "id"},
    "several flags": {"end_keys": [END, "cut"]},
    "by step": {"traj_key": "id", "step_key": "step"},
}


class Histories:
    """Handles on one ring, and the operations that may happen to it."""

    def __init__(self, path: Path, seed: int, *, lanes: int = 1, records: bool = False) -> None:
        self.random = random.Random(seed)
        self.lanes, self.records = lanes, records
        self.capacity = self.random.choice([7, 16, 29, 150])
        self.handles = [self._handle(path) for _ in range(3)]
        self.ids = [0, 0, 0]
        self.steps = [0, 0, 0]
        self.open: list[Any] = [None, None, None]
        self.handles[0].extend(self._data(0, 1))

    def _handle(self, path: Path) -> TensorDictReplayBuffer:
        storage: Any
        if self.records:
            storage = LazyStackStorage(
                self.capacity, max_bytes=8192, scratch_dir=path, shared_init=True
            )
        else:
            storage = LazyMemmapStorage(
                self.capacity * self.lanes,
                ndim=min(self.lanes, 2),
                scratch_dir=path,
                shared_init=True,
            )
        return TensorDictReplayBuffer(storage=storage)

    @property
    def ring(self) -> Any:
        return ring_of(self.handles[0])

    def _data(self, writer: int, count: int) -> TensorDict:
        rows = []
        for _ in range(count):
            done = self.random.random() < 0.2
            rows.append((self.ids[writer], self.steps[writer], done, self.random.random() < 0.1))
            self.steps[writer] += self.random.choice([1, 1, 1, 1, 2])
            if done:
                self.ids[writer] += 1
        shape = [count] if self.lanes == 1 else [self.lanes, count]

        def column(at: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([row[at] for row in rows], dtype=dtype).expand(shape).clone()

        data = {"id": column(0, torch.int64), "step": column(1, torch.int64)}
        flags = {"cut": column(3, torch.bool), "next": {"done": column(2, torch.bool)[..., None]}}
        if self.lanes > 1:
            flags["next"]["done"][0, 0] = self.random.random() < 0.5  # type: ignore[index]
        more = {"load": torch.zeros(*shape, 64)} if self.records else {}
        return TensorDict({**data, **flags, **more}, shape)

    # -- what happens --------------------------------------------------------------------------

    def write(self) -> None:
        writer = self.random.randrange(3)
        if self.open[writer]:
            return
        count = self.random.choice([1, 2, 3, self.capacity // 2, self.capacity + 2])
        if any(self.open):  # a claim must not wait for the slots of an open one
            ahead = (self.ring.head + np.arange(self.capacity)) % self.capacity
            free = np.flatnonzero(self.ring.live.writing()[ahead])
            count = min(count, int(free[0]) if len(free) else self.capacity)
        if self.records:
            count = min(count, 16)  # no more fit
        if not count:
            return
        streams = None
        if self.lanes == 1:
            streams = [self.random.randrange(2) for _ in range(count)]
        self.handles[writer].extend(self._data(writer, count), streams=streams)

    def begin(self) -> None:
        """Begins a write that stays open for a while."""
        writer = self.random.randrange(1, 3)
        if self.open[writer] or self.records:
            return
        storage: Any = self.handles[writer].storage
        count = self.random.randint(1, 3)
        open_slots = sum(held or 0 for held in self.open)
        if open_slots + count > 4:
            return
        try:
            if self.random.random() < 0.3:
                slots = np.array(self.random.sample(range(self.capacity), count))
                ring_of(storage).claims.claim_slots(np.sort(slots), in_place=True, timeout=0)
            else:
                ring_of(storage).claims.claim(count, timeout=0)
        except RingOverrunError:
            return
        self.open[writer] = count

    def end(self) -> None:
        writer = self.random.randrange(1, 3)
        if not self.open[writer]:
            return
        claims = ring_of(self.handles[writer]).claims
        if self.random.random() < 0.5:
            claims.commit()
        else:
            claims.abort()
        self.open[writer] = None

    def edit(self) -> None:
        """Changes an item in place or replaces it."""
        held = np.flatnonzero(self.ring.live.holds())
        if not len(held) or any(self.open):
            return
        slots = np.unique(self.random.choices(held.tolist(), k=self.random.randint(1, 3)))
        writer = self.random.randrange(3)
        data, storage = self._data(writer, len(slots)), self.handles[writer].storage
        where, in_place = torch.from_numpy(slots), self.random.random() < 0.6
        if self.lanes > 1:
            ring, rows = ring_of(storage), storage.mover()
            ring.claims.claim_slots(slots, in_place=in_place)
            for leaf, view in zip(rows.leaves.leaves, rows.views(), strict=True):
                view[where] = data[leaf.path].transpose(0, 1)
            ring.claims.commit()
        elif in_place:
            self.handles[writer][where] = data
        else:
            storage.set(where, data)

    def empty(self) -> None:
        if not any(self.open) and self.random.random() < 0.3:
            self.handles[0].storage.forget(  # type: ignore[attr-defined]
                keep_write_count=self.random.random() < 0.5
            )

    def happen(self) -> None:
        """Runs one operation, drawn at random."""
        choices = [self.write] * 8 + [self.begin] * 3 + [self.end] * 4 + [self.edit] * 2
        self.random.choice([*choices, self.empty])()

    def column(self, found: Any, path: Any) -> Any:
        """Returns an entry of all elements, ``[elements]``."""
        return found.entries.at(path, np.arange(self.capacity)).reshape(-1)

    def expected(self, found: Any, keys: dict[str, Any]) -> list[list[int]]:
        """Returns the trajectories, computed from the ring itself."""
        ids = self.column(found, ("id",))
        if "step_key" in keys:
            return in_pieces(self.ring, ids, self.column(found, ("step",)))
        ends = None
        if "end_key" in keys or "end_keys" in keys:
            ends = self.column(found, END) != 0
        if "end_keys" in keys:
            ends = ends | (self.column(found, ("cut",)) != 0)
        return followed(self.ring, ends, ids if "traj_key" in keys else None)


def found_by(one: Boundaries, storage: Any) -> Any:
    """Returns what the index finds, the words of an expected error, or None for an empty ring."""
    try:
        return one.find(storage)
    except RuntimeError as error:
        return "occurs twice" if "occurs twice" in str(error) else None


@pytest.mark.product("name lanes records", few=4)
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(("lanes", "records"), [(1, False), (2, False), (1, True)])
def test_what_is_followed_is_what_lies_there(
    tmp_path: Path, name: str, seed: int, lanes: int, records: bool
) -> None:
    happened = Histories(tmp_path / "buffer", seed, lanes=lanes, records=records)
    keys = KEYS[name]
    storage = happened.handles[0].storage
    often, seldom = boundaries(*PATHS, **keys), boundaries(*PATHS, **keys)
    whole = 0
    for at in range(150):
        happened.happen()
        if not happened.ring.length:
            continue
        for one in (often, seldom) if at % 7 == 0 else (often,):
            found = found_by(one, storage)
            if found == "occurs twice":
                assert found_by(boundaries(*PATHS, **keys), storage) == found
                continue
            assert listed(found.table) == happened.expected(found, keys)
            require_whole(found.table)
            whole += 1
        fresh = found_by(boundaries(*PATHS, **keys), storage)
        if found != "occurs twice":
            assert listed(fresh.table) == listed(found.table)
    assert whole > 20


def test_steps_in_no_order_are_sorted_before_they_are_followed() -> None:
    """Without sorting, most of the items would have to move for each new step."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(70_000))
    steps = torch.from_numpy(np.random.default_rng(0).permutation(70_000))
    rb.extend(TensorDict({"id": torch.zeros_like(steps), "step": steps}, [70_000]))
    one = boundaries(traj_key="id", step_key="step")
    table = one.find(rb.storage).table
    assert listed(table) == [torch.argsort(steps).tolist()]
    assert table.moved == 0
    rb.extend(TensorDict({"id": torch.ones(9, dtype=torch.int64), "step": steps[:9]}, [9]))
    whole = one.find(rb.storage).table
    assert sum(map(len, listed(whole))) == 70_000
    assert listed(whole) == listed(
        boundaries(traj_key="id", step_key="step").find(rb.storage).table
    )
