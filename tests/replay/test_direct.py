"""The direct write path stores the same bytes as the usual path and leaves all other data to it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from shmbuffer import (
    BufferClosedError,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)


class Watcher:
    """An observer of every write; with one attached, only the usual path is used."""

    def mark_update(self, index: Any) -> None:
        """Accepts an update."""


def prioritized(capacity: int = 10, **kwargs: Any) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(capacity), batch_size=4, **kwargs
    )


def batch(first: int, count: int) -> dict[str, Any]:
    numbers = torch.arange(first, first + count)
    return {
        "obs": (numbers[:, None] + torch.arange(3)).float(),
        "done": numbers % 2 == 0,
        "next": {"reward": numbers.double(), "action": numbers[:, None, None].to(torch.int16)},
        "td_error": numbers.float() + 1,
    }


def boxed(data: dict[str, Any], count: int) -> TensorDict:
    return TensorDict(data, [count])


def as_arrays(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: as_arrays(value) if isinstance(value, dict) else value.numpy()
        for key, value in data.items()
    }


def mixed(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "obs": data["obs"].numpy(), "next": boxed(data["next"], len(data["obs"]))}


def went_in(buffer: Any, data: Any, *, single: bool = False) -> Any:
    """Writes over the direct path; returns the index, or None if the path declines the data."""
    return buffer.plan.fast_write.write(data, single, converts=False)


def contents(buffer: Any) -> list[Any]:
    """Returns all contents of a buffer, including priorities and counts."""
    ring = ring_of(buffer)
    rows = buffer.storage.mover()
    held = [view.numpy()[ring.live.committed()].tobytes() for view in rows.views()]
    return [
        held,
        ring.tree.priorities().tobytes(),
        ring.tree.mass().tobytes(),
        ring.head,
        ring.write_count,
    ]


@pytest.mark.parametrize(
    "form",
    [lambda data: boxed(data, 4), lambda data: data, as_arrays, mixed],
    ids=["TensorDict", "dict of tensors", "dict of arrays", "mixed"],
)
def test_a_batch_is_written_as_the_usual_way_writes_it(form: Any) -> None:
    short, usual = prioritized(), prioritized()
    watcher = Watcher()
    for buffer in (short, usual):
        buffer.extend(boxed(batch(0, 2), 2))
    usual.storage.attach(watcher)
    for round_ in range(4):
        data = batch(100 * round_, 4)
        assert went_in(usual, form(data)) is None
        index = went_in(short, form(data))
        expected = usual.extend(form(data))
        assert torch.equal(index, expected)
        assert index.dtype is torch.int64
        assert contents(short) == contents(usual)


@pytest.mark.parametrize("as_array", [False, True])
def test_an_item_is_written_as_the_usual_way_writes_it(as_array: bool) -> None:
    short, usual = prioritized(3), prioritized(3)
    watcher = Watcher()
    for buffer in (short, usual):
        buffer.extend(boxed(batch(0, 2), 2))
    usual.storage.attach(watcher)
    for number in range(5):
        item = boxed(batch(number, 1), 1)[0].to_dict()
        if as_array:
            # Indexing turns a scalar array into a NumPy scalar, hence the view.
            item = {
                **item,
                "obs": item["obs"].numpy(),
                "td_error": np.asarray(item["td_error"].numpy()),
            }
        index = went_in(short, item, single=True)
        assert index == usual.add(item) == (number + 2) % 3
        assert type(index) is int
        assert contents(short) == contents(usual)


NUMBERS: dict[str, list[Any]] = {
    "float": [0.1, -0.0, 1e300, 3.5e38, float("inf"), float("-inf"), float("nan")],
    "double": [np.float64(0.1), np.float64(1e300), np.float64("inf")],
    "int": [0, -1, 1, 127, 128, -128, -129, 255, 256, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)],
    "large": [2**63, -(2**63) - 1, 10**400],
    "bool": [True, False, np.bool_(True)],
    "numpy": [np.float32(0.1), np.int8(-3), np.uint8(200), np.int64(2**40), np.float16(0.5)],
    "none": [1j, np.complex64(1j), np.str_("1"), None, "1"],
}
TAKEN = {
    torch.float32: ({"bool", "int", "float", "double"}, np.float32),
    torch.float64: ({"bool", "int", "float"}, np.float64),
    torch.uint8: ({"bool", "int"}, np.uint8),
    torch.int8: ({"bool", "int"}, np.int8),
    torch.int64: ({"bool", "int"}, np.int64),
    torch.bool: ({"bool"}, np.bool_),
    torch.float16: (set(), np.float16),
    torch.bfloat16: (set(), None),
    torch.complex64: (set(), None),
}


def bytes_at(buffer: Any, index: int) -> list[int]:
    column = buffer.storage.mover().views()[0]
    return column[index : index + 1].view(torch.uint8).tolist()


def written_as_usual(buffer: Any, number: Any) -> list[int] | None:
    """Returns the stored bytes, or None if the usual path refuses the number."""
    try:
        return bytes_at(buffer, buffer.add({"number": number}))
    except (SchemaMismatchError, TypeError, RuntimeError):
        return None


@pytest.mark.parametrize("dtype", TAKEN, ids=str)
def test_a_number_is_written_as_the_usual_way_writes_it(dtype: torch.dtype) -> None:
    short, usual = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    for buffer in (short, usual):
        buffer.extend({"number": torch.zeros(2, dtype=dtype)})
    usual.storage.attach(Watcher())
    kinds, its_own = TAKEN[dtype]
    taken = set()
    for kind, numbers in NUMBERS.items():
        for number in numbers:
            index = went_in(short, {"number": number}, single=True)
            stored = written_as_usual(usual, number)
            if index is not None:
                taken.add(kind if type(number) is not its_own else "its own")
                assert bytes_at(short, index) == stored, number
    assert taken == kinds | ({"its own"} if its_own is not None else set())
    # a list in a batch is neither a number nor an array
    assert went_in(short, {"number": [True]}) is None


def test_numbers_go_in_beside_tensors_also_where_they_are_the_priority() -> None:
    short, usual = prioritized(), prioritized()
    beside = [prioritized(priority_key="priority") for _ in range(2)]
    for buffer in (short, usual):
        buffer.extend({"obs": torch.zeros(1, 3), "td_error": torch.ones(1)})
    for buffer in beside:
        buffer.extend({"obs": torch.zeros(1, 3)})
    for buffer in (usual, beside[1]):
        buffer.storage.attach(Watcher())
    for priority in (0.1, np.float32(0.1), np.float64(0.25), 3, 0):
        item = {"obs": torch.ones(3), "td_error": priority}
        assert went_in(short, item, single=True) == usual.add(item)
        item = {"obs": torch.ones(3), "priority": priority}
        assert went_in(beside[0], item, single=True) == beside[1].add(item)
    assert contents(short) == contents(usual)
    assert contents(beside[0]) == contents(beside[1])
    for wrong in (-1.0, float("nan"), 10**400, "one"):
        with pytest.raises((ValueError, TypeError, OverflowError, SchemaMismatchError)):
            beside[0].add({"obs": torch.ones(3), "priority": wrong})
    assert contents(beside[0]) == contents(beside[1])


def items(first: int, count: int, form: Any = None) -> list[Any]:
    rows = batch(first, count)
    found = [boxed(rows, count)[at] for at in range(count)]
    return [item if form is None else form(item.to_dict()) for item in found]


def with_numbers(item: dict[str, Any]) -> dict[str, Any]:
    return {
        **item,
        "done": bool(item["done"]),
        "td_error": float(item["td_error"]),
        "next": {**item["next"], "reward": float(item["next"]["reward"])},
    }


@pytest.mark.parametrize("count", [1, 4, 13, 300])
@pytest.mark.parametrize("form", [None, dict, with_numbers], ids=["TensorDict", "dict", "numbers"])
def test_a_list_of_items_is_written_as_the_usual_way_writes_it(form: Any, count: int) -> None:
    short, usual = prioritized(10), prioritized(10)
    for buffer in (short, usual):
        buffer.extend(boxed(batch(0, 2), 2))
    usual.storage.attach(Watcher())
    for first in (7, 90):
        index = went_in(short, items(first, count, form))
        assert torch.equal(index, usual.extend(items(first, count, form)))
        assert contents(short) == contents(usual)


def test_streams_of_the_items_of_a_list_are_kept() -> None:
    short = prioritized(10)
    short.extend(boxed(batch(0, 2), 2))
    short.extend(items(0, 3), streams=[4, 5, 6])
    assert (ring_of(short).live.sources[2:5] >> 39 & 0xFFFFFF).tolist() == [4, 5, 6]


def test_a_list_whose_items_differ_is_left_to_the_usual_way() -> None:
    short = prioritized(10)
    short.extend(boxed(batch(0, 2), 2))
    before = contents(short)
    rows = items(0, 3)
    for wrong in (
        [],
        [rows[0], None],
        [*rows, rows[0].exclude("done")],
        [rows[0], boxed(batch(0, 2), 2)],
        [rows[0], {**rows[1].to_dict(), "obs": torch.zeros(4)}],
        [rows[0], {**rows[1].to_dict(), "td_error": torch.tensor(1)}],
        tuple(rows),
    ):
        assert went_in(short, wrong) is None
    assert contents(short) == before
    beside = prioritized(10, priority_key="priority")
    beside.extend({"obs": torch.zeros(1, 3)})
    item = {"obs": torch.ones(3)}
    assert went_in(beside, [{**item, "priority": 2.0}, item]) is None
    assert went_in(beside, [{**item, "priority": 2.0}] * 2).tolist() == [1, 2]
    assert went_in(beside, [item]).tolist() == [3]
    assert ring_of(beside).tree.priorities()[1:3].tolist() == [2, 2]


def test_more_items_than_there_is_room_for_leave_the_last_ones() -> None:
    short, usual = prioritized(5), prioritized(5)
    watcher = Watcher()
    for buffer in (short, usual):
        buffer.extend(batch(0, 2))
    usual.storage.attach(watcher)
    index = went_in(short, batch(0, 13))
    assert torch.equal(index, usual.extend(batch(0, 13)))
    assert contents(short) == contents(usual)


def test_many_leaves_and_many_priorities_have_room() -> None:
    data = {f"leaf {at}": torch.arange(300) * at for at in range(100)}
    data["td_error"] = torch.arange(300.0)
    rb = prioritized(400)
    rb.extend(data)
    assert torch.equal(went_in(rb, data), (torch.arange(300) + 300) % 400)
    assert torch.equal(rb[299]["leaf 99"], torch.tensor(299 * 99))
    assert ring_of(rb).tree.priorities()[[0, 199, 200, 399]].tolist() == [100, 299, 200, 99]


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_array", [False, True])
def test_priorities_next_to_the_leaves_are_read(real: torch.dtype, as_array: bool) -> None:
    rb = prioritized()
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    error = torch.tensor([[3.0], [0.5], [7.0]], dtype=real)
    data = {"a": torch.arange(3), "td_error": error.numpy() if as_array else error}
    assert went_in(rb, data).tolist() == [2, 3, 4]
    assert ring_of(rb).tree.priorities()[:5].tolist() == [1, 1, 3, 0.5, 7]
    assert went_in(rb, {"a": torch.arange(1)}).tolist() == [5]
    assert ring_of(rb).tree.priorities()[5] == 7


#: Values for the int64 leaf "a" that the usual path converts.
CONVERTED = {
    "strided tensor": torch.arange(8)[::2],
    "strided array": np.arange(8)[::2],
    "parameter": torch.nn.Parameter(torch.arange(0, 8, 2), requires_grad=False),
    "map": MemoryMappedTensor.from_tensor(torch.arange(0, 8, 2)),
    "subclass of array": np.arange(0, 8, 2).view(np.recarray),
    "another name of the dtype": np.arange(0, 8, 2).astype(np.longlong),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_data_take_the_usual_way(name: str) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.arange(4)})
    assert went_in(rb, {"a": CONVERTED[name]}) is None
    rb.extend({"a": CONVERTED[name]})
    assert rb[4:8]["a"].tolist() == [0, 2, 4, 6]


def test_numbers_that_torch_keeps_as_a_flag_are_read_as_they_are() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.zeros(1, dtype=torch.float64)})
    negative = torch.tensor([2j], dtype=torch.complex128).conj().imag
    assert negative.is_neg()
    assert negative.is_contiguous()
    assert went_in(rb, {"a": negative}) is None
    rb.extend({"a": negative})
    assert rb[1]["a"] == -2
    conjugate = torch.tensor([1 + 2j]).conj()
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": conjugate.resolve_conj()})
    assert went_in(rb, {"a": conjugate}) is None
    rb.extend({"a": conjugate})
    assert rb[1]["a"] == 1 - 2j


def test_gradients_and_read_only_arrays_are_read() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.zeros(2)})
    assert went_in(rb, {"a": torch.ones(2, requires_grad=True)}).tolist() == [2, 3]
    fixed = np.full(2, 7, np.float32)
    fixed.flags.writeable = False
    assert went_in(rb, {"a": fixed}).tolist() == [4, 5]
    assert rb[:]["a"].tolist() == [0, 0, 1, 1, 7, 7]


def test_the_rings_own_memory_is_copied_first() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend({"a": torch.arange(5)})
    own = rb[:5]["a"]
    assert went_in(rb, {"a": own}) is None
    rb.extend({"a": own})
    assert rb[:]["a"].tolist() == [1, 2, 3, 4, 4, 0]


REFUSED: dict[str, Any] = {
    "a leaf is missing": {"a": torch.arange(3)},
    "a leaf is unknown": {"a": torch.arange(3), "b": torch.zeros(3, 2), "c": torch.zeros(3)},
    "another dtype": {"a": torch.arange(3).int(), "b": torch.zeros(3, 2)},
    "another dtype of an array": {"a": np.arange(3, dtype=np.int32), "b": np.zeros((3, 2), "f4")},
    "another shape": {"a": torch.arange(3), "b": torch.zeros(3, 3)},
    "more dimensions": {"a": torch.arange(3), "b": torch.zeros(3, 2, 1)},
    "another count": {"a": torch.arange(3), "b": torch.zeros(4, 2)},
    "a dict for a leaf": {"a": torch.arange(3), "b": {"c": torch.zeros(3, 2)}},
    "another byte order": {"a": np.arange(3).astype(">i8"), "b": torch.zeros(3, 2)},
    "text": {"a": "text", "b": torch.zeros(3, 2)},
    "not a dict": torch.arange(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_do_not_fit_are_refused_by_the_usual_way_alone(name: str) -> None:
    rb = prioritized()
    rb.extend(TensorDict({"a": torch.arange(2), "b": torch.zeros(2, 2)}, [2]))
    before = contents(rb)
    assert went_in(rb, REFUSED[name]) is None
    with pytest.raises((SchemaMismatchError, ValueError)):
        rb.extend(REFUSED[name])
    assert contents(rb) == before


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_invalid_priority_is_refused_and_changes_nothing(wrong: float) -> None:
    rb = prioritized()
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    before = contents(rb)
    data = {"a": torch.arange(3), "td_error": torch.tensor([1.0, wrong, 1.0]).double()}
    assert went_in(rb, data) is None
    with pytest.raises(ValueError, match=r"position 1 is not a number from 0 to|not negative"):
        rb.extend(data)
    assert contents(rb) == before


@pytest.mark.parametrize(
    "error",
    [torch.ones(3, 2), torch.ones(3, dtype=torch.float16), torch.arange(3)],
    ids=["several", "half", "integers"],
)
def test_priorities_to_be_reduced_or_converted_take_the_usual_way(error: torch.Tensor) -> None:
    rb = prioritized()
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert went_in(rb, {"a": torch.arange(3), "td_error": error}) is None
    rb.extend({"a": torch.arange(3), "td_error": error})
    assert len(rb) == 5


def test_the_fast_write_keeps_no_reference_to_its_data() -> None:
    rb = prioritized()
    rb.extend(batch(0, 2))
    right = boxed(batch(0, 3), 3)
    wrong = {**batch(0, 3), "td_error": torch.full((3,), torch.nan)}
    short = {key: value for key, value in batch(0, 3).items() if key != "done"}
    for data in (right, as_arrays(batch(0, 3)), wrong, short):
        held = [data["obs"], data["next"], data["next"]["reward"], data["td_error"], data]
        if data is right:
            held = [data._tensordict, *data._tensordict.values()]
        before = [sys.getrefcount(one) for one in held]
        for _ in range(100):
            went_in(rb, data)
        assert [sys.getrefcount(one) for one in held] == before


def test_nothing_is_written_for_an_empty_batch() -> None:
    rb = prioritized()
    rb.extend(batch(0, 2))
    assert went_in(rb, batch(0, 0)) is None
    assert len(rb.extend(batch(0, 0))) == 0
    assert len(rb) == 2


def test_a_leaf_by_itself_and_a_leaf_without_bytes_go_in() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.zeros(2, 3, 0))
    assert went_in(rb, torch.zeros(2, 3, 0)).tolist() == [2, 3]
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.zeros(2, 3))
    assert went_in(rb, np.ones((2, 3), np.float32)).tolist() == [2, 3]
    assert went_in(rb, torch.ones(3), single=True) == 4
    assert rb[:].sum() == 9


def test_without_priorities_in_the_data_the_default_one_is_given() -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10))
    index = rb.extend(torch.arange(2))
    rb.update_priority(index, torch.tensor([5.0, 2.0]))
    assert went_in(rb, torch.arange(3)).tolist() == [2, 3, 4]
    assert ring_of(rb).tree.priorities()[:5].tolist() == [5, 2, 5, 5, 5]


def test_a_class_in_between_is_asked() -> None:
    rb = prioritized()
    rb.extend(batch(0, 2))
    assert went_in(rb, batch(0, 1)).tolist() == [2]
    watcher, heard = Watcher(), []
    watcher.mark_update = heard.append  # type: ignore[method-assign]
    rb.storage.attach(watcher)
    rb.extend(batch(0, 2))
    rb.add(boxed(batch(0, 1), 1)[0])
    assert [torch.as_tensor(index).tolist() for index in heard] == [[3, 4], [5]]
    rb.storage.detach(watcher)
    assert went_in(rb, batch(0, 1)).tolist() == [6]
    rb.append_transform(lambda data: data.set("obs", data["obs"] + 2), invert=True)
    rb.extend(boxed(batch(0, 1), 1))
    assert rb[7]["obs"].tolist() == [2, 3, 4]


def test_a_sampler_that_chooses_the_first_priority_is_asked() -> None:
    sampler = PrioritizedSampler(4, 1.0, 1.0, max_priority_within_buffer=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    rb.extend({"a": torch.arange(2), "td_error": torch.tensor([9.0, 3.0])})
    assert went_in(rb, {"a": torch.arange(1), "td_error": torch.ones(1)}) is None
    rb.update_priority(torch.tensor([0]), torch.tensor([2.0]))
    rb.extend({"a": torch.arange(1), "td_error": torch.ones(1)}, update_priority=False)
    assert ring_of(rb).tree.priorities()[2] == 3


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Any]:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True)
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend({"a": torch.arange(4)})
        yield rb


def test_a_closed_buffer_says_so_and_nothing_is_left_that_writes(shared: Any) -> None:
    assert went_in(shared, {"a": torch.arange(2)}).tolist() == [4, 5]
    ring = ring_of(shared)
    assert ring.seat.intakes
    shared.close()
    assert not ring.seat.intakes
    with pytest.raises(BufferClosedError):
        shared.extend({"a": torch.arange(2)})
    with pytest.raises(BufferClosedError):
        shared.add({"a": torch.tensor(1)})
    assert not ring.seat.intakes


def test_the_child_of_a_fork_gets_a_way_of_its_own(shared: Any) -> None:
    assert went_in(shared, {"a": torch.arange(1)}).tolist() == [4]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            first = shared.extend({"a": torch.arange(1)}).tolist()
            second = went_in(shared, {"a": torch.arange(2)}).tolist()
            status = 0 if (first, second) == ([5], [6, 7]) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert went_in(shared, {"a": torch.arange(1)}).tolist() == [8]


def test_a_buffer_that_is_pickled_finds_its_way_where_it_arrives(shared: Any) -> None:
    with pickle.loads(pickle.dumps(shared)) as other:
        other.extend({"a": torch.arange(1)})
        assert went_in(other, {"a": torch.arange(1)}).tolist() == [5]
