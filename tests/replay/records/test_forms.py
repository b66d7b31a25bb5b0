"""An item is split into the layout that it shares with others, its sizes and its leaves."""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
)

from shmbuffer.items.records import forms
from shmbuffer.items.records.forms import describe
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.record_format import encode_form
from shmbuffer.tensors.form.tensors import torch_dtype
from shmbuffer.tensors.records.tensor_forms import NAMES
from tests.kit.items import Point, Step

pytestmark = pytest.mark.product(few=4)


class Color(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


def leaf_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        # a tensor with one element may have any strides
        plain = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf)
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
    return leaf if isinstance(leaf, bytes) else leaf.tobytes()


# -- what is in there --------------------------------------------------------------------------


def test_a_tensordict_is_its_batch_size_its_keys_and_a_chunk_for_each_tensor() -> None:
    item = TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.int64)}, [2])
    found = describe(item)
    assert found.kind.tree == [
        "tensordict",
        ["dims", 1],
        None,
        None,
        [["a", ["chunk", 0]], ["b", ["chunk", 1]]],
    ]
    assert [(one.kind, one.dtype, one.itemsize, one.rank) for one in found.kind.chunks] == [
        ("tensor", "float32", 4, 2),
        ("tensor", "int64", 8, 1),
    ]
    assert (found.batch_dims, found.dims) == ([2], [2, 3, 2])
    assert found.leaves[0].data_ptr() == item["a"].data_ptr()
    assert found.kind.paths == (("a",), ("b",))


@pytest.mark.parametrize(
    ("item", "tree", "batch_dims", "dims", "leaves"),
    [
        (torch.zeros(3), ["chunk", 0], [], [3], [bytes(12)]),
        (np.zeros((2, 1), ">i2"), ["chunk", 0], [], [2, 1], [bytes(4)]),
        (np.float64(2.5), ["chunk", 0], [], [], [struct.pack("<d", 2.5)]),
        (np.array(2.5), ["chunk", 0], [], [], [struct.pack("<d", 2.5)]),
        ("a\u00e9", ["chunk", 0], [], [3], [b"a\xc3\xa9"]),
        ("\ud800", ["chunk", 0], [], [3], [b"\xed\xa0\x80"]),
        (b"ab", ["chunk", 0], [], [2], [b"ab"]),
        (0, ["chunk", 0], [], [1], [b"\0"]),
        (-128, ["chunk", 0], [], [2], [b"\x80\xff"]),
        (127, ["chunk", 0], [], [1], [b"\x7f"]),
        (128, ["chunk", 0], [], [2], [b"\x80\0"]),
        (2.5, ["chunk", 0], [], [], [struct.pack("<d", 2.5)]),
        (True, ["chunk", 0], [], [], [b"\1"]),
        (None, ["chunk", 0], [], [], [b""]),
        ([1, "x"], ["list", [["chunk", 0], ["chunk", 1]]], [], [1, 1], [b"\1", b"x"]),
        ((), ["tuple", []], [], [], []),
        (
            Point(True, 1),
            ["namedtuple", "tests.kit.items:Point", [["chunk", 0], ["chunk", 1]]],
            [],
            [1],
            [b"\1", b"\1"],
        ),
        ({"k": None}, ["dict", [["k", ["chunk", 0]]]], [], [], [b""]),
        (OrderedDict(k=None), ["ordered", [["k", ["chunk", 0]]]], [], [], [b""]),
        (
            NonTensorData("x", batch_size=[4, 5]),
            ["object", ["dims", 2], ["chunk", 0]],
            [4, 5],
            [1],
            [b"x"],
        ),
        (
            NonTensorStack(NonTensorData("x"), NonTensorData(1)),
            ["objects", 0, [["object", ["dims", 0], ["chunk", n]] for n in (0, 1)]],
            [],
            [1, 1],
            [b"x", b"\1"],
        ),
        (
            lazy_stack([TensorDict({"a": torch.zeros(n, dtype=torch.int8)}) for n in (1, 2)]),
            [
                "lazy",
                0,
                [["tensordict", ["dims", 0], None, None, [["a", ["chunk", n]]]] for n in (0, 1)],
            ],
            [],
            [1, 2],
            [bytes(1), bytes(2)],
        ),
        (
            Step(obs=torch.zeros(2, 1, dtype=torch.bool), text="t", batch_size=[2]),
            [
                "tensorclass",
                "tests.kit.items:Step",
                [
                    "tensordict",
                    ["dims", 1],
                    None,
                    None,
                    [["obs", ["chunk", 0]], ["text", ["object", ["dims", 1], ["chunk", 1]]]],
                ],
            ],
            [2, 2],
            [2, 1, 1],
            [bytes(2), b"t"],
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_everything_that_can_be_stored_has_a_tree_sizes_and_bytes(
    item: Any, tree: Any, batch_dims: list[int], dims: list[int], leaves: list[bytes]
) -> None:
    found = describe(item)
    assert found.kind.tree == tree
    assert found.kind.batch_dims == len(batch_dims)
    assert (found.batch_dims, found.dims) == (batch_dims, dims)
    assert [leaf_bytes(leaf) for leaf in found.leaves] == leaves
    assert [chunk.rank for chunk in found.kind.chunks] == [
        len(leaf.shape) if not isinstance(leaf, bytes) else int(chunk.kind in _LONG)
        for leaf, chunk in zip(found.leaves, found.kind.chunks, strict=True)
    ]
    encode_form(found.kind.tree, found.kind.chunks)


_LONG = ("bytes", "str", "int")


def test_a_plan_of_dtypes_is_that_of_the_engine() -> None:
    assert {name: dtype.itemsize for dtype, name in NAMES.items()} == {
        name: known.itemsize for name, known in DTYPES.items() if hasattr(torch, name)
    }


@pytest.mark.product
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0)], ids=str)
def test_tensors_of_every_dtype_are_described(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch_dtype(name))
    found = describe(tensor)
    (chunk,) = found.kind.chunks
    assert (chunk.dtype, chunk.itemsize) == (name, DTYPES[name].itemsize)
    assert found.dims == list(shape)
    assert found.leaves[0].dtype is tensor.dtype


@pytest.mark.parametrize(
    "dtype", ["?", "<i1", ">u4", "<f2", "<c16", "S3", "<U2", "<m8[s]", "<M8[ns]"]
)
def test_arrays_and_numbers_of_numpy_keep_the_name_of_their_dtype(dtype: str) -> None:
    array = np.zeros((2, 2), dtype)
    found = describe({"array": array, "number": array[0, 0]})
    assert [(one.kind, one.dtype) for one in found.kind.chunks] == [
        ("array", array.dtype.str),
        ("number", array[0, 0].dtype.str),
    ]
    assert [leaf_bytes(leaf) for leaf in found.leaves] == [array.tobytes(), array[0, 0].tobytes()]


def test_a_device_of_a_tensordict_is_one_or_none() -> None:
    def device(item: TensorDict) -> Any:
        return describe(item).kind.tree[2]

    assert device(TensorDict({"a": torch.zeros(1)})) is None
    assert device(TensorDict({"a": torch.zeros(1)}, device="cpu")) == "cpu"
    assert device(TensorDict({}, [2], device="meta")) == "cpu"


def test_names_are_kept_where_a_dim_has_one() -> None:
    named = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["time", None])
    assert describe(named).kind.tree[3] == ["time", None]
    named.names = [None, None]
    assert describe(named).kind.tree[3] is None


def test_paths_name_entries_and_positions() -> None:
    item = {
        "a": [torch.zeros(1), {1: "x", (1, "y"): 2}],
        "td": TensorDict({"next": TensorDict({"obs": torch.zeros(1)}), "text": "t"}),
    }
    assert describe(item).kind.paths == (
        ("a", 0),
        ("a", 1, 1),
        ("a", 1, (1, "y")),
        ("td", "next", "obs"),
        ("td", "text"),
    )


# -- kinds -------------------------------------------------------------------------------------


def test_items_that_differ_in_sizes_and_values_only_are_of_one_kind() -> None:
    kinds = {
        describe(TensorDict({"a": torch.zeros(n, 2), "t": "x" * n}, [n])).kind for n in range(1, 5)
    }
    assert len(kinds) == 1


def test_items_that_differ_in_anything_else_are_of_different_kinds() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    items = [
        a,
        a.reshape(()),
        a.double(),
        a.numpy(),
        a.numpy()[0],
        {"a": a},
        {"b": a},
        {"a": a, "b": b},
        {"b": b, "a": a},
        OrderedDict(a=a),
        TensorDict({"a": a}),
        TensorDict({"a": a}, device="cpu"),
        TensorDict({"a": a}, [1]),
        TensorDict({"a": a}, [1], names=["n"]),
        TensorDict({"a": TensorDict({"a": a})}),
        TensorDict({"a": TensorDict({}), "b": a}),
        {1: a},
        {True: a},
        {1.0: a},
        {"1": a},
        {None: a},
        {(1, "x"): a},
        {(True, "x"): a},
        {('["x"]',): a},
        {'["x"]': a},
        {("x",): a},
        [a],
        (a,),
        [[a]],
        [a, []],
        [[], a],
        Point(a, b),
        (a, b),
        1,
        1.0,
        True,
        None,
        "1",
        b"1",
        NonTensorData("1"),
        NonTensorData("1", batch_size=[1]),
        NonTensorStack(NonTensorData("1")),
        LazyStackedTensorDict(TensorDict({"a": a}), stack_dim=0),
        LazyStackedTensorDict(TensorDict({"a": a}, [1]), stack_dim=0),
        LazyStackedTensorDict(TensorDict({"a": a}, [1]), stack_dim=1),
        Step(obs=a, text="t"),
    ]
    kinds = [describe(item).kind for item in items]
    assert len(set(kinds)) == len(items)
    codes = {encode_form(kind.tree, kind.chunks).code for kind in kinds}
    assert len(codes) == len(items)
    assert [describe(item).kind for item in items] == kinds


def test_kinds_are_kept_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms._kinds, "_most", 8)
    for n in range(50):
        describe({f"key {n}": n})
    assert len(forms._kinds) <= 8
    kind = describe({"key": 1}).kind
    assert describe({"key": 2}).kind is kind


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1j, "is a builtins.complex (1j)"),
        ({1, 2}, "is a builtins.set ({1, 2})"),
        (object, "is a builtins.type (<class 'object'>)"),
        (bytearray(b"x"), "is a builtins.bytearray"),
        (Color.RED, "test_forms.Color (<Color.RED: 1>)"),
        (Word("w"), "test_forms.Word ('w')"),
        (torch.float32, "is a torch.dtype"),
        (
            np.array([object()]),
            "is a numpy ndarray of object, whose value does not consist of its bytes alone",
        ),
        (np.zeros(2, [("a", "i4")]), "is a numpy ndarray of [('a', '<i4')]"),
        (np.ma.masked_array([1, 2], [True, False]), "is a numpy MaskedArray of int64"),
        ({object(): 1}, "has the key <object object at"),
        ({float("nan"): 1}, "has the key nan, which is not a string"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_unsupported_value_is_refused_by_its_place_and_class(value: Any, words: str) -> None:
    for item, where in (
        (value, "an item "),
        ({"a": [0, {"b": value}]}, "entry 'a' -> 1 -> 'b' "),
        (NonTensorData((value,)), "entry 0 "),
        (TensorDict({"next": {"info": NonTensorData(value)}}), "entry 'next' -> 'info' "),
    ):
        with pytest.raises(TypeError) as caught:
            describe(item)
        message = str(caught.value)
        assert message.startswith(where)
        assert words in message
        assert "a record can contain tensors, numpy arrays and numbers, str, bytes, int" in message


# nested tensors are a prototype, quantized tensors are deprecated
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_bytes_are_refused_by_their_layout() -> None:
    ragged = [torch.zeros(1), torch.zeros(2)]
    for tensor, words in (
        (torch.zeros(3).to_sparse(), "is a float32 tensor (torch.sparse_coo)"),
        (torch.zeros(2, 2).to_sparse_csr(), "is a float32 tensor (torch.sparse_csr)"),
        (torch.nested.nested_tensor(ragged), "is a nested float32 tensor (torch.strided)"),
        (
            torch.nested.nested_tensor(ragged, layout=torch.jagged),
            "is a nested float32 tensor (torch.jagged)",
        ),
        (
            torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
            "is a qint8 tensor (torch.strided)",
        ),
    ):
        with pytest.raises(TypeError) as caught:
            describe({"a": tensor})
        assert str(caught.value).startswith(f"entry 'a' {words}, which has no plain bytes")


def test_an_item_that_holds_itself_is_refused() -> None:
    item: list[Any] = []
    item.append(item)
    with pytest.raises(ValueError, match="contains itself, or is nested deeper than the 64 levels"):
        describe(item)
