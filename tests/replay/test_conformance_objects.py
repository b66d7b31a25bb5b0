"""Lists of any kind, private or shared, whose items need not be tensors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from shmbuffer import ReplayBuffer
from tests.kit.items import ITEMS, Point, Step, alike
from tests.replay.conformance import LISTS, RECORDS, Maker, assert_are_steps, cases, steps

pytestmark = pytest.mark.product(few=3)

PLAIN = {"samplers": ("random",), "writers": ("round robin",)}
every_list = pytest.mark.parametrize(
    "maker", cases((*LISTS, *RECORDS), **PLAIN), indirect=True, ids=str
)
private_list = pytest.mark.parametrize("maker", cases(LISTS, **PLAIN), indirect=True, ids=str)
dense_list = pytest.mark.parametrize(
    "maker", cases(("list", "compressed", "compressed records"), **PLAIN), indirect=True, ids=str
)
compressing = pytest.mark.parametrize(
    "maker", cases(("compressed", "compressed records"), **PLAIN), indirect=True, ids=str
)


def rb_of(maker: Maker, **options: Any) -> ReplayBuffer:
    rb: ReplayBuffer = maker.buffer(10, cls="ReplayBuffer", **options)
    return rb


def everything(maker: Maker, *items: Any) -> Any:
    """Writes items into a new buffer and returns all that it reads back."""
    rb = rb_of(maker)
    rb.extend(list(items))
    return rb[:]


# -- what is an item ------------------------------------------------------------------------------


@pytest.mark.product
@every_list
@pytest.mark.parametrize("name", ITEMS)
def test_an_item_of_any_kind_comes_back_exactly(maker: Maker, name: str) -> None:
    rb = rb_of(maker)
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    rb.extend(items[:2])
    rb.add(items[2])
    assert all(alike(rb[at], item) for at, item in enumerate(items))
    rb[1] = items[2]
    assert alike(rb[1], items[2])


@every_list
def test_a_batch_may_have_items_of_all_kinds(maker: Maker) -> None:
    items = [make(n) for n in (1, 2) for make in ITEMS.values()]
    rb = maker.buffer(100, cls="ReplayBuffer", collate_fn=list)
    rb.extend(items)
    assert all(alike(rb[at], item) for at, item in enumerate(items))
    mixed = rb[:]
    assert all(alike(one, item) for one, item in zip(mixed, items, strict=True))


@private_list
@pytest.mark.parametrize("item", [3 + 4j, {1, 2}, torch.float16, len], ids=str)
def test_a_list_of_one_process_keeps_any_object(maker: Maker, item: Any) -> None:
    rb = rb_of(maker, collate_fn=list)
    rb.extend([{"a": item}, item])
    assert rb[0] == {"a": item}
    assert rb[:] == [{"a": item}, item]


# -- what is a batch ------------------------------------------------------------------------------


BATCHES: dict[str, tuple[Any, list[Any]]] = {
    "list": (lambda: ["a", {"b": 1}, None], ["a", {"b": 1}, None]),
    "generator": (lambda: (letter for letter in "abc"), ["a", "b", "c"]),
    "range": (lambda: range(3), [0, 1, 2]),
    "keys": (lambda: {"x": 1, "y": 2}.keys(), ["x", "y"]),
    "tuples": (lambda: [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    "tensor": (
        lambda: torch.arange(4).reshape(2, 2),
        [torch.tensor([0, 1]), torch.tensor([2, 3])],
    ),
    "array": (lambda: np.arange(4).reshape(2, 2), [np.array([0, 1]), np.array([2, 3])]),
    "tensordict": (
        lambda: TensorDict({"a": torch.arange(4).reshape(2, 2), "t": torch.zeros(2, 1)}, [2]),
        [TensorDict(a=torch.tensor([n, n + 1]), t=torch.zeros(1)) for n in (0, 2)],
    ),
    "tensorclass": (
        lambda: Step(obs=torch.arange(2), text="t", batch_size=[2]),
        [Step(obs=torch.tensor(n), text="t", batch_size=[]) for n in (0, 1)],
    ),
    "lazy stack": (
        lambda: lazy_stack([TensorDict(a=torch.zeros(n), s=str(n)) for n in (2, 3)]),
        [TensorDict(a=torch.zeros(n), s=str(n)) for n in (2, 3)],
    ),
    "list of one batch": (
        lambda: [TensorDict({"a": torch.arange(2)}, [2])],
        [TensorDict({"a": torch.arange(2)}, [2])],
    ),
}


@pytest.mark.product
@every_list
@pytest.mark.parametrize("batch", BATCHES)
def test_any_batch_of_items_extends_a_list(maker: Maker, batch: str) -> None:
    made, items = BATCHES[batch]
    rb = rb_of(maker, collate_fn=list)
    assert rb.extend(made()).tolist() == list(range(len(items)))
    assert len(rb) == len(items)
    assert all(alike(rb[at], item) for at, item in enumerate(items))


@pytest.mark.product(few=10)
@every_list
@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"a": torch.zeros(3), "b": 5}, TypeError),
        ((torch.zeros(3), torch.ones(3)), TypeError),
        (Point(torch.zeros(3), torch.ones(3)), TypeError),
        ("text", TypeError),
        (b"bytes", TypeError),
        (5, TypeError),
        (torch.tensor(1.0), RuntimeError),
        (TensorDict(a=torch.zeros(3)), RuntimeError),
    ],
    ids=["dict", "tuple", "namedtuple", "str", "bytes", "int", "scalar", "no batch"],
)
def test_data_without_items_do_not_extend_a_list(
    maker: Maker, batch: Any, error: type[Exception]
) -> None:
    rb = rb_of(maker)
    with pytest.raises(error, match=r"list\(data\)|one item: use add"):
        rb.extend(batch)
    assert len(rb) == rb.write_count == 0


@every_list
def test_a_dict_of_batches_of_different_sizes_is_refused(maker: Maker) -> None:
    rb = rb_of(maker)
    with pytest.raises(
        ValueError, match=r"their lengths differ: \{'a': 3, 'b': 2\}; a list of dicts"
    ):
        rb.extend({"a": torch.arange(3), "b": torch.arange(2)})
    assert len(rb) == 0


@every_list
def test_a_batch_of_nothing_writes_nothing(maker: Maker) -> None:
    rb = rb_of(maker)
    for nothing in ([], torch.zeros(0, 3), iter(())):
        index = rb.extend(nothing)
        assert index.dtype is torch.int64
        assert index.tolist() == []
    assert rb.write_count == 0


# -- what is a sample -----------------------------------------------------------------------------


@every_list
def test_tensors_arrays_and_numbers_are_stacked(maker: Maker) -> None:
    rb = rb_of(maker)
    for items, expected, dtype in (
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], [[1, 2], [3, 4]], torch.int64),
        ([np.zeros(2, np.float32), np.ones(2, np.float32)], [[0, 0], [1, 1]], torch.float32),
        ([1, 2, 3], [1, 2, 3], torch.int64),
        ([np.float64(1.5), np.float64(2)], [1.5, 2], torch.float64),
    ):
        rb.empty()
        rb.extend(items)
        assert rb[:].dtype is dtype
        assert rb[:].tolist() == expected
        data, info = rb.sample(return_info=True)
        assert torch.equal(data, rb[:][info["index"]])


@every_list
def test_pytrees_are_stacked_leaf_by_leaf(maker: Maker) -> None:
    trees = ({"a": (torch.tensor(i), [torch.tensor([i, i])]), 3: Point(i, str(i))} for i in (0, 1))
    found = everything(maker, *trees)
    assert found["a"][0].tolist() == [0, 1]
    assert found["a"][1][0].tolist() == [[0, 0], [1, 1]]
    assert type(found[3]) is Point
    assert found[3].x.tolist() == [0, 1]
    assert found[3].y == ["0", "1"]


@every_list
def test_text_and_other_objects_stay_a_list(maker: Maker) -> None:
    rb = rb_of(maker)
    for items, expected in (
        (["a", "b"], ["a", "b"]),
        ([{"t": "a"}, {"t": "b"}], {"t": ["a", "b"]}),
        (["a", {"b": 1}, None], ["a", {"b": 1}, None]),
    ):
        rb.empty()
        rb.extend(items)
        assert rb[:] == expected


@dense_list
def test_tensordicts_are_stacked_densely_where_that_is_possible(maker: Maker) -> None:
    rb = rb_of(maker)
    rb.extend([TensorDict(a=torch.zeros(2), s="x"), TensorDict(a=torch.ones(2), s="y")])
    for batch in (rb[:], rb.sample()):
        assert type(batch) is TensorDict
        assert batch["a"].is_contiguous()
    assert rb[:]["a"].tolist() == [[0, 0], [1, 1]]
    assert isinstance(rb[:].get("s"), NonTensorStack)
    assert rb[:]["s"] == ["x", "y"]
    assert type(rb.storage.get([0, 1])) is list
    rb.add(TensorDict(a=torch.ones(3)))
    ragged = rb[1:]
    assert isinstance(ragged, LazyStackedTensorDict)
    assert ragged.batch_size == torch.Size([2])
    assert [one["a"].tolist() for one in ragged.unbind(0)] == [[1.0] * 2, [1.0] * 3]


@every_list
def test_tensorclasses_come_back_as_their_class(maker: Maker) -> None:
    found = everything(maker, Step(obs=torch.zeros(2), text="x"), Step(obs=torch.ones(2), text="y"))
    assert type(found) is Step
    assert found.batch_size == torch.Size([2])
    assert [one.obs.tolist() for one in found.unbind(0)] == [[0, 0], [1, 1]]
    assert list(found.text) == ["x", "y"]


@pytest.mark.product(few=6)
@every_list
@pytest.mark.parametrize(
    ("items", "words"),
    [
        ((torch.zeros(2), torch.zeros(3)), r"tensor of shape \[3\] at position 1"),
        (({"a": 1}, {"b": 1}), r"dict with the keys \['b'\] at position 1"),
        (((1, 2), (1, 2, 3)), "tuple of length 3 at position 1"),
        (({"a": (torch.zeros(1),)}, {"a": (torch.zeros(2),)}), "part 0 of entry 'a' of the item"),
        (
            tuple(TensorDict({"a": torch.zeros(size)}, size) for size in ([], [1])),
            r"the same batch size, .*\[\].*\[1\]",
        ),
    ],
    ids=["shapes", "keys", "lengths", "nested", "batch sizes"],
)
def test_items_that_cannot_be_one_batch_say_where_they_differ(
    maker: Maker, items: Any, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        everything(maker, *items)
    assert "collate_fn" in str(caught.value)
    rb = rb_of(maker, name="apart", collate_fn=list)
    rb.extend(list(items))
    assert all(map(alike, rb[:], items))


@every_list
def test_an_entry_set_in_a_sample_is_not_set_in_the_items(maker: Maker) -> None:
    rb = maker.buffer(10, batch_size=8)
    rb.extend([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
    sample = rb.sample()
    sample.set("more", torch.arange(8))
    assert sample["more"].tolist() == list(range(8))  # also of items that were drawn twice
    assert set(rb[0].keys()) == set(rb[1].keys()) == {"a"}


@compressing
def test_bytes_are_those_of_the_stored_items(maker: Maker) -> None:
    storage = maker.storage(10)
    assert storage.bytes() == 0
    storage.set(0, torch.zeros(10_000))
    one = storage.bytes()
    assert 0 < one < 400
    storage.set(range(1, 4), torch.zeros(3, 10_000))
    assert storage.bytes() == 4 * one
    storage.set(0, "text")
    assert storage.bytes() < 3 * one + 100
    storage._empty()
    assert storage.bytes() == 0


# -- growth and threads ---------------------------------------------------------------------------


@private_list
def test_a_list_without_a_limit_shows_the_largest_int64_and_never_goes_round(maker: Maker) -> None:
    rb = ReplayBuffer(storage=maker.storage(None), batch_size=50)
    assert rb.storage.max_size == torch.iinfo(torch.int64).max
    for start in range(0, 5000, 500):
        index = rb.extend(torch.arange(start, start + 500))
        assert index.tolist() == list(range(start, start + 500))
    assert rb.add(torch.tensor(5000)) == 5000
    assert len(rb) == rb.write_count == rb.stats()["size"] == 5001
    assert rb[:].tolist() == list(range(5001))
    data, info = rb.sample(return_info=True)
    assert torch.equal(data, info["index"])


@every_list
def test_threads_read_whole_items_while_another_one_writes(maker: Maker) -> None:
    limit = None if maker.case.storage in LISTS else 50
    rb = ReplayBuffer(storage=maker.storage(limit), batch_size=10)
    rb.extend(steps(0, 5))
    stop, failed = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                assert_are_steps(rb.sample())
        except BaseException as error:  # raised again below
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(40):
        rb.extend(steps(5 * (number % 39), 5 * (number % 39) + 5))
    stop.set()
    for reader in readers:
        reader.join()
    assert not failed
    assert rb.write_count == 205
