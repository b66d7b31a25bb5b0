"""A list holds any Python objects, in order and without gaps, up to a limit or without one."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.nn.utils.rnn import pack_sequence

from shmbuffer import (
    EmptyBufferError,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.items import Point
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)


def filled(*items: Any, max_size: int | None = 10) -> ListStorage:
    storage = ListStorage(max_size)
    storage.set(range(len(items)), list(items))
    return storage


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cursor", "found"),
    [
        (slice(2, 4), ["a", "b", "x", "y"]),
        (np.array([-1, 0]), ["y", "b", "x"]),
        ([3, 4], ["a", "b", "c", "x", "y"]),
    ],
    ids=str,
)
def test_items_are_put_behind_the_last_one_too(cursor: Any, found: list[str]) -> None:
    storage = filled("a", "b", "c")
    storage.set(cursor, ["x", "y"])
    assert storage.get(slice(None)) == found


def test_an_item_is_put_at_an_int_whatever_it_is() -> None:
    storage = ListStorage(4)
    for at, item in enumerate([["a", "list"], (1, 2), {"k": 1}, None]):
        storage.set(at, item)
    storage.set(-1, "last")
    storage.set(torch.tensor(1), "second")
    assert storage.get(slice(None)) == [["a", "list"], "second", {"k": 1}, "last"]


@pytest.mark.parametrize(
    ("cursor", "items", "error", "words"),
    [
        (5, "x", RuntimeError, "at index 5 would leave a gap, .* list has 3 items"),
        (
            [3, 5],
            ["x", "y"],
            RuntimeError,
            "at index 5 would leave a gap, .* list has 4 items",
        ),
        ([4, 3], ["x", "y"], RuntimeError, "at index 4 would leave a gap"),
        (10, "x", RuntimeError, "index 10 is out of range for a list of max_size 10"),
        ([0.5], ["x"], IndexError, "is not an index of a list"),
        (range(2), {"a": 1, "b": 2}, TypeError, "entry 'a' of the batch: .* got int"),
        (range(2), "xy", TypeError, "got str"),
    ],
    ids=str,
)
def test_a_write_that_does_not_fit_changes_nothing(
    cursor: Any, items: Any, error: type[Exception], words: str
) -> None:
    storage = filled("a", "b", "c")
    with pytest.raises(error, match=words):
        storage.set(cursor, items)
    assert storage.get(slice(None)) == ["a", "b", "c"]
    assert ring_of(storage).write_count == 3


# -- what a sample is ------------------------------------------------------------------------------


def everything(*items: Any) -> Any:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(list(items))
    return rb[:]


def test_entries_that_are_tensors_in_some_items_are_stacked_lazily() -> None:
    found = everything(TensorDict({"a": torch.zeros(())}), TensorDict({"a": "text"}))
    assert [item["a"] for item in found.unbind(0)] == [torch.zeros(()), "text"]


def test_items_that_are_lazy_stacks_are_sampled_with_their_indices() -> None:
    agents = [TensorDict({"a": torch.zeros(size)}) for size in (1, 2)]
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(4), batch_size=2
    )
    rb.extend([lazy_stack([one.clone().fill_("a", at) for one in agents]) for at in range(4)])
    for _ in range(5):  # as many items as agents
        sample = rb.sample()
        for row, index in zip(sample.unbind(0), sample["index"], strict=True):
            assert [one["a"].tolist() for one in row.unbind(0)] == [
                [int(at)] * size for at, size in zip(index, (1, 2), strict=True)
            ]
        rb.update_priority(range(4), 1.0)
        sample["td_error"] = sample["index"] + 2.0
        rb.update_tensordict_priority(sample)
        drawn = set(sample["index"][:, 0].tolist())
        expected = [at + 2.0 if at in drawn else 1.0 for at in range(4)]
        assert rb.sampler.state_dict()["_priorities"].tolist() == expected
    assert "index" not in rb[0].keys()  # noqa: SIM118


def test_a_batch_that_is_collated_without_dimensions_has_its_indices() -> None:
    rb = TensorDictReplayBuffer(
        storage=ListStorage(4),
        batch_size=2,
        collate_fn=lambda found: TensorDict({"a": torch.stack([one["a"] for one in found])}),
    )
    rb.extend(TensorDict({"a": torch.arange(4)}, [4]))
    sample = rb.sample()
    assert torch.equal(sample["a"], sample["index"])


def test_a_transform_of_what_is_read_does_not_reach_the_items() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(10), batch_size=4, transform=lambda td: td.set("a", td["a"] + 1)
    )
    rb.extend([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
    for _ in range(2):
        assert rb[0]["a"].tolist() == [1]
        assert rb.storage.get(0)["a"].tolist() == [0]


def test_items_are_sent_to_the_device_of_the_storage_when_they_are_written() -> None:
    storage = ListStorage(10, device="meta")
    storage.set(0, {"a": (torch.zeros(2), "text"), "n": 1})
    storage.set(1, TensorDict(a=torch.zeros(2)))
    item = storage.get(0)
    assert item["a"][0].device == storage.get(1)["a"].device == torch.device("meta")
    assert item["a"][1] == "text"


class Output(OrderedDict[str, Any]):
    """A dict subclass with its own behaviour, as some models return."""

    def update(self, *entries: Any, **named: Any) -> None:
        raise TypeError("update is not for these")


def test_what_moves_by_itself_is_sent_to_the_device_as_it_does() -> None:
    storage = ListStorage(10, device="meta")
    storage.set(0, Output(packed=pack_sequence([torch.zeros(3), torch.zeros(2)])))
    item = storage.get(0)
    assert type(item) is Output
    assert item["packed"].data.device == torch.device("meta")
    assert item["packed"].batch_sizes.device == torch.device("cpu")


# -- without a limit -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2047, 2048])
def test_the_next_item_goes_behind_the_last_also_where_the_ring_was_just_full(count: int) -> None:
    rb = ReplayBuffer(storage=ListStorage(), collate_fn=list)
    rb.extend(list(range(count)))
    assert rb.add("next") == count
    assert rb[count] == "next"
    assert rb[0] == 0


def test_one_batch_may_be_larger_than_all_that_was_there() -> None:
    rb = ReplayBuffer(storage=ListStorage(), collate_fn=list)
    rb.extend(["a"])
    assert rb.extend(list(range(10_000)))[[0, -1]].tolist() == [1, 10_000]
    assert rb[9_999] == 9_998
    rb.storage.set(range(10_001, 20_000), list(range(9_999)))
    assert len(rb) == 20_000
    assert rb[-1] == 9_998


def test_a_large_limit_holds_too_and_takes_no_memory_beforehand() -> None:
    storage = ListStorage(10**9)
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.extend(list(range(3000)))
    assert storage.max_size == 10**9
    assert ring_of(storage).capacity < 10_000
    assert rb.add("next") == 3000


def test_priorities_survive_the_growth_of_the_list() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(), sampler=PrioritizedSampler(10, 0.5, 1.0, eps=0.0), batch_size=400
    )
    rb.extend(torch.arange(1000))
    rb.update_priority(torch.arange(1000), 0.0)
    rb.update_priority([3, 7], [9.0, 25.0])
    ring = ring_of(rb)
    rb.extend(torch.arange(1000, 5000))
    assert rb.storage.ring() is ring is rb.sampler.ring()
    assert ring.capacity >= 5000
    raw = ring.tree.priorities()
    assert (raw[3], raw[7], raw[8]) == (9.0, 25.0, 0.0)
    assert raw[1000:5000].tolist() == [25.0] * 4000  # the largest that was ever given
    rb.update_priority(torch.arange(1000, 5000), 0.0)
    data, info = rb.sample(return_info=True)
    drawn = torch.bincount(data, minlength=8)
    assert drawn[[3, 7]].sum() == 400
    assert 90 < drawn[3] < 210  # 3 : 5
    weight = {int(one): float(w) for one, w in zip(data, info["_weight"], strict=True)}
    assert weight[3] == 1.0
    assert weight[7] == pytest.approx(3 / 5)
    assert rb.sampler.alpha == 0.5


def test_two_samplers_on_a_growing_list_keep_priorities_of_their_own() -> None:
    storage = ListStorage()
    one, other = (
        ReplayBuffer(
            storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0), batch_size=100
        )
        for _ in range(2)
    )
    one.extend(torch.arange(10))
    other.update_priority(torch.arange(10), 0.0)
    one.extend(torch.arange(10, 5000))
    other.update_priority(torch.arange(5000), 0.0)
    other.update_priority(4999, 1.0)
    assert set(other.sample().tolist()) == {4999}
    assert len(set(one.sample().tolist())) > 50


def test_the_largest_priority_within_the_buffer_is_known_after_growth() -> None:
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0, max_priority_within_buffer=True)
    rb = ReplayBuffer(storage=ListStorage(), sampler=sampler, collate_fn=list)
    rb.extend(list(range(1000)))
    rb.update_priority(5, 7.0)
    rb.storage.set([0, 1], ["x", "y"])  # writes by index, which increase tickets by a lap
    rb.update_priority([0, 1], 1.0)
    rb.extend(list(range(500)))
    rb.update_priority(5, 2.0)
    rb.update_priority(torch.arange(1000, 1500), 3.0)
    rb.add("last")
    assert ring_of(rb).tree.priorities()[[5, 1000, 1500]].tolist() == [2.0, 3.0, 3.0]


def test_a_tensordict_buffer_with_priorities_grows() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(), batch_size=20
    )
    for start in range(0, 4000, 1000):
        td = torch.zeros(1000)
        td[5] = 1.0 + start
        rb.extend(TensorDict({"a": torch.arange(start, start + 1000), "td_error": td}, [1000]))
    rb.update_priority([5, 1005, 2005], 0.0)
    sample = rb.sample()
    assert set(sample["a"].tolist()) == set(sample["index"].tolist()) == {3005}
    sample["td_error"] = torch.zeros(20)
    rb.update_tensordict_priority(sample)
    assert ring_of(rb).tree.p_sum == 0.0


def test_a_pass_without_replacement_reaches_what_came_by_growth() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(), sampler=SamplerWithoutReplacement(), batch_size=500, collate_fn=list
    )
    rb.extend(list(range(800)))
    assert len(set(rb.sample())) == 500
    rb.extend(list(range(800, 3000)))
    seen = [item for _ in range(8) for item in rb.sample()]
    assert max(seen) > 2000


def test_threads_that_write_at_once_lose_nothing() -> None:
    rb = ReplayBuffer(storage=ListStorage(), collate_fn=list)

    def write(name: int) -> None:
        for i in range(0, 1000, 10):
            rb.extend([(name, j) for j in range(i, i + 10)])

    writers = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(rb[:]) == [(name, j) for name in range(4) for j in range(1000)]


# -- as a whole ------------------------------------------------------------------------------------


def test_an_emptied_list_starts_at_index_0() -> None:
    rb = ReplayBuffer(storage=ListStorage(), collate_fn=list, batch_size=2)
    rb.extend(list(range(3000)))
    rb.empty()
    assert len(rb) == rb.write_count == 0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    assert rb.extend(["a", "b"]).tolist() == [0, 1]
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 2)


def test_an_item_that_is_appended_by_an_index_gets_the_largest_priority() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(10), sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0), collate_fn=list
    )
    rb.extend(["a", "b"])
    rb.update_priority([0, 1], [0.0, 3.0])
    rb[[0, 2]] = ["d", "e"]
    assert rb[:] == ["d", "b", "e"]
    assert ring_of(rb).tree.priorities()[:3].tolist() == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("max_size", [None, 4000])
def test_a_state_brings_items_priorities_and_position_back(max_size: int | None) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=ListStorage(max_size),
            sampler=PrioritizedSampler(10, 0.7, 0.5),
            collate_fn=list,
        )

    rb = make()
    items = [{"t": torch.tensor(i), "s": (str(i), None)} for i in range(3000)]
    rb.extend(items)
    rb.update_priority(torch.arange(3000), torch.arange(3000.0))
    other = make()
    other.load_state_dict(rb.state_dict())
    assert [item["s"][0] for item in other[:]] == [str(i) for i in range(3000)]
    items[5]["t"].fill_(-1)
    assert rb[5]["t"] == -1
    assert other[5]["t"] == 5
    assert other.write_count == 3000
    assert ring_of(other.sampler).tree.priorities()[:3000].tolist() == list(range(3000))
    assert other.add("next") == 3000


@pytest.mark.parametrize("made", [Point, lambda x, y: OrderedDict(x=x, y=[y])])
def test_items_of_a_state_that_is_loaded_are_copies_of_their_class(made: Any) -> None:
    state = filled(made(torch.zeros(2), np.zeros(2))).state_dict()
    storage = ListStorage(4)
    storage.load_state_dict(state)
    (item,), (before,) = storage[:1], state["_list"]
    assert type(item) is type(before)
    for leaf in torch.utils._pytree.tree_leaves(before):
        leaf[:] = 1
    assert not any(leaf.any() for leaf in torch.utils._pytree.tree_leaves(item))


def test_a_full_ring_that_is_loaded_where_there_is_more_room_goes_on_behind_its_last_item() -> None:
    small = filled("a", "b", "c", "d", max_size=4)
    assert small.append("e", single=True) == (0, 1)
    for larger in (ListStorage(10), ListStorage()):
        larger.load_state_dict(small.state_dict())
        assert larger.get(slice(None)) == ["e", "b", "c", "d"]
        assert larger.append("f", single=True) == (4, 1)
    with pytest.raises(IndexError, match="4 items do not fit into a ListStorage of max_size"):
        ListStorage(3).load_state_dict(small.state_dict())
    same = ListStorage(4)
    same.load_state_dict(small.state_dict())
    assert same.append("g", single=True) == (1, 1)


def test_a_list_says_what_it_is() -> None:
    assert repr(filled("a", max_size=5)) == "ListStorage(max_size=5, len=1)"
    assert repr(ListStorage()) == "ListStorage(max_size=None, len=0)"


def test_a_list_in_the_child_of_a_fork_says_whose_it_is() -> None:
    storage = filled("a")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork warns if torch has threads
        child = os.fork()
    if not child:
        try:
            storage.append("b", single=True)
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert "was inherited through a fork" in said
    assert f"process {os.getpid()}" in said
    assert storage.get(slice(None)) == ["a"]
