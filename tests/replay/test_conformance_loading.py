"""A save or a state of one storage loads into any other storage that can hold its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import SchemaMismatchError, TensorDictPrioritizedReplayBuffer
from tests.kit.items import ITEMS, alike
from tests.kit.rings import ring_of
from tests.replay.conformance import (
    LISTS,
    RECORDS,
    RINGS,
    Case,
    Maker,
    cases,
    through_a_state,
    through_files,
)
from tests.replay.records.items import is_item, item, items

pytestmark = pytest.mark.product("source target way", few=10)

OBJECTS = (*LISTS, *RECORDS)
Make = Callable[..., Any]
Load = Callable[[Any, Any, Path], None]

every_list = pytest.mark.parametrize(
    "maker", cases(OBJECTS, ("random",), ("round robin",)), indirect=True, ids=str
)


every_way = pytest.mark.parametrize("way", [through_files, through_a_state], ids=["files", "state"])
each_source = pytest.mark.parametrize("source", OBJECTS)
each_target = pytest.mark.parametrize("target", OBJECTS)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes prioritized buffers by the name of the storage."""
    makers: list[Maker] = []

    def buffer(storage: str, max_size: int | None = 20, **options: Any) -> Any:
        maker = Maker(Case(storage), tmp_path / f"{len(makers)}")
        makers.append(maker)
        return TensorDictPrioritizedReplayBuffer(
            alpha=0.8, beta=0.9, storage=maker.storage(max_size, **options), batch_size=8
        )

    yield buffer
    for maker in makers:
        maker.close()


def ids(rb: Any) -> list[int]:
    return [int(one["id"]) for one in rb[:].unbind(0)]


def priorities(rb: Any) -> list[float]:
    found: list[float] = ring_of(rb.sampler).tree.priorities()[: len(rb)].tolist()
    return found


@each_source
@each_target
@every_way
def test_items_priorities_and_counts_come_back_in_their_places(
    source: str, target: str, way: Load, make: Make, tmp_path: Path
) -> None:
    rb, other = make(source), make(target)
    rb.extend(items(0, 30))
    rb.update_priority(torch.arange(20), torch.arange(20.0))
    rb[3] = item(77, 100)
    other.extend(items(100, 103))
    way(rb, other, tmp_path)
    assert ids(other) == ids(rb)
    assert all(
        is_item(one, None, 100 if int(one["id"]) == 77 else None) for one in other[:].unbind(0)
    )
    assert priorities(other) == priorities(rb) == list(range(20))
    assert (len(other), other.write_count, other.writer._cursor) == (20, 30, 10)
    for buffer in (rb, other):
        buffer.extend(items(200, 203))
    assert ids(other) == ids(rb)


@each_source
@each_target
@pytest.mark.parametrize("count", [4, 20, 30])
def test_where_there_is_more_room_items_are_put_in_the_order_of_their_age(
    source: str, target: str, count: int, make: Make, tmp_path: Path
) -> None:
    rb = make(source)
    rb.extend(items(0, count))
    kept = list(range(max(0, count - 20), count))
    for number in kept:
        rb.update_priority(number % 20, number + 1.0)
    rb.dumps(tmp_path / "save")
    for room in [40, None] if target in LISTS else [40]:
        other = make(target, room)
        other.loads(tmp_path / "save")
        assert ids(other) == kept
        assert priorities(other) == [number + 1.0 for number in kept]
        assert other.write_count == other.sampler.default_priority == count
        assert other.extend(items(90, 92)).tolist() == [len(kept), len(kept) + 1]


@each_source
@each_target
def test_where_there_is_no_room_nothing_is_changed(
    source: str, target: str, make: Make, tmp_path: Path
) -> None:
    rb, other = make(source), make(target, 19)
    rb.extend(items(0, 23))
    other.extend(items(50, 53))
    with pytest.raises(ValueError, match="items in 20 places, but the storage has a capacity of"):
        through_files(rb, other, tmp_path)
    with pytest.raises(IndexError, match=r"20 items do not fit into a .* of max_size 19"):
        through_a_state(rb, other, tmp_path)
    assert ids(other) == [50, 51, 52]


@every_list
@every_way
def test_items_of_every_kind_come_back(maker: Maker, way: Load, tmp_path: Path) -> None:
    given = [make(n) for n in (1, 2) for make in ITEMS.values()]
    rb = maker.buffer(100, cls="ReplayBuffer", collate_fn=list)
    other = maker.buffer(100, cls="ReplayBuffer", name="other", collate_fn=list)
    rb.extend(given)
    other.extend(["will be", "replaced"])
    if way is through_files:
        way(rb, other, tmp_path)
    else:
        other.load_state_dict(rb.state_dict())
    assert len(other) == other.write_count == len(given)
    assert all(alike(other[at], one) for at, one in enumerate(given))
    assert other.add("next") == len(given)


@every_list
def test_a_state_that_was_loaded_shares_nothing_with_the_items(maker: Maker) -> None:
    rb, other = maker.buffer(10), maker.buffer(10, name="other")
    rb.extend(items(1, 4))
    other.load_state_dict(rb.state_dict())
    changed = rb[0]
    changed["tokens"].fill_(-1)
    rb[0] = changed
    assert is_item(other[0], 1)


@every_list
def test_hooks_are_given_the_items_and_where_the_ring_begins(maker: Maker, tmp_path: Path) -> None:
    class Hook:
        shift = is_full = None

        def __call__(self, data: Any, path: Path) -> Any:
            self.seen = (self.shift, self.is_full, path.is_dir())
            return [one.set("saved", one["id"] * 10) for one in data]

    hook = Hook()
    rb, other = maker.buffer(3), maker.buffer(3, name="other")
    rb.register_save_hook(hook)
    rb.extend(items(1, 5))
    rb.dumps(tmp_path / "save")
    assert hook.seen == (1, True, True)
    other.register_load_hook(lambda data, out: [one.set("loaded", one["id"] + 1) for one in data])
    other.loads(tmp_path / "save")
    found = [(int(one["id"]), int(one["saved"]), int(one["loaded"])) for one in other[:].unbind(0)]
    assert found == [(4, 40, 5), (2, 20, 3), (3, 30, 4)]
    other.register_load_hook(lambda data, out: data[:2])
    with pytest.raises(ValueError, match="load hooks returned 2 items for 3"):
        other.loads(tmp_path / "save")


@every_list
def test_an_empty_list_comes_back(maker: Maker, tmp_path: Path) -> None:
    rb, other = maker.buffer(6), maker.buffer(6, name="other")
    for load in (
        lambda: through_files(rb, other, tmp_path),
        lambda: other.load_state_dict(rb.state_dict()),
    ):
        other.extend(items(0, 3))
        load()
        assert (len(other), other.write_count) == (0, 0)


@pytest.mark.parametrize("ring", RINGS)
@each_source
def test_tensors_and_lists_of_objects_are_not_loaded_into_each_other(
    source: str, ring: str, make: Make, tmp_path: Path
) -> None:
    objects, tensors = make(source), make(ring)
    objects.extend([TensorDict(a=torch.zeros(2))])
    tensors.extend(TensorDict({"a": torch.ones(1, 2)}, [1]))
    for rb, other, name, words in (
        (
            objects,
            tensors,
            "objects",
            r"contains the save of a list of (objects|items)",
        ),
        (
            tensors,
            objects,
            "tensors",
            r"is the directory of a buffer of rows, which a \w+ cannot load; .* LazyMemmapStorage",
        ),
    ):
        rb.dumps(tmp_path / name)
        with pytest.raises(SchemaMismatchError, match=words):
            other.loads(tmp_path / name)
    assert objects[0]["a"].tolist() == [0, 0]
    assert tensors[0]["a"].tolist() == [1, 1]
