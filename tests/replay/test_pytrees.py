"""PyTrees with any keys and nesting come back in the form in which they were written."""

from __future__ import annotations

import enum
import json
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    FormatError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictReplayBuffer,
)
from shmbuffer.items.form import labels
from shmbuffer.tensors.form import tensor_structure
from tests.kit.items import Point

pytestmark = pytest.mark.product(few=4)

Pair = namedtuple("Pair", ["keys", "values"])  # named like methods of dict


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Axis(enum.IntEnum):
    X = 0
    Y = 1


def numbers(n: int, *shape: int, start: int = 0) -> torch.Tensor:
    size = torch.Size((n, *shape))
    return torch.arange(start, start + size.numel()).reshape(size)


def same(found: Any, expected: Any) -> None:
    """Checks that two trees have the same types, keys and values at every level."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


def picked(data: Any, index: Any) -> Any:
    """Returns ``data[index]`` for every leaf."""
    if isinstance(data, torch.Tensor):
        return data[index]
    if isinstance(data, dict):
        return {key: picked(value, index) for key, value in data.items()}
    parts = [picked(value, index) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


TREES = {
    "integers": {0: numbers(6), 1: numbers(6, 2), -3: numbers(6)},
    "floats": {1.5: numbers(6), 2.0: numbers(6, 2)},
    "None and bool": {None: numbers(6), True: numbers(6, 2)},
    "tuples": {(1, "a"): numbers(6), ("a", 1): numbers(6, 2), (): numbers(6)},
    "nested tuples": {(1, (2, ("b", None))): numbers(6), (1, (2,)): numbers(6, 3)},
    "text and numbers": {"1": numbers(6), 1: numbers(6, 2), "1 (int)": numbers(6, 3)},
    "dots and slashes": {"a.b": numbers(6), "a/b": numbers(6, 2), "a": {"b": numbers(6, 3)}},
    "members": {Axis.X: numbers(6), Axis.Y: numbers(6, 2)},
    "mixed": {0: {"a": {(1,): numbers(6)}}, "b": {0: [numbers(6), (numbers(6, 2),)]}},
    "tuple": (numbers(6), [numbers(6, 2), (numbers(6),)], {"k": numbers(6)}),
    "namedtuples": Pair(numbers(6), Point({"q": numbers(6, 2)}, [numbers(6)])),
    "one": (numbers(6),),
    "deep": {"a": [({"b": [(numbers(6),)]},)]},
}
trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())


@pytest.mark.product
@trees
def test_a_batch_comes_back_as_it_was(make: Any, tree: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=8)
    assert rb.extend(tree).tolist() == list(range(6))
    same(rb[:], tree)
    same(rb[2], picked(tree, 2))
    same(rb[1:4], picked(tree, slice(1, 4)))
    same(rb[[5, 0]], picked(tree, [5, 0]))


@pytest.mark.product
@trees
def test_a_sample_has_the_form_of_the_data(make: Any, tree: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=8)
    rb.extend(tree)
    data, info = rb.sample(return_info=True)
    same(data, picked(tree, info["index"]))


@pytest.mark.product
@trees
def test_items_are_added_and_changed_in_their_form(make: Any, tree: Any) -> None:
    rb = ReplayBuffer(storage=make(3), batch_size=2)
    for at in range(5):
        assert rb.add(picked(tree, at)) == at % 3
    same(rb[:], picked(tree, [3, 4, 2]))
    rb[1] = picked(tree, 0)
    rb[[0, 2]] = picked(tree, [5, 5])
    same(rb[:], picked(tree, [5, 0, 5]))
    rb.storage.set([2, 0], picked(tree, [1, 2]))
    same(rb.storage.get(slice(None)), picked(tree, [2, 0, 1]))


@pytest.mark.product
@trees
def test_a_list_of_pytrees_is_a_stack_of_items(make: Any, tree: Any) -> None:
    items = [picked(tree, at) for at in range(6)]
    rb = ReplayBuffer(storage=make(10), batch_size=2)
    assert rb.extend(items).tolist() == list(range(6))
    same(rb[:], tree)
    in_a_list = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    in_a_list.extend(items)
    same(in_a_list[:], tree)


@pytest.mark.product
@trees
def test_a_list_that_is_put_is_a_stack_of_items_too(make: Any, tree: Any) -> None:
    items = [picked(tree, at) for at in range(4)]
    storage = make(10)
    storage.set(range(4), items)
    same(storage.get(slice(None)), picked(tree, slice(0, 4)))
    rb = ReplayBuffer(storage=storage)
    rb[1:3] = [items[0], items[3]]
    same(rb[:], picked(tree, [0, 0, 3, 3]))


def test_items_that_are_lists_stay_lists(make: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=3)
    for at in range(3):
        rb.add([torch.tensor(at), (torch.tensor([at, at]),)])
    same(rb[:], [numbers(3), (torch.tensor([[0, 0], [1, 1], [2, 2]]),)])
    same(rb[2], [torch.tensor(2), (torch.tensor([2, 2]),)])
    assert type(rb.sample()) is list
    rb[:] = rb[[2, 1, 0]]
    assert rb[:][0].tolist() == [2, 1, 0]
    rb.extend([[torch.tensor(7), (torch.tensor([7, 7]),)]] * 2)
    assert rb[:][0].tolist() == [2, 1, 0, 7, 7]


class Frames(list[Any]):
    """A list that NumPy can convert to an array."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.stack(self)


def test_a_list_that_could_be_an_array_is_a_list(make: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=3)
    rb.extend({"a": Frames([np.arange(6), np.arange(6)])})
    same(rb[:], {"a": [numbers(6), numbers(6)]})


@pytest.mark.product
@trees
def test_a_state_brings_the_form_back(make: Any, tree: Any) -> None:
    rb = ReplayBuffer(storage=make(6), batch_size=2)
    rb.extend(tree)
    other = ReplayBuffer(storage=make(6), batch_size=2)
    other.load_state_dict(rb.state_dict())
    same(other[:], tree)


@trees
def test_another_process_finds_the_form_in_the_schema(tmp_path: Path, tree: Any) -> None:
    path = tmp_path / "buffer"
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=path, shared_init=True))
    rb.extend(tree)
    other = ReplayBuffer(storage=pickle.loads(pickle.dumps(rb.storage)), batch_size=4)
    same(other[:], tree)
    other.extend(tree)
    same(rb[:], picked(tree, [4, 5, 2, 3, 4, 5, 0, 1, 2, 3]))
    rb.close()
    other.close()


# -- keys ------------------------------------------------------------------------------------------

STRANGE = {
    "members": {Color.RED: numbers(3), Color.BLUE: numbers(3, 2)},
    "sets": {frozenset([1]): numbers(3)},
    "bytes": {b"a": numbers(3)},
    "infinity": {float("inf"): numbers(3)},
    "in a tuple": {(1, Color.RED): numbers(3)},
    "nested": {"a": [{Color.RED: numbers(3)}]},
}
strange = pytest.mark.parametrize("tree", STRANGE.values(), ids=STRANGE.keys())


@strange
def test_a_key_that_json_cannot_hold_works_in_the_process_itself(tree: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=5)
    rb.extend(tree)
    same(rb[:], tree)
    data, info = rb.sample(return_info=True)
    same(data, picked(tree, info["index"]))
    rb.extend(tree)
    same(rb[:], picked(tree, [1, 2, 2, 0]))
    other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=5)
    other.load_state_dict(rb.state_dict())
    same(other[:], rb[:])
    with pytest.raises(RuntimeError, match=r"only this process can access.*another process"):
        pickle.dumps(rb.storage)


@strange
def test_a_key_that_json_cannot_hold_is_refused_where_others_look(
    tmp_path: Path, tree: Any
) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "buffer", shared_init=True)
    rb = ReplayBuffer(storage=storage)
    with pytest.raises(TypeError, match=r"has the key .*, which is not a string, a finite number"):
        rb.extend(tree)
    rb.extend({"a": numbers(3)})
    assert rb[:]["a"].tolist() == [0, 1, 2]
    rb.close()


@pytest.mark.parametrize(
    "key", ["a", "", 0, -1, True, None, 1.5, -0.5, (), (1,), (1, ("a", None, 2.0)), ((),)], ids=repr
)
def test_a_key_is_the_same_after_json(key: Any) -> None:
    assert labels.is_json(key)
    found = labels.from_json(json.loads(json.dumps(labels.to_json(key))))
    assert found == key
    assert type(found) is type(key)


def test_members_of_text_and_integers_are_equal_to_what_comes_back() -> None:
    found = labels.from_json(json.loads(json.dumps(labels.to_json(Axis.Y))))
    assert found == Axis.Y
    assert {found: "y"}[Axis.Y] == "y"


def test_every_key_has_a_name_of_its_own() -> None:
    keys = ["1", 1, "1 (int)", (1,), "(1,)", None, "None"]
    names = labels.names_of(keys)
    assert names == [
        "1",
        "1 (int) (int)",
        "1 (int)",
        "(1,) (tuple)",
        "(1,)",
        "None (NoneType)",
        "None",
    ]
    assert len(set(names)) == len(keys)


def test_two_processes_name_the_same_leaves_alike_whatever_the_order() -> None:
    one = {"1": numbers(2), 1: numbers(2), (2,): numbers(2)}
    other = dict(reversed(one.items()))
    described = [
        tensor_structure.STRUCTURE.describe(tree, 1, mapping="dict") for tree in (one, other)
    ]
    assert list(described[0].paths()) == list(described[1].paths())[::-1]


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "dict", "items": [[{"key": {}}, {"kind": "leaf"}]]},
        {"kind": "dict", "items": [["a"]]},
        {"kind": "object"},
        {"kind": "dict", "items": 5},
        {"kind": "unheard of"},
        [],
    ],
    ids=str,
)
def test_a_structure_that_cannot_be_read_is_refused(spec: Any) -> None:
    with pytest.raises(FormatError, match="schema"):
        tensor_structure.from_json(spec)


def test_tuples_are_nested_keys_for_a_buffer_of_tensordicts() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    rb.extend({("next", "obs"): numbers(3), "a": numbers(3)})
    assert rb[:]["next", "obs"].tolist() == [0, 1, 2]
    assert isinstance(rb[:], TensorDict)
    with pytest.raises(TypeError, match="the key None in the data is not a string"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4)).extend({None: numbers(3)})


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"tensor of shape \[3\] at position 1"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], r"dict with the keys \['b'\] at position 2"),
        ([{"a": 1}, {"a": 1, "b": 2}], r"keys \['a', 'b'\] at position 1"),
        ([(1, 2), (1,)], "tuple of length 1 at position 1"),
        ([(1, 2), [1, 2]], "list of length 2 at position 1"),
        ([{"a": (1, [torch.zeros(1)])}, {"a": (1, [torch.zeros(2)])}], "part 0 of part 1 of entry"),
        ([torch.zeros(2), {"a": 1}], "dict with the keys"),
        ([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))], "these TensorDicts differ"),
        ([TensorDict(a=torch.zeros(2)), torch.zeros(2)], "a tensor of shape"),
    ],
    ids=[
        "shapes",
        "keys",
        "more keys",
        "lengths",
        "kinds",
        "nested",
        "dict",
        "tensordicts",
        "both",
    ],
)
def test_a_ragged_list_is_refused_with_the_place_where_it_differs(
    make: Any, items: list[Any], words: str
) -> None:
    rb = ReplayBuffer(storage=make(10))
    with pytest.raises(RuntimeError, match=words) as caught:
        rb.extend(items)
    assert "LazyStackStorage" in str(caught.value)
    assert len(rb) == 0


def test_a_list_of_what_is_no_tensor_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"'a' in the data is not a tensor.*ListStorage"):
        ReplayBuffer(storage=make(10)).extend(["a", "b"])


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({1: numbers(2)}, r"leaf '\(1,\)' is missing"),
        ({1: numbers(2), (1,): numbers(2), None: numbers(2)}, "leaf 'None' of this write is not"),
        ({1: numbers(2), "1": numbers(2)}, r"leaf '\(1,\)' is missing"),
        (
            {1: numbers(2), (1,): numbers(2).float()},
            r"leaf '\(1,\)' is int64\[2\], but this write has",
        ),
        ((numbers(2), numbers(2)), "is missing"),
    ],
    ids=["missing", "extra", "text for a number", "dtype", "tuple"],
)
def test_another_tree_is_refused_by_the_name_of_the_leaf(
    make: Any, written: Any, words: str
) -> None:
    rb = ReplayBuffer(storage=make(10))
    rb.extend({1: numbers(3), (1,): numbers(3)})
    with pytest.raises(SchemaMismatchError, match=words):
        rb.extend(written)
    assert len(rb) == rb.write_count == 3


def test_leaves_whose_first_dimensions_differ_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"leaf '1' has shape \[4\].*\[3\] in leaf '0'"):
        ReplayBuffer(storage=make(10)).extend((numbers(3), numbers(4)))


def test_a_new_key_of_a_pytree_adds_a_column_where_nobody_else_looks(make_private: Any) -> None:
    rb = ReplayBuffer(storage=make_private(10))
    rb.extend({1: numbers(3), (1,): numbers(3)})
    wider = {1: numbers(3), (1,): numbers(3), None: numbers(3, start=7)}
    rb[:] = wider
    same(rb[:], wider)
    rb.extend(wider)
    assert rb[:][None].tolist() == [7, 8, 9] * 2


def test_consolidated_is_accepted_without_a_visible_effect() -> None:
    for consolidated in (False, True):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, consolidated=consolidated), batch_size=4)
        rb.extend({"a": numbers(3), "b": {"c": numbers(3, 2)}})
        same(rb[:], {"a": numbers(3), "b": {"c": numbers(3, 2)}})
