"""The core's index of items by label: insertions, removals and contents, beside a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shmbuffer._native import _core

ELEMENTS, SIZE = 24, 3
element = st.integers(0, ELEMENTS - 1)
label = st.integers(-2, 4)


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


class Real:
    """The core's index, called by addresses."""

    def __init__(self, limit: int) -> None:
        self.table = _core.Labels(ELEMENTS, limit, True)
        self.limit = limit
        if limit:
            self.table.record_lost()

    def put(self, at: int, named: int, now: int) -> None:
        where, which = numbers(at), numbers(named)
        self.table.put(where.ctypes.data, which.ctypes.data, 1, 0, now)

    def call(self, name: str, *at: int) -> None:
        where = numbers(*at)
        getattr(self.table, name)(where.ctypes.data, len(where))

    def take(self, at: int, taken: bool) -> None:
        self.table.mark_claimed(numbers(at).ctypes.data, 1, taken)

    def groups(self) -> list[list[int]]:
        """Returns the groups that may be drawn, by their first item."""
        count = self.table.marked
        which, sizes = np.arange(count), np.empty(count, np.int64)
        self.table.read_sizes(which.ctypes.data, count, sizes.ctypes.data)
        found = np.empty((count, ELEMENTS), np.int64)
        self.table.read_members(which.ctypes.data, count, ELEMENTS, found.ctypes.data)
        return [row[:size].tolist() for row, size in zip(found, sizes, strict=True)]


class Group:
    """A group, in plain Python."""

    def __init__(self, named: int, now: int) -> None:
        self.label, self.since = named, now
        self.items: set[int] = set()
        self.away: set[int] = set()
        self.came = 0
        self.state = "open"


class Model:
    """The index in plain Python, which searches all items."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kins: list[Group] = []
        self.lost: Counter[int] = Counter()
        self.withdrawn = self.given_up = 0

    def of(self, at: int) -> Group | None:
        return next((kin for kin in self.kins if at in kin.items), None)

    def put(self, at: int, named: int, now: int) -> None:
        kin = self.of(at)
        if kin is not None and kin.label == named:
            kin.away.discard(at)
            return
        if kin is not None:
            self.drop(at)
        last = [kin for kin in self.kins if kin.label == named][-1:]
        if not last or (self.limit and last[0].came == self.limit):
            last = [Group(named, now)]
            self.kins += last
        kin = last[0]
        kin.items.add(at)
        kin.came += 1
        if kin.state == "lost":
            self.lost[at] += 1
        elif self.limit and kin.came == self.limit:
            kin.state = "whole"

    def lose(self, kin: Group) -> None:
        kin.state = "lost"
        self.lost.update(kin.items)

    def drop(self, at: int) -> None:
        kin = self.of(at)
        if kin is None:
            return
        kin.items.discard(at)
        kin.away.discard(at)
        if self.limit and kin.state in ("open", "whole"):
            self.withdrawn += 1
            self.lose(kin)
        self.kins = [kin for kin in self.kins if kin.items]

    def mark_absent(self, at: int) -> None:
        kin = self.of(at)
        if kin is not None and self.limit:
            kin.away.add(at)

    def give_up(self, before: int) -> None:
        for kin in self.kins:
            if kin.state == "open" and kin.since <= before:
                self.given_up += 1
                self.lose(kin)

    def take(self, at: int, taken: bool) -> None:
        kin = self.of(at)
        if kin is not None and kin.state == ("whole" if taken else "taken"):
            kin.state = "taken" if taken else "whole"

    def groups(self) -> list[list[int]]:
        wanted = "whole" if self.limit else "open"
        return sorted(
            sorted(kin.items) for kin in self.kins if kin.state == wanted and not kin.away
        )


operation = st.one_of(
    st.tuples(st.just("put"), element, label),
    st.tuples(st.just("put"), element, label),
    st.tuples(st.just("drop"), element, label),
    st.tuples(st.just("mark_absent"), element, label),
    st.tuples(st.just("give_up"), element, label),
    st.tuples(st.just("take"), element, label),
    st.tuples(st.just("release"), element, label),
)


def filled_after_a_loss(named: int) -> list[Any]:
    """Makes a group that loses an item and then gets as many items as a complete group has."""
    return [("put", 0, named), ("put", 1, named), ("drop", 0, named)] + [
        ("put", at, named) for at in range(2, SIZE + 1)
    ]


@pytest.mark.parametrize("limit", [0, SIZE])
@example(happens=filled_after_a_loss(1))
@given(happens=st.lists(operation, max_size=120))
def test_what_is_there_is_what_was_put_and_not_dropped(limit: int, happens: list[Any]) -> None:
    real, model = Real(limit), Model(limit)
    lost: Counter[int] = Counter()
    for now, (what, at, named) in enumerate(happens):
        match what:
            case "put":
                real.put(at, named, now)
                model.put(at, named, now)
            case "give_up":
                if limit:
                    real.table.give_up(max(0, now - 20))
                    model.give_up(max(0, now - 20))
            case "take" | "release":
                real.take(at, what == "take")
                model.take(at, what == "take")
            case _:
                real.call(what, at)
                getattr(model, what)(at)
        real.table.settle(None)
        assert real.groups() == model.groups()
        assert real.table.items == sum(len(kin.items) for kin in model.kins)
        if limit:
            lost.update(np.frombuffer(real.table.take_lost(), np.int64).tolist())
            assert lost == model.lost
            counts = real.table.open, real.table.withdrawn, real.table.given_up
            are_open = sum(kin.state == "open" for kin in model.kins)
            assert counts == (are_open, model.withdrawn, model.given_up)
    if not limit:
        labels, counted = (np.frombuffer(one, np.int64) for one in real.table.order())
        expected = Counter({kin.label: len(kin.items) for kin in model.kins})
        assert dict(zip(labels.tolist(), counted.tolist(), strict=True)) == expected
        assert labels.tolist() == sorted(expected)


@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(0, 40))
def test_numbers_are_chosen_once_each(key: int, of: int, count: int) -> None:
    table, found = _core.Labels(1, 0, False), np.full(count, -1)
    if count > of:
        with pytest.raises(ValueError, match="choose"):
            table.choose(key, of, count, found.ctypes.data)
        return
    table.choose(key, of, count, found.ctypes.data)
    assert len({*found.tolist()}) == count
    assert all(0 <= one < of for one in found.tolist())


@given(
    st.lists(st.tuples(element, label), min_size=1, max_size=60),
    st.lists(st.floats(0, 4), min_size=7, max_size=7),
    st.integers(0, 2**63 - 1),
)
def test_draws_have_what_weighs_something_and_nothing_twice(
    items: list[tuple[int, int]], heavy: list[float], key: int
) -> None:
    real = Real(0)
    for at, named in items:
        real.put(at, named, 0)
    real.table.settle(None)
    labels, counts = (np.frombuffer(one, np.int64) for one in real.table.order())
    weights = np.array([heavy[named + 2] for named in labels.tolist()])
    there = {at for at, named in dict(items).items() if heavy[named + 2] > 0}
    count = len(there)
    out = np.full(count + 5, -1)
    if not count:
        with pytest.raises(ValueError, match="no remaining item has a positive weight"):
            real.table.draw(weights.ctypes.data, key, 1, False, out.ctypes.data)
        return
    real.table.draw(weights.ctypes.data, key, count, False, out.ctypes.data)
    assert {*out[:count].tolist()} == there
    real.table.draw(weights.ctypes.data, key, count + 5, True, out.ctypes.data)
    assert {*out.tolist()} <= there
    with pytest.raises(ValueError, match="no remaining item has a positive weight"):
        real.table.draw(weights.ctypes.data, key, count + 1, False, out.ctypes.data)
    assert counts.sum() == real.table.items


def test_more_items_than_can_be_kept_are_refused() -> None:
    for count in (0, 2**32):
        with pytest.raises(ValueError, match=r"Labels: 1 to 4294967294 elements are supported"):
            _core.Labels(count, 0, False)
