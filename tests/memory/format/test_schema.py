"""Schemas: leaf names, dtypes and shapes, refused leaves, the bytes on disk, and differences."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmbuffer import CorruptBufferError, SchemaMismatchError
from shmbuffer.memory import Leaf, Schema
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.key_names import RESERVED
from shmbuffer.memory.format.leaf import MAX_DEPTH
from shmbuffer.memory.format.schema import MAX_LEAVES

OBS = Leaf(("obs",), "float32", (3, 2))
NEXT = Leaf(("next", "obs"), "float32", (3, 2))
DONE = Leaf(("done",), "bool", ())


# The properties of a leaf.


def test_a_leaf_knows_its_size_its_name_and_its_file() -> None:
    assert (OBS.itemsize, OBS.nbytes) == (4, 24)
    assert (DONE.itemsize, DONE.nbytes) == (1, 1)
    assert (NEXT.name, NEXT.file) == ("next.obs", "next/obs.memmap")
    assert str(OBS) == "float32[3, 2]"


def test_a_leaf_without_numbers_has_no_bytes() -> None:
    assert Leaf(("none",), "float64", (3, 0)).nbytes == 0


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("a/b", "a%2Fb.memmap"),
        ("a b", "a%20b.memmap"),
        ("50%", "50%25.memmap"),
        ("ä", "%C3%A4.memmap"),
        ("~.-_", "~.-_.memmap"),
    ],
)
def test_a_key_is_percent_encoded_as_tensordict_does(key: str, file: str) -> None:
    assert Schema((Leaf((key,), "bool", ()),), 1).leaves[0].file == file


def test_a_schema_adds_it_up() -> None:
    schema = Schema((OBS, NEXT, DONE), 10, (4, 5))
    assert (schema.width, schema.elements) == (20, 200)
    assert schema.leaf_bytes == (4800, 4800, 200)
    assert Schema((OBS,), 10).width == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_opaque_bytes(dtype: str) -> None:
    leaf = Leaf(("x",), dtype, (3,))
    assert Schema((leaf,), 2).leaf_bytes == (2 * 3 * DTYPES[dtype].itemsize,)


# Refused leaves.


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Leaf(("x",), "string", ()), "leaf 'x' has dtype string, which cannot be stored"),
        (Leaf(("x",), "torch.float32", ()), "dtype torch.float32, which cannot be stored"),
        (Leaf((), "bool", ()), "leaf '' has an invalid path or shape"),
        (Leaf(("x",), "bool", (-1,)), "leaf 'x' has an invalid path or shape"),
        (Leaf(("a",) * (MAX_DEPTH + 1), "bool", ()), "has an invalid path or shape"),
        (Leaf((".shmbuffer",), "bool", ()), r"the key '\.shmbuffer' is reserved on disk"),
        (Leaf((".shmbuffer", "control"), "bool", ()), r"the key '\.shmbuffer' is reserved on disk"),
        *(
            (
                Leaf((*above, key), "bool", ()),
                rf"leaf '[^ ]*': the key {re.escape(repr(key))} leads out of the directory",
            )
            for above in [(), ("a",)]
            for key in [
                "..",
                ".",
                "",
                "/",
                "/a",
                "../a",
                "a/../../b",
                "a/./b",
                "a//b",
                "a/",
                "a\0b",
            ]
        ),
        (
            Leaf(("..", "x"), "bool", ()),
            r"leaf '\.\.\.x': the key '\.\.' leads out of the directory",
        ),
        (Leaf(("a", "_class"), "bool", ()), "leaf 'a._class': the key '_class' is reserved"),
    ],
)
def test_a_leaf_that_cannot_be_stored_is_refused(leaf: Leaf, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        Schema((leaf,), 1)


@pytest.mark.parametrize("key", sorted(RESERVED))
def test_a_key_that_tensordict_writes_itself_is_refused(key: str) -> None:
    with pytest.raises(
        SchemaMismatchError, match=f"the key '{key}' is reserved on disk; rename it"
    ):
        Schema((Leaf((key,), "bool", ()),), 1)


def test_a_leaf_cannot_be_there_twice() -> None:
    with pytest.raises(SchemaMismatchError, match="leaf 'obs' occurs twice"):
        Schema((OBS, OBS), 1)


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_is_a_leaf_or_a_folder(order: int) -> None:
    leaves = (Leaf(("a",), "bool", ()), Leaf(("a", "b"), "bool", ()))[::order]
    said = r"leaf 'a' is a tensor, but 'a\.b' is the key of an entry in it; rename one of them"
    with pytest.raises(SchemaMismatchError, match=said):
        Schema(leaves, 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("file", "folder"), [("a", "a.memmap"), ("x", "meta.json")], ids=["leaf", "meta"]
)
def test_a_key_cannot_take_the_name_of_a_file(file: str, folder: str, order: int) -> None:
    leaves = (Leaf((file,), "bool", ()), Leaf((folder, "b"), "bool", ()))[::order]
    with pytest.raises(SchemaMismatchError, match=f"the key '{folder}' is reserved on disk"):
        Schema(leaves, 1)


@pytest.mark.parametrize("key", ["x" * 249, "ä" * 42, "\ud800"])
def test_a_key_that_no_file_can_be_named_after_is_refused(key: str) -> None:
    Schema((Leaf((key[:41],), "bool", ()),), 1) if key.isprintable() else None
    with pytest.raises(SchemaMismatchError, match="too long for a file name, or is not valid text"):
        Schema((Leaf((key,), "bool", ()),), 1)


def test_there_is_a_limit_to_the_number_of_leaves() -> None:
    leaves = tuple(Leaf((str(i),), "bool", ()) for i in range(MAX_LEAVES + 1))
    assert len(Schema(leaves[:-1], 1).leaves) == MAX_LEAVES
    with pytest.raises(SchemaMismatchError, match="4097 leaves, but the limit is 4096"):
        Schema(leaves, 1)


@pytest.mark.parametrize(("capacity", "lanes"), [(0, ()), (-1, ()), (3, (0,)), (3, (2, -2))])
def test_a_buffer_has_at_least_one_slot_and_one_lane(capacity: int, lanes: tuple[int, ...]) -> None:
    with pytest.raises(SchemaMismatchError, match="at least one slot and one lane"):
        Schema((OBS,), capacity, lanes)


def test_sizes_that_no_file_can_have_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match=r"leaf 'x' \(float64\[.*too large"):
        Schema((Leaf(("x",), "float64", (2**30,)),), 2**30)


# Differences.


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            Schema((OBS,), 8),
            "leaf 'done' (bool[]) is missing in this write",
        ),
        (
            Schema((OBS, DONE, NEXT), 8),
            "leaf 'next.obs' (float32[3, 2]) is not a leaf of this buffer",
        ),
        (
            Schema((Leaf(("obs",), "float64", (3, 2)), DONE), 8),
            "leaf 'obs' is float32[3, 2], but this write has float64[3, 2]",
        ),
        (
            Schema((Leaf(("obs",), "float32", (6,)), DONE), 8),
            "leaf 'obs' is float32[3, 2], but this write has float32[6]",
        ),
        (
            Schema((OBS, DONE), 8, (2,)),
            "the storage has the shape [8], but this write is for the shape [8, 2]",
        ),
        (
            Schema((OBS, DONE), 9),
            "the storage has the shape [8], but this write is for the shape [9]",
        ),
    ],
)
def test_the_first_difference_is_a_sentence(other: Schema, sentence: str) -> None:
    assert Schema((OBS, DONE), 8).difference(other) == sentence


def test_the_order_of_leaves_is_no_difference() -> None:
    assert Schema((OBS, DONE), 8).difference(Schema((DONE, OBS), 8)) is None


def test_recorded_settings_are_in_the_digest() -> None:
    one, other = Schema((OBS,), 8), Schema((OBS,), 8, structure={"kind": "tensor"})
    assert one.digest != other.digest
    assert one.difference(other) is None
    assert one.digest == Schema((OBS,), 8).digest


# On disk, and back.


@pytest.mark.parametrize(
    "schema",
    [
        Schema((OBS, NEXT, DONE), 10, (4, 5)),
        Schema((), 1),
        Schema((Leaf(("ä", "a/b"), "complex64", (0,)),), 2**40, structure={"kind": ["x", None]}),
    ],
)
def test_a_schema_is_read_back(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json(), "here") == schema
    assert pickle.loads(pickle.dumps(schema)) == schema


GOOD: dict[str, Any] = json.loads(Schema((OBS,), 8).to_json())
LEAF: dict[str, Any] = GOOD["leaves"][0]
BAD = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"7",
    b"null",
    b"[" * 100_000,
    json.dumps({**GOOD, "capacity": 0}).encode(),
    json.dumps({**GOOD, "capacity": True}).encode(),
    json.dumps({**GOOD, "capacity": "8"}).encode(),
    json.dumps({**GOOD, "capacity": 2**48}).encode(),
    json.dumps({**GOOD, "capacity": 1e3}).encode(),
    json.dumps({**GOOD, "lanes": 3}).encode(),
    json.dumps({**GOOD, "lanes": [2**47, 2**47]}).encode(),
    json.dumps({**GOOD, "lanes": [1] * 65}).encode(),
    json.dumps({**GOOD, "leaves": {}, "capacity": None}).encode(),
    json.dumps({**GOOD, "leaves": [1]}).encode(),
    json.dumps({**GOOD, "leaves": [LEAF, LEAF]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "dtype": "object"}]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "dtype": 3}]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "path": ["..", "x"]}]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "path": [1]}]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "path": []}]}).encode(),
    json.dumps({**GOOD, "leaves": [{**LEAF, "shape": [2**47, 2**47]}]}).encode(),
    json.dumps({name: value for name, value in GOOD.items() if name != "structure"}).encode(),
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_an_invalid_schema_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptBufferError, match=r"^there: the schema cannot be read \("):
        Schema.from_json(data, "there")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["capacity", "lanes", "leaves", "structure"]), JSON))
def test_any_json_is_parsed_or_refused(changes: dict[str, Any]) -> None:
    data = json.dumps({**GOOD, **changes}).encode()
    try:
        schema = Schema.from_json(data, "there")
    except CorruptBufferError:
        return
    assert Schema.from_json(schema.to_json(), "there") == schema


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with pytest.raises(CorruptBufferError, match="the schema cannot be read"):
        Schema.from_json(data, "there")
