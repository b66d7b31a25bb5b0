"""Arrays and TensorDicts in one directory: what one client writes, the other reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.format.dtypes import DTYPES
from tests.kit.items import Transition
from tests.kit.rings import ring_of
from tests.numpy.conftest import Directory

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns about complex32

COUNT = 5
SHAPE = (3, 2)


def some_bytes(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Makes numbers of every kind, or 0 and 1 for bool."""
    rng = np.random.default_rng(len(dtype))
    size = DTYPES[dtype].itemsize * int(np.prod(shape))
    found = rng.integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    return found.view(DTYPES[dtype].array).reshape(shape)


def bits(data: Any) -> bytes:
    """Returns the bytes of an array or a tensor."""
    if isinstance(data, torch.Tensor):
        flat = data.contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(data).tobytes()


def as_tensor(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    return flat.view(getattr(torch, dtype)).reshape(array.shape)


@pytest.mark.product(few=6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_each_dtype_come_out_as_tensors_of_it(dtype: str, directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays(dtypes={"a": dtype})
    data = some_bytes(dtype, COUNT, *SHAPE)
    arrays.extend({"a": data})
    found = directory.tensors()[:]["a"]
    assert found.dtype is getattr(torch, dtype)
    assert found.shape == (COUNT, *SHAPE)
    assert bits(found) == bits(data)


@pytest.mark.product(few=6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_each_dtype_come_out_as_arrays(dtype: str, directory: Directory) -> None:
    directory.create()
    tensors, arrays = directory.tensors(), directory.arrays()
    data = some_bytes(dtype, COUNT, *SHAPE)
    tensors.extend(TensorDict({"a": as_tensor(data, dtype)}, [COUNT]))
    sample = arrays.sample(40)
    assert sample["a"].dtype == DTYPES[dtype].array
    assert arrays.dtypes == {("a",): dtype}
    assert bits(sample["a"]) == bits(data[sample["index"]])


@pytest.mark.parametrize("dtype", [name for name, one in DTYPES.items() if not one.in_numpy])
def test_a_tensor_of_a_dtype_that_numpy_has_not_may_be_written(
    dtype: str, directory: Directory
) -> None:
    """Such a tensor declares its own dtype, like arrays of JAX and ml_dtypes."""
    directory.create()
    arrays = directory.arrays()
    data = some_bytes(dtype, COUNT, *SHAPE)
    arrays.extend({"a": as_tensor(data, dtype)})
    arrays.add({"a": as_tensor(data[0], dtype)})
    arrays.add({"a": data[1]})
    assert arrays.dtypes == {("a",): dtype}
    assert bits(directory.tensors()[:]["a"]) == bits(np.concatenate([data, data[:2]]))


class Point(NamedTuple):
    x: Any
    y: Any


FIRST_WRITES: dict[str, Any] = {
    "nested": {"obs": np.zeros((4, 3), np.float32), "next": {"obs": np.ones((4, 3)), "a": [1] * 4}},
    "one leaf": {"obs": np.zeros((4, 0), np.uint8)},
    "order": {"z": np.zeros(4), "a": np.zeros(4, bool), "m": np.zeros(4, np.int16)},
    "keys that need quoting": {"a b/c": np.zeros(4), "ü": np.zeros(4)},
    "tuples for keys": {("a", "b"): np.zeros(4), ("a", "c"): np.zeros((4, 1), np.complex64)},
    "numbers": {"i": [1, 2, 3, 4], "f": [1.0] * 4, "b": [True] * 4, "c": [1j] * 4},
    "numpy's numbers": {"f": [np.float64(1)] * 4, "h": [np.float32(1)] * 4},
    "lists of arrays": {"a": [np.zeros(2), np.ones(2)], "b": np.zeros(2, np.float16)},
    "with priorities": {"obs": np.zeros(4), "td_error": np.ones(4)},
    "what a sample adds": {"obs": np.zeros(4), "index": np.zeros(4), "_weight": np.ones(4)},
    "items": [{"obs": np.zeros(2), "r": 1.0, "d": False} for _ in range(3)],
}


@pytest.mark.product(few=4)
@pytest.mark.parametrize("data", FIRST_WRITES.values(), ids=FIRST_WRITES.keys())
def test_the_first_write_makes_the_schema_that_the_other_client_makes(
    data: Any, directory: Directory, other: Directory
) -> None:
    directory.create()
    other.create()
    assert directory.arrays().extend(data).tolist() == other.tensors().extend(data).tolist()
    assert directory.schema == other.schema


ITEMS: dict[str, Any] = {
    "arrays": {"obs": np.zeros(3), "next": {"obs": np.zeros((1, 2), np.int8)}},
    "numbers": {"i": 1, "f": 1.0, "b": True, "c": 1j, "n": np.float64(2), "s": np.int8(1)},
    "lists": {"a": [1.0, 2.0], "b": [[1], [2]]},
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS.keys())
def test_a_first_item_makes_the_schema_that_the_other_client_makes(
    item: Any, directory: Directory, other: Directory
) -> None:
    directory.create()
    other.create()
    assert directory.arrays().add(item) == other.tensors().add(item) == 0
    assert directory.schema == other.schema
    assert directory.arrays().add(item) == 1


PYTREES: dict[str, Any] = {
    "an array": np.zeros((4, 2), np.float32),
    "a dict with numbers for keys": {0: np.zeros(4), 1: np.zeros((4, 2)), "1": np.ones(4)},
    "a tuple": (np.zeros(4), [np.zeros((4, 1)), {"a": np.zeros(4, np.int32)}]),
    "a namedtuple": Point(np.zeros(4), np.zeros(4, np.uint16)),
}


def a_plain_buffer(directory: Directory, **options: Any) -> ReplayBuffer:
    storage = LazyMemmapStorage(64, scratch_dir=directory.path, shared_init=True, **options)
    return ReplayBuffer(storage=storage)


@pytest.mark.parametrize("data", PYTREES.values(), ids=PYTREES.keys())
def test_a_pytree_has_one_schema_and_comes_back_in_its_form(
    data: Any, directory: Directory, other: Directory
) -> None:
    with a_plain_buffer(directory), a_plain_buffer(other) as tensors:
        arrays = directory.arrays()
        arrays.extend(data)
        tensors.extend(data)
        assert directory.schema == other.schema
        found, info = arrays.sample(3, return_info=True)
        assert sorted(info) == ["index", "index_generation"]
        if isinstance(data, dict):
            assert found.keys() == data.keys() | info.keys()
        else:
            assert isinstance(found, tuple if isinstance(data, tuple) else np.ndarray)
        arrays.extend(data)
        tensors.extend(data)
        assert len(arrays) == len(tensors) == 8


def test_a_tensorclass_is_a_dict(directory: Directory) -> None:
    directory.create()
    tensors, arrays = directory.tensors(), directory.arrays()
    tensors.extend(Transition(torch.arange(4.0), torch.ones(4, 2), batch_size=[4]))
    sample = arrays.sample(8)
    assert sample["obs"].tolist() == sample["index"].tolist()
    arrays.extend({"obs": np.full(2, 9, np.float32), "reward": np.zeros((2, 2), np.float32)})
    assert isinstance(tensors[4], Transition)
    assert tensors[5].obs == 9


def test_several_storage_dimensions_are_those_of_the_other_client(
    directory: Directory, other: Directory
) -> None:
    steps = {"obs": np.arange(24.0).reshape(2, 4, 3), "td_error": np.ones((2, 4))}
    for one in (directory, other):
        one.create(ndim=2, alpha=0.6)
    arrays, tensors = directory.arrays(), other.tensors()
    assert np.array_equal(arrays.extend(steps), tensors.extend(TensorDict(steps, [2, 4])).numpy())
    assert directory.schema == other.schema
    item = {"obs": np.zeros((2, 3)), "td_error": np.ones(2)}
    assert np.array_equal(arrays.add(item), tensors.add(TensorDict(item, [2])).numpy())
    again = directory.tensors()
    assert (again[:, :]["obs"] == tensors[:, :]["obs"]).all()
    sample = arrays.sample(6)
    assert sample["index"].shape == (6, 2)
    assert arrays.update_priority(sample, np.full(6, 2.0)) == (6, 0)
    raw = ring_of(arrays).tree.priorities(sample["index"] @ np.array([2, 1]))
    assert raw.tolist() == [2.0] * 6


@pytest.mark.parametrize(
    "lies", ["strided", "backwards", "read-only", "another byte order", "of a class"]
)
def test_what_does_not_lie_as_it_has_to_is_converted(lies: str, directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    arrays.extend({"a": np.zeros((1, 3), np.float32)})
    data: Any = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    expected = data.copy()
    if lies == "read-only":
        data = expected.copy()
        data.flags.writeable = False
    elif lies == "backwards":
        data = expected[:, ::-1].copy()[:, ::-1]
    elif lies == "another byte order":
        data = data.astype(">f4")
    elif lies == "of a class":
        data = data.view(np.matrix)
    arrays.extend({"a": data})
    assert np.array_equal(directory.tensors()[1:]["a"].numpy(), expected)


class Arrayed:
    """An array of another library."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self._array


class Packed:
    """An array of another library that supports only DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("library", [Arrayed, Packed, torch.from_numpy, torch.tensor])
def test_arrays_of_other_libraries_are_taken(library: Any, directory: Directory) -> None:
    directory.create()
    arrays, numbers = directory.arrays(), np.arange(6.0).reshape(3, 2)
    arrays.extend({"a": library(numbers)})
    arrays.extend({"a": library(numbers)})
    assert arrays.add({"a": library(numbers[0])}) == 6
    assert directory.tensors()[:]["a"].flatten().tolist() == [*range(6), *range(6), 0, 1]


def test_a_tensor_with_a_gradient_or_flags_is_written_as_its_numbers(directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    arrays.extend({"a": torch.ones(2, requires_grad=True) * 3, "c": numbers.conj()})
    found = directory.tensors()[:]
    assert found["a"].tolist() == [3.0, 3.0]
    assert found["c"].tolist() == numbers.conj().tolist()


def test_plain_numbers_take_the_dtype_of_their_leaf(directory: Directory) -> None:
    directory.create()
    tensors, arrays = directory.tensors(), directory.arrays()
    item = {"f": torch.zeros(1), "i": torch.zeros(1, dtype=torch.uint8), "b": torch.zeros(1) > 0}
    tensors.extend(TensorDict(item, [1]))
    arrays.add({"f": 3, "i": True, "b": np.bool_(True)})
    arrays.add({"f": np.float64(0.5), "i": np.int64(255), "b": False})
    arrays.extend({"f": [1, 2.5], "i": [7, 8], "b": [True, False]})
    arrays.extend([{"f": 1, "i": 2, "b": True}, {"f": float("inf"), "i": 3, "b": True}])
    found = tensors[1:]
    assert found["f"].tolist() == [3.0, 0.5, 1.0, 2.5, 1.0, float("inf")]
    assert found["i"].tolist() == [1, 255, 7, 8, 2, 3]
    assert found["b"].tolist() == [True, False, True, False, True, True]


def test_a_sample_has_the_entries_of_the_other_clients_sample(directory: Directory) -> None:
    directory.create(alpha=0.6, batch_size=8)
    tensors, arrays = directory.tensors(), directory.arrays()
    tensors.extend(TensorDict({"a": torch.arange(9), "next": {"b": torch.ones(9)}}, [9]))
    mine, theirs = arrays.sample(), tensors.sample()
    assert list(mine) == list(map(str, theirs.keys()))
    for key in ("index", "_weight", "priority_weight", "index_generation"):
        assert mine[key].dtype == theirs[key].numpy().dtype
        assert mine[key].shape == (8,)
    assert mine["_weight"] is mine["priority_weight"]
    assert mine["a"].tolist() == mine["index"].tolist() == mine["index_generation"].tolist()
    assert arrays.stats().keys() == tensors.stats().keys()
    assert arrays.stats()["size"] == len(arrays) == 9


def test_an_empty_handle_says_what_is_recorded(directory: Directory) -> None:
    directory.create(alpha=0.6, beta=0.7, batch_size=3, priority_key="p")
    arrays = directory.arrays()
    assert (len(arrays), arrays.batch_size, arrays.beta) == (0, 3, 0.7)
    assert arrays.priority_key == "p"
    assert arrays.prioritized
    assert arrays.dtypes == {}
    assert arrays.stats()["capacity"] == 64
    assert arrays.scratch_dir == directory.path
    assert directory.arrays(beta=0.1, batch_size=5).beta == 0.1


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_a_directory_that_a_storage_made_is_read(sampler: str, directory: Directory) -> None:
    storage = LazyMemmapStorage(16, scratch_dir=directory.path, shared_init=True)
    by = RandomSampler() if sampler == "uniform" else PrioritizedSampler(16, 0.7, 0.5)
    with TensorDictReplayBuffer(storage=storage, sampler=by, weight_key="w") as tensors:
        tensors.extend(TensorDict({"a": torch.arange(4)}, [4]))
        sample = directory.arrays().sample(6)
        assert ("w" in sample) is (sampler == "prioritized")
        assert sample["a"].tolist() == sample["index"].tolist()


def test_a_seed_decides_the_draws(directory: Directory) -> None:
    directory.create(alpha=0.6)
    arrays = directory.arrays(rng=3)
    arrays.extend({"a": np.arange(60), "td_error": np.arange(60.0)})
    same = [directory.arrays(rng=3), directory.arrays(rng=np.random.default_rng(3))]
    drawn = [[one.sample(16)["index"].tolist() for _ in range(3)] for one in (arrays, *same)]
    assert drawn[0] == drawn[1] == drawn[2]
    other = [directory.arrays().sample(16)["index"].tolist() for _ in range(2)]
    assert other[0] != other[1]
