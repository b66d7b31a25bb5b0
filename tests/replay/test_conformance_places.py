"""Slots of a storage: items are set and read by index, and an invalid index raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import EmptyBufferError
from tests.replay.conformance import (
    LISTS,
    RECORDS,
    RINGS,
    SHARED,
    Maker,
    assert_are_steps,
    cases,
    numbers,
    steps,
)

pytestmark = pytest.mark.product(few=4)

PLAIN = {"samplers": ("random",), "writers": ("round robin",)}
every_storage = pytest.mark.parametrize("maker", cases(**PLAIN), indirect=True, ids=str)
with_gaps = pytest.mark.parametrize(
    "maker", cases((*RINGS, *RECORDS), **PLAIN), indirect=True, ids=str
)
every_list = pytest.mark.parametrize(
    "maker", cases((*LISTS, *RECORDS), **PLAIN), indirect=True, ids=str
)


def ids(items: Any) -> list[int]:
    """Returns the ids of several items, which lists return as a list."""
    return [int(one["id"]) for one in items]


@pytest.mark.product
@every_storage
def test_where_nothing_was_written_there_is_nothing(maker: Maker, tmp_path: Path) -> None:
    """Includes a directory that does not exist before the first write."""
    rb = maker.buffer(10)
    if maker.case.shared:
        rb.set_storage(maker.storage(10, name="later", shared_init=False))
        with pytest.raises(EmptyBufferError):
            rb.storage.get(slice(None))
    assert (len(rb), rb.storage.max_size) == (0, 10)
    assert rb.extend([]).tolist() == []
    with pytest.raises(EmptyBufferError):
        rb.sample()
    with pytest.raises(IndexError, match=r"there is no item at 0|nothing was written|out of range"):
        rb[0]
    assert 0 not in rb.storage
    rb.empty()
    assert list(rb.storage) == list(rb.iter_in_order(4)) == []
    assert not (tmp_path / "later").exists()


@with_gaps
def test_items_are_found_where_they_were_put_and_nowhere_else(maker: Maker) -> None:
    rb = maker.buffer(10)
    storage = rb.storage
    storage.set([7, 2], steps(0, 2))
    storage.set(4, steps(2, 3)[0])
    assert len(storage) == len(rb) == 3
    assert [int(storage.get(at)["id"]) for at in (7, 2, 4)] == [0, 1, 2]
    assert [at for at in range(10) if at in storage] == [2, 4, 7]
    for index in (3, 9, 10, -7, [2, 3], torch.tensor([4, 5]), np.array([11])):
        with pytest.raises(IndexError):
            storage.get(index)
    assert_are_steps(rb[:], [1, 2, 0])
    assert ids(storage.get(slice(2, 5))) == [1, 2]
    assert ids(storage) == [1, 2, 0]
    chunks = [ids(chunk) for chunk in rb.iter_in_order(2)]
    assert [one for chunk in chunks for one in chunk] == [1, 2, 0]
    assert max(map(len, chunks)) <= 2


@every_storage
@pytest.mark.parametrize(
    "cursor",
    [range(3), slice(0, 3), [0, 1, 2], np.arange(3), torch.arange(3)],
    ids=["range", "slice", "list", "array", "tensor"],
)
def test_a_first_batch_is_put_at_any_kind_of_index(maker: Maker, cursor: Any) -> None:
    rb = maker.buffer(10)
    rb.storage.set(cursor, steps(0, 3))
    assert_are_steps(rb[:], [0, 1, 2])
    rb.storage.set([3, 4], steps(3, 5))
    rb.storage.set(5, steps(5, 6)[0])
    assert_are_steps(rb[:], [0, 1, 2, 3, 4, 5])
    assert rb.write_count == 6


@every_storage
def test_an_index_that_is_named_twice_keeps_the_last(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    rb[[3, 1, 3]] = steps(20, 23)
    assert_are_steps(rb[:], [0, 21, 2, 22])


@every_storage
def test_a_write_that_does_not_fit_changes_nothing(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    with pytest.raises((IndexError, RuntimeError), match=r"10"):
        rb.storage.set(10, steps(9, 10)[0])
    with pytest.raises(IndexError, match=r"-11|-5"):
        rb.storage.set(-11 if maker.case.storage in RINGS else -5, steps(9, 10)[0])
    with pytest.raises(ValueError, match="2 items cannot be written to 3 slots"):
        rb.storage.set(range(3), steps(20, 22))
    assert_are_steps(rb[:], [0, 1, 2, 3])
    assert rb.write_count == 4


@every_list
@pytest.mark.parametrize("index", [(0, 1), torch.tensor([[0, 1], [1, 2]])], ids=str)
def test_a_list_has_one_dimension(maker: Maker, index: Any) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 3))
    with pytest.raises(RuntimeError, match="has one dimension"):
        rb.storage.get(index)
    with pytest.raises(IndexError, match="not an index"):
        rb.storage.get([0.5])
    with pytest.raises(TypeError, match="must be ints or a tensor of ints"):
        rb.storage.contains("a")
    assert ids(rb.storage.get((torch.tensor([1, 0]),))) == [1, 0]
    assert ids(rb.storage.get(...)) == [0, 1, 2]
    assert int(rb.storage.get((2,))["id"]) == 2


@every_storage
def test_places_are_looked_for_with_contains(maker: Maker) -> None:
    storage = maker.storage(10)
    assert not storage.contains(0)
    storage.set(range(3), steps(0, 3))
    assert [at in storage for at in (0, 2, -1, -3, 3, -4)] == [True] * 4 + [False] * 2
    assert storage.contains(torch.tensor([[0, 9], [2, -1]])).tolist() == [
        [True, False],
        [True, True],
    ]


@pytest.mark.parametrize("maker", cases(("compressed", *SHARED), **PLAIN), indirect=True, ids=str)
def test_a_read_item_is_a_copy(maker: Maker) -> None:
    rb = maker.buffer(10)
    data = steps(0, 4)
    rb.extend(data)
    data["obs"].fill_(7)
    rb[1]["obs"].fill_(100)
    rb.storage.get(2)["obs"].fill_(100)
    for item in rb.storage.get(slice(2, 4)):
        item["obs"].fill_(200)
    assert_are_steps(rb[:], [0, 1, 2, 3])
    assert numbers(rb[:]) == [0, 1, 2, 3]
