"""Items of any size: one encoder and one decoder for arrays and TensorDicts."""

from __future__ import annotations

import signal
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from shmbuffer import CompressedListStorage, LazyStackStorage, ReplayBuffer
from shmbuffer._native import _core
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.numpy import attach
from tests.crash.harness import ended, fork
from tests.kit.items import Step
from tests.kit.rings import ring_of
from tests.numpy.conftest import Directory
from tests.numpy.test_both_clients import as_tensor, bits, some_bytes
from tests.numpy.test_processes import run

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

STORAGES = ("LazyStackStorage", "CompressedListStorage")
Point = namedtuple("Point", ["x", "y"])


def create(directory: Directory, storage: str = STORAGES[0], **options: Any) -> None:
    directory.create(storage=storage, max_bytes=2**22, **options)


def body(buffer: Any, slot: int = 0) -> bytes:
    """Returns the bytes of a record after its header."""
    ring = ring_of(buffer)
    return bytes(ring.records.read(np.array([slot])).batch.body(0))


ITEMS: dict[str, Any] = {
    "arrays": {"obs": np.arange(3.0), "next": {"obs": np.zeros((2, 0), np.int8)}},
    "numbers": {"i": 1, "f": 1.5, "b": True, "c": 1j, "n": np.float64(2), "s": np.int8(3)},
    "text and bytes": {"a": "text", "ü": "ü\n", "b": b"bytes"},
    "lists": {"a": [1.0, 2.0], "b": [[1], [2]], "c": ["x", "y"], "d": (1, 2)},
    "large": {"frame": np.zeros((100, 100), np.uint8), "a": np.arange(500)},
    "tuples for keys": {("a", "b"): np.zeros(2), ("a", "c"): "x"},
    "what a sample adds": {"a": np.zeros(2), "index": np.zeros(()), "_weight": np.ones(())},
    "with a priority": {"a": np.zeros(2), "td_error": 2.0},
    "another order": {"a": np.zeros((2, 3)).T, "b": np.arange(3, dtype=">i4")},
}


@pytest.mark.product(few=6)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS.keys())
def test_an_item_is_the_record_that_the_other_client_makes(
    item: Any, storage: str, directory: Directory, other: Directory
) -> None:
    create(directory, storage)
    create(other, storage)
    arrays, tensors = directory.arrays(), other.tensors()
    given = item
    # torch supports only the native byte order
    if "b" in item and item["b"] is ITEMS["another order"]["b"]:
        given = {**item, "b": item["b"].astype(np.int32)}
    assert arrays.add(item) == tensors.add(given) == 0
    assert body(arrays) == body(tensors)


PLAIN: dict[str, Any] = {
    "an array": np.arange(3.0),
    "a dict": {"a": np.zeros(2, np.float16), 1: "x", (1, "b"): None, None: 2**70},
    "a list": [1, 2.5, True, None, b"x", np.float32(1), np.array(["a", "bc"])],
    "a namedtuple": Point(np.zeros(1), {"a": (1, 2)}),
    "in their order": OrderedDict(b=1, a=2),
}


@pytest.mark.parametrize("item", PLAIN.values(), ids=PLAIN.keys())
def test_an_item_without_names_is_one_record_and_comes_back_as_it_was(
    item: Any, directory: Directory, other: Directory
) -> None:
    options = {"shared_init": True, "max_bytes": 2**20}
    with (
        ReplayBuffer(storage=CompressedListStorage(8, scratch_dir=directory.path, **options)),
        ReplayBuffer(
            storage=CompressedListStorage(8, scratch_dir=other.path, **options)
        ) as tensors,
    ):
        arrays = directory.arrays()
        assert arrays.add(item) == tensors.add(item) == 0
        assert body(arrays) == body(tensors)
        (found,), info = arrays.sample(1, return_info=True)
        assert type(found) is type(item)
        kept = {key: found[key] for key in item} if isinstance(item, dict) else found
        np.testing.assert_equal(kept, item)
        assert info["index"].tolist() == [0]


def test_items_of_tensordicts_come_out_as_dicts(directory: Directory) -> None:
    create(directory, alpha=None)
    tensors, arrays = directory.tensors(), directory.arrays()
    tensors.extend(
        [
            TensorDict({"a": torch.arange(2), "n": {"b": torch.ones(1)}, "t": "text"}),
            TensorDict({"o": [1, "x", None]}, device="cpu"),
            Step(obs=torch.zeros(3), text="y", batch_size=[]),
            TensorDict(
                {"l": lazy_stack([TensorDict({"a": torch.zeros(n)}, []) for n in (1, 2)])}, [2]
            ),
        ]
    )
    found: dict[int, Any] = {}
    while len(found) < 4:
        items, info = arrays.sample(8, return_info=True)
        for item, at in zip(items, info["index"].tolist(), strict=True):
            own = {"index": at, "index_generation": at}
            found[at] = {key: value for key, value in item.items() if key not in own}
            assert {key: int(item[key]) for key in own} == own
    np.testing.assert_equal(
        found,
        {
            0: {"a": np.arange(2), "n": {"b": np.ones(1, np.float32)}, "t": "text"},
            1: {"o": [1, "x", None]},
            2: {"obs": np.zeros(3, np.float32), "text": "y"},
            3: {"l": [{"a": np.zeros(n, np.float32)} for n in (1, 2)]},
        },
    )


@pytest.mark.product(few=6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_leaves_of_each_dtype_go_both_ways(dtype: str, directory: Directory) -> None:
    create(directory)
    tensors, arrays = directory.tensors(), directory.arrays()
    data = some_bytes(dtype, 3, 2)
    tensor = as_tensor(data, dtype)
    tensors.add(TensorDict({"a": tensor}))
    (item,) = arrays.sample(1)
    assert item["a"].dtype == DTYPES[dtype].array
    assert bits(item["a"]) == bits(data)
    arrays.add({"a": tensor})
    assert body(arrays, 1) == body(tensors, 0)


def test_a_batch_is_a_list_of_items_or_a_dict_of_rows(
    directory: Directory, other: Directory
) -> None:
    create(directory)
    create(other)
    arrays, tensors = directory.arrays(), other.tensors()
    rows = {"a": np.arange(6.0).reshape(3, 2), "n": {"b": np.arange(3)}}
    items = [{"a": np.zeros(n), "t": "x" * n} for n in range(3)]
    for batch in (rows, items):
        assert arrays.extend(batch).tolist() == tensors.extend(batch).tolist()
    assert [body(arrays, at) for at in range(6)] == [body(tensors, at) for at in range(6)]
    arrays.extend({"a": np.zeros((2, 1)), "t": ["one", "two"]}, streams=[3, 4])
    assert [one["t"] for one in directory.tensors()[[6, 7]].unbind(0)] == ["one", "two"]
    assert arrays.extend([]).tolist() == []


@pytest.mark.parametrize("named", [True, False], ids=["with names", "a PyTree"])
def test_a_column_of_text_is_the_same_in_both_clients(
    named: bool, directory: Directory, other: Directory
) -> None:
    made: list[Any] = []
    for one in (directory, other):
        if named:
            create(one, alpha=None)
            made.append(one.tensors())
        else:
            storage = LazyStackStorage(64, scratch_dir=one.path, shared_init=True, max_bytes=2**16)
            made.append(ReplayBuffer(storage=storage))
            made[-1].add({"text": "first"})
    tensors, arrays = made[1], directory.arrays()
    texts = ["one", "two", "three"]
    columns = [np.array(texts), np.array(texts, object), np.array(texts, "S"), texts]
    for column in [*columns, NonTensorStack(*texts)][: None if named else 4]:
        batch = {"text": column, "n": {"text": column}}
        if named:
            batch["a"] = np.arange(3.0)
        assert arrays.extend(batch).tolist() == tensors.extend(batch).tolist()
    count = len(tensors)
    assert [body(arrays, at) for at in range(count)] == [body(tensors, at) for at in range(count)]
    assert [tensors[at]["text"] for at in range(count)][-3:] == texts


def test_what_is_compressed_together_is_read(directory: Directory) -> None:
    create(directory, STORAGES[1], dictionary_bytes=1024)
    arrays, tensors = directory.arrays(rng=0), directory.tensors()
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 9, (70, 1, 84), dtype=np.uint8), 84, axis=1)
    stacks = [
        {"obs": frames[at : at + 4].copy(), "next": {"obs": frames[at + 1 : at + 5].copy()}}
        for at in range(64)
    ]
    arrays.extend(stacks[:32])
    tensors.extend(stacks[32:])
    items, info = arrays.sample(128, return_info=True)
    for item, at in zip(items, info["index"].tolist(), strict=True):
        assert np.array_equal(item["obs"], frames[at : at + 4])
        assert np.array_equal(item["next"]["obs"], frames[at + 1 : at + 5])
    read = tensors[:32]
    assert all(
        np.array_equal(one["obs"].numpy(), frames[at : at + 4]) for at, one in enumerate(read)
    )
    assert len(body(arrays)) < 4 * 84 * 84


def test_priorities_of_items_go_in_and_come_back(directory: Directory) -> None:
    create(directory, alpha=0.6)
    arrays, tensors = directory.arrays(), directory.tensors()
    arrays.extend([{"a": np.zeros(n), "td_error": n + 1.0} for n in range(3)])
    arrays.add({"a": "x", "td_error": np.array([2.0, 7.0])})
    arrays.extend([{"a": 1, "td_error": 1.0}, {"a": 2}])
    ring = ring_of(tensors)
    assert ring.tree.priorities(slice(0, 6)).tolist() == [1.0, 2.0, 3.0, 7.0, 7.0, 7.0]
    sample = arrays.sample(12)
    for item in sample:
        item["td_error"] = item["index"] + 10.0
    assert arrays.update_priority(sample) == (12, 0)
    assert arrays.update_priority(sample, [item["index"] + 20.0 for item in sample]) == (12, 0)
    for item in sample:
        assert ring.tree.priorities(slice(0, 6))[item["index"]] == item["index"] + 20.0
    with pytest.raises(ValueError, match=r"priorit.*nothing was changed"):
        arrays.add({"a": 1, "td_error": -1.0})
    assert len(arrays) == 6


def test_what_a_record_cannot_hold_is_refused(directory: Directory) -> None:
    create(directory)
    arrays = directory.arrays()
    with pytest.raises(TypeError, match=r"entry 'a' -> 'b'.*object.*a record can contain"):
        arrays.add({"a": {"b": object()}})
    with pytest.raises(TypeError, match="this write is a tuple, but entries of a"):
        arrays.add((1, 2))
    with pytest.raises(TypeError, match="the key 1 in the data is not a string"):
        arrays.add({1: 2})
    with pytest.raises(TypeError, match="a batch of items of any size must be a list of items"):
        arrays.extend(np.zeros(()))
    with pytest.raises(ValueError, match=r"one row for each item, but their lengths differ:"):
        arrays.extend({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="3 streams were given for 2 items"):
        arrays.extend([{"a": 1}, {"a": 2}], streams=[0, 1, 2])
    assert len(arrays) == 0


def test_what_a_function_of_the_users_compresses_is_left_to_torch(directory: Directory) -> None:
    storage = CompressedListStorage(
        8,
        scratch_dir=directory.path,
        shared_init=True,
        max_bytes=2**20,
        compression_fn=lambda tensor: tensor.reshape(-1).view(torch.uint8),
        decompression_fn=lambda chunk: chunk,
    )
    with ReplayBuffer(storage=storage) as tensors:
        tensors.add(torch.zeros(100))
        arrays = directory.arrays()
        with pytest.raises(RuntimeError, match="compressed with a compression_fn"):
            arrays.sample(1)
        with pytest.raises(TypeError, match=r"shmbuffer\.attach\(compression_fn=\.\.\.\)"):
            arrays.add(np.zeros(3))


RECORDS = """
import sys

import numpy as np
import shmbuffer.numpy

with shmbuffer.numpy.attach(sys.argv[1], rng=0) as buffer:
    buffer.extend([{"obs": np.zeros(n), "text": "x" * n} for n in range(9)])
    buffer.add({"obs": np.zeros(900), "td_error": 2.0})
    sample = buffer.sample(8)
    assert buffer.update_priority(sample, np.ones(8)) == (8, 0), sample
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "tensordict"}))
"""


@pytest.mark.parametrize("storage", STORAGES)
def test_records_need_neither_torch_nor_tensordict(storage: str, directory: Directory) -> None:
    create(directory, storage, alpha=0.6)
    assert run(RECORDS, directory.path).split() == []
    assert directory.tensors()[8]["text"] == "x" * 8


def collect(path: Path, point: str) -> None:
    """Runs a collector that dies at a sync point of its second batch."""
    with attach(path, role="collector") as buffer:
        buffer.extend([{"a": 1, "b": np.full(n, 1)} for n in range(1, 4)])
        _core.arm(point)
        buffer.extend([{"a": 2, "b": np.full(n, 2)} for n in range(1, 4)])


@pytest.mark.crash
@pytest.mark.parametrize(
    ("point", "kept"), [("write.claimed", 3), ("write.payload", 3), ("write.count", 6)]
)
def test_a_collector_that_dies_in_a_write_leaves_whole_records(
    point: str, kept: int, directory: Directory
) -> None:
    create(directory, alpha=0.6)
    learner = directory.tensors()
    assert ended(fork(lambda: collect(directory.path, point))) == -signal.SIGKILL
    learner.add(TensorDict({"a": torch.tensor(3), "b": torch.full((5,), 3)}))
    assert len(learner) == kept + 1
    for item in learner.sample(16).unbind(0):
        assert (item["b"] == item["a"]).all()


def test_a_storage_of_lazy_stacks_of_ones_own_is_read(directory: Directory) -> None:
    storage = LazyStackStorage(
        8, scratch_dir=directory.path, shared_init=True, max_bytes=2**20, stack_dim=-1
    )
    with ReplayBuffer(storage=storage) as tensors:
        tensors.extend([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        items, info = directory.arrays().sample(4, return_info=True)
        assert [len(item["a"]) for item in items] == (info["index"] + 1).tolist()
