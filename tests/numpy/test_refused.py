"""Data that a buffer of arrays refuses raise the family's errors and change nothing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    AttachTimeout,
    LazyMemmapStorage,
    ReplayBuffer,
    RingOverrunError,
    SchemaMismatchError,
)
from shmbuffer.memory import Engine
from shmbuffer.numpy import attach
from tests.crash.harness import stopped_at
from tests.numpy.conftest import Directory

GOOD = {"obs": np.zeros((2, 3), np.float32), "next": {"a": np.zeros(2, np.int16)}}


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns `GOOD` with one entry changed or removed."""
    data: dict[str, Any] = {"obs": GOOD["obs"], "next": dict(GOOD["next"])}  # type: ignore[call-overload]
    at = data
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return data


WRONG: dict[str, tuple[Any, str]] = {
    "a leaf is missing": ({"obs": GOOD["obs"]}, r"leaf 'next\.a' is missing in this write"),
    "a leaf too many": (changed(("b",), np.zeros(2)), "leaf 'b' of this write is not a leaf"),
    "another dtype": (
        changed(("obs",), np.zeros((2, 3))),
        r"leaf 'obs' is float32\[2, 3\], but this write has float64\[2, 3\]; convert it",
    ),
    "another shape": (
        changed(("obs",), np.zeros((2, 4), np.float32)),
        r"leaf 'obs' is float32\[2, 3\], but this write has float32\[2, 4\]",
    ),
    "one item": (
        {"obs": np.zeros(3, np.float32), "next": {"a": np.int16(1)}},
        r"leaf 'obs' is float32\[3, 3\], but this write has float32\[3\]; if this is one item, "
        r"write it with add\(\), or create a new buffer",
    ),
    "another number": (
        changed(("next", "a"), np.zeros(3, np.int16)),
        r"leaf 'next\.a' has 3 items in this write, but other leaves have 2",
    ),
    "a number that does not fit": (
        changed(("next", "a"), [1, 70000]),
        r"leaf 'next\.a' is int16\[2\], but this write has int64\[2\]",
    ),
    "a number that would be infinite": (
        changed(("obs",), [[1e40] * 3] * 2),
        r"leaf 'obs' is float32\[2, 3\], but this write has float64\[2, 3\]",
    ),
    "a float for an integer": (
        changed(("next", "a"), [1.0, 2.5]),
        r"leaf 'next\.a' is int16\[2\], but this write has float32\[2\]",
    ),
    "text": (changed(("obs",), "text"), r"leaf 'obs' is float32\[0, 3\], but this write has str"),
    "a dict for a leaf": (changed(("obs",), {"x": np.zeros(2)}), r"leaf 'obs\.?x?'"),
    "ragged lists": (changed(("obs",), [[1.0], [1.0, 2.0]]), "leaf 'obs' is float32"),
    "a tuple": ((np.zeros(2), np.zeros(2)), "this write is a tuple, but entries of a"),
    "an array": (np.zeros(2), "leaf 'next.a' is missing in this write, which has"),
}


@pytest.mark.product(few=4)
@pytest.mark.parametrize(("data", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_batch_of_another_form_is_refused_in_words_of_the_other_client(
    data: Any, words: str, directory: Directory
) -> None:
    directory.create()
    arrays, tensors = directory.arrays(), directory.tensors()
    arrays.extend(GOOD)
    with pytest.raises(SchemaMismatchError, match=words) as mine:
        arrays.extend(data)
    with pytest.raises((SchemaMismatchError, TypeError, ValueError)) as theirs:
        tensors.extend(data)
    if isinstance(theirs.value, SchemaMismatchError) and not isinstance(data, list):
        assert mine.value.leaf == theirs.value.leaf  # type: ignore[attr-defined]
    assert len(arrays) == 2


FIRST: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ({"a": ["x", "y"]}, TypeError, "in the data is not a tensor"),
    "an object": ({"a": object()}, TypeError, "in the data is not a tensor"),
    "objects": ({"a": np.array([None, 1])}, TypeError, "its dtype is object"),
    "times": ({"a": np.zeros(2, "M8[s]")}, TypeError, "its dtype is datetime64"),
    "nothing": ({}, ValueError, "the data contain no tensor"),
    "sizes that differ": (
        {"a": np.zeros(2), "b": np.zeros(3)},
        ValueError,
        r"leaf 'b' has shape \[3\], but the storage's 1 leading dimensions are \[2\] in leaf 'a'",
    ),
    "one item": ({"a": 1.0}, ValueError, "leaf 'a' has shape"),
    "a key that is not text": (
        {1: np.zeros(2)},
        TypeError,
        "the key 1 in the data is not a string",
    ),
    "a reserved key": ({"shape": np.zeros(2)}, SchemaMismatchError, "the key 'shape' is reserved"),
    "items that differ": (
        [{"a": np.zeros(2)}, {"a": np.zeros(3)}],
        RuntimeError,
        r"entry 'a' of the item is an array float64\[3\] at position 1",
    ),
    "items with other keys": (
        [{"a": np.zeros(2)}, {"b": np.zeros(2)}],
        RuntimeError,
        r"the item is a dict with the keys \['b'\] at position 1",
    ),
    "None": (None, TypeError, r"extend\(None\): there is nothing to write"),
}


@pytest.mark.product(few=4)
@pytest.mark.parametrize(("data", "kind", "words"), FIRST.values(), ids=FIRST.keys())
def test_a_first_write_that_cannot_be_is_an_error_and_defines_nothing(
    data: Any, kind: type[Exception], words: str, directory: Directory
) -> None:
    directory.create()
    arrays = directory.arrays()
    with pytest.raises(kind, match=words):
        arrays.extend(data)
    assert arrays.dtypes == {}
    arrays.extend({"a": np.zeros(2)})
    assert len(directory.tensors()) == 2


def test_the_dtype_that_is_asked_for_has_to_fit(directory: Directory) -> None:
    directory.create()
    with pytest.raises(SchemaMismatchError, match="the dtype of leaf 'a' is bfloat16, but this"):
        directory.arrays(dtypes={"a": "bfloat16"}).extend({"a": np.zeros(2, np.float32)})
    with pytest.raises(SchemaMismatchError, match="the dtype of leaf 'a' is float16, but this"):
        directory.arrays(dtypes={"a": "float16"}).extend({"a": np.zeros(2, np.float32)})
    with pytest.raises(KeyError, match="'b' is not a leaf of this write, which has"):
        directory.arrays(dtypes={"b": "bfloat16"}).extend({"a": np.zeros(2, np.uint16)})
    with pytest.raises(ValueError, match="'float7' is not a dtype that can be stored"):
        directory.arrays(dtypes={"b": "float7"})


def test_bytes_and_numbers_are_not_mixed_up(directory: Directory) -> None:
    directory.create()
    tensors, arrays = directory.tensors(), directory.arrays()
    data = {"b": torch.ones(2, dtype=torch.bfloat16), "u": torch.ones(2, dtype=torch.uint16)}
    tensors.extend(TensorDict(data, [2]))
    with pytest.raises(SchemaMismatchError, match=r"'b' is bfloat16\[2\], but this write has"):
        arrays.extend({"b": [1, 2], "u": [1, 2]})
    with pytest.raises(SchemaMismatchError, match=r"'b' is bfloat16\[2\], but this write has"):
        arrays.extend({"b": np.ones(2, np.float16), "u": np.ones(2, np.uint16)})
    with pytest.raises(SchemaMismatchError, match=r"'u' is uint16\[2\], but this write has"):
        arrays.extend({"b": data["b"], "u": data["b"]})
    arrays.extend({"b": np.ones(2, np.uint16), "u": [1, 2]})
    assert len(tensors) == 4


def test_a_handle_that_is_sent_to_another_process_says_how_to_open_one_there(
    directory: Directory,
) -> None:
    directory.create()
    with pytest.raises(TypeError, match=r"and call shmbuffer.numpy.att"):
        pickle.dumps(directory.arrays())


def test_where_there_is_no_buffer_an_attach_says_so(directory: Directory) -> None:
    with pytest.raises(
        AttachTimeout, match="waited 0 s for a buffer, but the path still does not exist"
    ):
        directory.arrays(timeout=0.0)
    with pytest.raises(
        ValueError, match="timeout must be a number of seconds of at least 0, but is -1"
    ):
        directory.arrays(timeout=-1)
    with pytest.raises(ValueError, match="role must be one of client, collector"):
        directory.arrays(role="actor")


MORE: dict[str, tuple[Any, type[Exception], str]] = {
    "fewer priorities than items": (
        {**GOOD, "td_error": np.ones(3)},
        ValueError,
        "got 3 priorities for 2 items; nothing was changed",
    ),
    "items that are text": ([{"obs": "x", "next": {"a": 1}}], TypeError, "'x' in the data is not"),
    "items of two kinds": (
        [{"obs": np.zeros(3)}, np.zeros(3)],
        RuntimeError,
        r"the item is an array float64\[3\] at position 1 and a dict with the keys \['obs'\]",
    ),
    "a dtype of NumPy's own": (
        changed(("obs",), np.zeros((2, 3), "M8[s]")),
        SchemaMismatchError,
        r"leaf 'obs' is float32\[2, 3\], but this write has datetime64",
    ),
}


@pytest.mark.parametrize(("data", "kind", "words"), MORE.values(), ids=MORE.keys())
def test_a_later_batch_that_cannot_be_is_an_error_and_writes_nothing(
    data: Any, kind: type[Exception], words: str, directory: Directory
) -> None:
    directory.create(alpha=0.6)
    arrays = directory.arrays()
    arrays.extend(GOOD)
    with pytest.raises(kind, match=words):
        arrays.extend(data)
    assert len(arrays) == 2


def test_a_key_that_only_this_process_has_is_refused(directory: Directory) -> None:
    storage = LazyMemmapStorage(8, scratch_dir=directory.path, shared_init=True)
    with ReplayBuffer(storage=storage):
        arrays = directory.arrays()
        with pytest.raises(TypeError, match=r"has the key <object object .*leave it out"):
            arrays.extend({object(): np.zeros(2)})
        with pytest.raises(RuntimeError, match=r"part 1 of the item is an array .* at position 1"):
            arrays.extend([(0, np.zeros(1)), (0, np.zeros(2))])
        with pytest.raises(TypeError, match=r"a TensorDict of \[2\] in the data is not a tensor"):
            arrays.extend({"a": TensorDict({"b": torch.zeros(2)}, [2])})
        assert arrays.dtypes == {}


def test_where_slots_have_lanes_streams_are_one_for_all(directory: Directory) -> None:
    directory.create(ndim=2)
    arrays = directory.arrays()
    with pytest.raises(ValueError, match="each lane of a slot is already a separate stream"):
        arrays.extend({"a": np.zeros((2, 4))}, streams=[0, 1])
    with pytest.raises(ValueError, match=r"stream_dim=0 is not supported by a storage with ndim=2"):
        arrays.extend({"a": np.zeros((2, 4))}, stream_dim=0)
    arrays.extend({"a": np.zeros((2, 4))}, streams=3)
    with pytest.raises(IndexError, match="an index of this storage must have 2 coordinates"):
        arrays.update_priority(np.zeros((2, 3), np.int64), np.ones(2))


def test_a_slot_that_a_living_writer_fills_is_an_error_that_names_it(directory: Directory) -> None:
    directory.create(capacity=4)
    arrays = directory.arrays()
    arrays.extend({"a": np.zeros(4)})

    def write(_: Engine) -> None:
        with attach(directory.path) as other:
            other.extend({"a": np.ones(2)})

    with stopped_at(directory.path, "write.claimed", write) as pid:
        with pytest.raises(
            RingOverrunError, match=rf"process {pid} \(running\) is still writing the next slot"
        ):
            arrays.extend({"a": np.zeros(4)}, timeout=0.05)
        assert len(arrays) == 2
    arrays.extend({"a": np.zeros(4)})
    assert len(arrays) == 4


def test_any_integer_says_how_many(directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays(batch_size=np.int64(4))
    arrays.extend({"a": np.arange(8)})
    assert arrays.batch_size == 4
    for given in (None, np.int64(4), np.array(4), torch.tensor(4)):
        assert len(arrays.sample(given, min_size=np.int64(2))["a"]) == 4
    for wrong in (4.0, "4"):
        with pytest.raises(
            TypeError, match=rf"batch_size must be a number of items \(an int\), got {wrong!r}"
        ):
            arrays.sample(wrong)
    with pytest.raises(
        TypeError, match=r"min_size must be a number of items \(an int\), got 2\.0 of type float"
    ):
        arrays.sample(4, min_size=2.0)
