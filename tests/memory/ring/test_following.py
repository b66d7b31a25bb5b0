"""The core's index of a ring: which items follow each other, counts, and lookups."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shmbuffer._native import _core
from tests.selection import seeds

SLOTS = 40
Key = tuple[int, int, int]  # source, lane, id


def at(array: Any) -> int:
    return int(array.ctypes.data)


def numbers(values: Any, kind: Any = np.int64) -> Any:
    return np.ascontiguousarray(values, kind)


class Model:
    """Trajectories as lists, beside those of the core."""

    def __init__(self, seed: int, width: int) -> None:
        self.random = random.Random(seed)
        self.width = width
        self.core = _core.Trajectories(SLOTS, width)
        self.lists: dict[Key, list[list[int]]] = {}
        self.free = [*range(SLOTS)]

    def append(self) -> None:
        """Appends several slots at once, each with a source."""
        count = min(len(self.free), self.random.randint(1, 6))
        if not count:
            return
        slots = numbers(self.random.sample(self.free, count))
        self.free = [slot for slot in self.free if slot not in slots]
        sources = numbers([self.random.choice([1, 2, 1 << 63]) for _ in slots], np.uint64)
        last = {key[0]: lists[-1][-1] for key, lists in self.lists.items() if key[1] == 0}
        expected = []
        for slot, source in zip(slots.tolist(), sources.tolist(), strict=True):
            before = last.get(source, -1)
            expected.append(before // self.width if before >= 0 else -1)
            last[source] = slot * self.width
        out, reach = np.empty(count, np.int64), np.full(count, SLOTS)
        self.core.find_predecessors(at(slots), at(sources), at(reach), count, at(out))
        assert out.tolist() == expected
        cuts = numbers(np.array([self.random.random() < 0.3 for _ in range(count * self.width)]))
        cuts = cuts.reshape(count, self.width).astype(np.bool_)
        self.core.append(at(slots), at(sources), at(cuts), count, count)
        for slot, source, cut in zip(slots.tolist(), sources.tolist(), cuts, strict=True):
            for lane in range(self.width):
                lists = self.lists.setdefault((source, lane, 0), [])
                if cut[lane] or not lists:
                    lists.append([])
                lists[-1].append(slot * self.width + lane)

    def drop(self) -> None:
        """Drops a slot, usually an old one."""
        taken = [slot for slot in range(SLOTS) if slot not in self.free]
        if not taken:
            return
        slot = self.random.choice(taken)
        self.core.drop(at(numbers([slot])), 1)
        self.free.append(slot)
        for key, lists in [*self.lists.items()]:
            parts: list[list[int]] = []
            for one in lists:
                if slot * self.width + key[1] in one:
                    middle = one.index(slot * self.width + key[1])
                    parts += [one[:middle], one[middle + 1 :]]
                else:
                    parts.append(one)
            self.lists[key] = [part for part in parts if part]
            if not self.lists[key]:
                del self.lists[key]

    def cut(self) -> None:
        """Sets or clears the beginning of a trajectory at a slot, in every lane."""
        taken = [slot for slot in range(SLOTS) if slot not in self.free]
        if not taken:
            return
        slot, cut = self.random.choice(taken), self.random.random() < 0.5
        flags = np.full((1, self.width), cut)
        self.core.cut(at(numbers([slot])), at(flags), 1)
        for (_, lane, _), lists in self.lists.items():
            element = slot * self.width + lane
            where = next((i for i, one in enumerate(lists) if element in one), None)
            if where is None:
                continue
            one = lists[where]
            middle = one.index(element)
            if cut and middle:
                lists[where : where + 1] = [one[:middle], one[middle:]]
            elif not cut and not middle and where:
                lists[where - 1 : where + 1] = [lists[where - 1] + one]

    def require_alike(self) -> None:
        every = sorted(
            (one for lists in self.lists.values() for one in lists), key=lambda one: one[0]
        )
        elements = [element for one in every for element in one]
        assert (self.core.count, self.core.items) == (len(every), len(elements))
        assert self.core.longest == max(map(len, every), default=0)
        first = self.random.randrange(SLOTS * self.width)
        least = self.random.randint(1, 4)
        long = [one for one in every if len(one) >= least]
        long = [one for one in long if one[0] >= first] + [one for one in long if one[0] < first]
        assert self.core.count_long(least) == len(long)
        asked, found = np.arange(len(long) + 1), np.empty(len(long) + 1, np.int64)
        self.core.list_firsts(at(asked), len(asked), at(found), first)
        assert found.tolist() == [*(one[0] for one in long), -1]
        held = sorted(elements, key=lambda one: (one - first) % (SLOTS * self.width))
        asked, found = np.arange(len(held)), np.empty(len(held), np.int64)
        self.core.list_items(at(asked), len(asked), at(found), first)
        assert found.tolist() == held
        for one in every:
            items, rows, again = numbers(one), *np.empty((2, len(one)), np.int64)
            self.core.find_rows(at(items), len(one), at(rows))
            assert (np.diff(rows) == 1).all()
            assert rows[0] & 0xFFFFFFFF == 0
            self.core.find_elements(at(rows), len(one), at(again))
            assert again.tolist() == one
            length = np.empty(1, np.int64)
            self.core.read_lengths(at(rows[:1] >> 32), 1, at(length))
            assert length[0] == len(one)


@pytest.mark.product(few=2)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", seeds(3, 10))
def test_items_come_and_go_and_are_cut_as_in_lists(seed: int, width: int) -> None:
    model = Model(seed, width)
    for _ in range(300):
        model.random.choice([model.append, model.append, model.drop, model.drop, model.cut])()
        model.require_alike()
    model.core.clear()
    model.lists = {}
    model.require_alike()


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_steps_are_put_where_they_belong(seed: int) -> None:
    chosen = random.Random(seed)
    core, known = _core.Trajectories(SLOTS, 1), dict[tuple[int, int], int]()
    for element in [*range(SLOTS)] * 4:
        core.drop(at(numbers([element])), 1)
        known = {key: other for key, other in known.items() if other != element}
        key = chosen.randint(-1, 1), chosen.choice([chosen.randint(0, 25), 2**62])
        ids, steps = numbers([key[0]]), numbers([key[1]])
        source = numbers([7], np.uint64)
        twice = core.insert(at(numbers([element])), at(source), at(ids), at(steps), 1)
        if key in known:
            assert twice == (0, known[key])
            continue
        assert twice is None
        known[key] = element
        every: list[list[int]] = []
        for one, step in sorted(known):
            if (one, step - 1) not in known:
                every.append([])
            every[-1].append(known[one, step])
        assert core.count == len(every)
        for run in every:
            rows = np.empty(len(run), np.int64)
            core.find_rows(at(numbers(run)), len(run), at(rows))
            assert rows.tolist() == [rows[0] + i for i in range(len(run))]


def test_what_is_not_there_has_no_row() -> None:
    core = _core.Trajectories(4, 1)
    asked, found = numbers([0, 3, 4, -1]), np.empty(4, np.int64)
    core.find_rows(at(asked), 4, at(found))
    assert found.tolist() == [-1] * 4
    core.find_elements(at(numbers([-1, 0, 1 << 32, 5])), 4, at(found))
    assert found.tolist() == [-1] * 4
    core.read_lengths(at(numbers([-1, 0, 1, 5])), 4, at(found))
    assert found.tolist() == [0] * 4


def test_more_items_than_can_be_followed_are_refused() -> None:
    for slots, width in ((2**32, 1), (2**31, 2), (0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at most 4294967294 elements are supported"):
            _core.Trajectories(slots, width)
    core = _core.Trajectories(4, 1)
    with pytest.raises(IndexError, match="there is no element 4"):
        core.list_firsts(0, 0, 0, 4)
    with pytest.raises(TypeError):
        _core.Follower(core)  # type: ignore[arg-type]
