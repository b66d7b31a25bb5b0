"""Bodies of records: the schema, the layout byte for byte, and refused bodies."""

from __future__ import annotations

import pickle
import random
import struct
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shmbuffer import CorruptBufferError
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, RecordBatch, join
from shmbuffer.memory.record_format import (
    Chunk,
    Codec,
    Form,
    Located,
    assemble,
    assemble_one,
    encode_form,
    locate,
)
from shmbuffer.memory.record_format import record_forms as parsed_forms
from shmbuffer.memory.record_format.bounds import (
    MAX_CHUNKS,
    MAX_DEPTH,
    MAX_FORM_BYTES,
    MAX_NUMBERS,
    MAX_PARTS,
    MAX_RANK,
    MAX_RAW_BYTES,
    plausible,
)
from shmbuffer.memory.record_format.record_forms import parse_form

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FLOAT = Chunk("tensor", "float32", 0)
FLOATS = Chunk("tensor", "float32", 1)
TEXT = Chunk("str", rank=1)
JOINED = Chunk("bytes", rank=1, codec=Codec.JOINED, joined=0)
NONE = Chunk("none")


# Items: the arguments of `assemble`, with the bytes of each piece.


@dataclass
class Items:
    """Items of one schema, split into their parts."""

    form: Form
    batch_dims: Ints
    dims: list[Ints]
    pieces: list[list[Bytes]]

    def assemble(self) -> RecordBatch:
        shape = (len(self.pieces), len(self.form.chunks))
        addresses = [[piece.__array_interface__["data"][0] for piece in row] for row in self.pieces]
        sizes = [[piece.size for piece in row] for row in self.pieces]
        return assemble(
            self.form,
            self.batch_dims,
            self.dims,
            np.array(addresses, np.int64).reshape(shape),
            np.array(sizes, np.int64).reshape(shape),
        )


def items_of(
    form: Form,
    dims: list[list[list[int]]],
    pieces: list[list[bytes]],
    batch_dims: list[list[int]] | None = None,
) -> Items:
    """Makes items from dims by chunk and pieces by row."""
    count = len(pieces)
    ranks = [chunk.rank for chunk in form.chunks]
    return Items(
        form,
        np.array(batch_dims or [], np.int64).reshape(count, form.batch_dims),
        [np.array(one, np.int64).reshape(count, n) for one, n in zip(dims, ranks, strict=True)],
        [[np.array(bytearray(piece), np.uint8) for piece in row] for row in pieces],
    )


class Maker:
    """Draws items of one schema, nested and ragged."""

    DTYPES = ("uint8", "bool", "bfloat16", "float32", "int64", "complex128")
    ARRAYS = ("|u1", "<f4", ">i8", "<U3", "|S5", "<M8[ns]", "<c16", "<U0")

    def __init__(self, source: random.Random, count: int) -> None:
        self.source = source
        self.count = count
        self.chunks: list[Chunk] = []
        self.batch_dims: list[list[int]] = [[] for _ in range(count)]
        self.dims: list[list[list[int]]] = []
        self.made = 0

    def items(self) -> Items:
        tree = self.node([[] for _ in range(self.count)], 0)
        form = encode_form(tree, self.chunks)
        pieces: list[list[Bytes]] = [[] for _ in range(self.count)]
        for row in range(self.count):
            for chunk, dims in zip(self.chunks, self.dims, strict=True):
                size = chunk.itemsize * int(np.prod(dims[row], dtype=np.int64))
                if chunk.codec is not Codec.RAW:
                    size = 0 if chunk.joined is not None else self.source.randrange(12)
                pieces[row].append(self.bytes(size))
        return Items(
            form,
            np.array(self.batch_dims, np.int64).reshape(self.count, form.batch_dims),
            [
                np.array(dims, np.int64).reshape(self.count, chunk.rank)
                for dims, chunk in zip(self.dims, self.chunks, strict=True)
            ],
            pieces,
        )

    def bytes(self, size: int) -> Bytes:
        self.made += 1
        return np.arange(self.made * 37, self.made * 37 + size).astype(np.uint8)

    def node(self, lead: list[list[int]], depth: int, *, entry: bool = False) -> Any:
        """Draws any node, or with ``entry`` a node that may be an entry of a TensorDict."""
        kinds = ["tensor"] if entry else ["chunk", "tensor", "array"]
        if depth < 4:
            kinds += ["tensordict"] * 3 + ["tensorclass", "lazy", "objects", "object"]
            if not entry:
                kinds += ["dict", "ordered", "list", "tuple", "namedtuple"]
        kind = self.source.choice(kinds) if depth else "tensordict"
        few = range(self.source.randrange(3))
        free: list[list[int]] = [[] for _ in range(self.count)]
        match kind:
            case "tensordict":
                return self.tensordict(lead, self.source.randrange(2), depth)
            case "tensorclass":
                return [kind, "a.b:C", self.tensordict(lead, 1, depth + 1)]
            case "lazy" | "objects":
                return self.stack(kind, lead, depth)
            case "object":
                return self.object(lead, 0, depth)
            case "dict" | "ordered":
                keys = self.source.sample(
                    ["a", "é", "\ud800", 1, -200, 2**70, 0.5, None, False, ["x", [2]], []], len(few)
                )
                return [kind, [[key, self.node(free, depth + 1)] for key in keys]]
            case "list" | "tuple":
                return [kind, [self.node(free, depth + 1) for _ in few]]
            case "namedtuple":
                return [kind, "a:N", [self.node(free, depth + 1) for _ in few]]
        return self.leaf(kind, lead)

    def tensordict(self, lead: list[list[int]], more: int, depth: int) -> Any:
        batch = self.longer(lead, more)
        self.add_batch(batch)
        rank = len(batch[0])
        names = self.source.choice([None, [None] * rank, [f"d{dim}" for dim in range(rank)]])
        device = self.source.choice([None, "cpu"])
        keys = ["obs", "ä", "", "n/x"][: self.source.randrange(5)]
        entries = [[key, self.node(batch, depth + 1, entry=True)] for key in keys]
        return ["tensordict", ["dims", rank], device, names, entries]

    def object(self, lead: list[list[int]], more: int, depth: int) -> Any:
        batch = self.longer(lead, more)
        self.add_batch(batch)
        free: list[list[int]] = [[] for _ in range(self.count)]
        return ["object", ["dims", len(batch[0])], self.node(free, depth + 1)]

    def stack(self, kind: str, lead: list[list[int]], depth: int) -> Any:
        parts, dim, more = self.source.randrange(1, 3), len(lead[0]), self.source.randrange(2)
        if dim and {row[0] for row in lead} == {parts}:
            dim, lead = 0, [row[1:] for row in lead]
        make = self.tensordict if kind == "lazy" else self.object
        return [kind, dim, [make(lead, more, depth + 1) for _ in range(parts)]]

    def leaf(self, kind: str, lead: list[list[int]]) -> Any:
        heads = [at for at, chunk in enumerate(self.chunks) if chunk.codec is Codec.ZSTD]
        codec = self.source.choice([one for one in Codec if heads or one is not Codec.JOINED])
        joined = self.source.choice(heads) if codec is Codec.JOINED else None
        dims, dtype = lead, ""
        if kind == "chunk":
            kind = self.source.choice(["number", "bytes", "str", "int", "float", "bool", "none"])
            ranked = kind in ("bytes", "str", "int")
            dims = self.longer([[] for _ in range(self.count)], int(ranked))
            dtype = self.source.choice(self.ARRAYS) if kind == "number" else ""
        else:
            if kind == "array":
                dims = [[] for _ in range(self.count)]
            dtype = self.source.choice(self.DTYPES if kind == "tensor" else self.ARRAYS)
            dims = self.longer(dims, self.source.randrange(3))
        self.chunks.append(Chunk(kind, dtype, len(dims[0]), codec, joined))
        self.dims.append(dims)
        return ["chunk", len(self.chunks) - 1]

    def longer(self, lead: list[list[int]], more: int) -> list[list[int]]:
        """Adds dims to each row, which are often equal for all rows."""
        dims = [[self.source.randrange(4) for _ in range(more)] for _ in lead]
        alike = not self.source.randrange(3)
        return [row + dims[0 if alike else at] for at, row in enumerate(lead)]

    def add_batch(self, batch: list[list[int]]) -> None:
        for held, row in zip(self.batch_dims, batch, strict=True):
            held += row


def drawn(source: random.Random, count: int) -> Items:
    return Maker(source, count).items()


def address(piece: Bytes) -> int:
    return int(piece.__array_interface__["data"][0])


def as_documented(items: Items) -> tuple[bytes, list[int]]:
    """Returns the data and sizes that `assemble` must produce according to the document."""
    code, out, ends = items.form.code, b"", []
    for row, pieces in enumerate(items.pieces):
        numbers = items.batch_dims[row].tolist()
        for dims, chunk, piece in zip(items.dims, items.form.chunks, pieces, strict=True):
            numbers += dims[row].tolist()
            if chunk.codec in (Codec.ZSTD, Codec.OWN):
                numbers.append(piece.size)
        record = bytearray(24) + struct.pack("<BBHI", 1, 0, len(numbers), len(code))
        record += struct.pack(f"<{len(numbers)}I", *numbers) + code
        for chunk, piece in zip(items.form.chunks, pieces, strict=True):
            record += bytes(-len(record) % chunk.alignment) + piece.tobytes()
        ends.append(len(record))
        out += record + bytes(-len(record) % 8)
    return out, ends


def require_same(items: Items, batch: RecordBatch, found: Located, rows: list[int]) -> None:
    """Checks located records against items; ``rows`` gives the item of each row of the batch."""
    assert found.form == items.form
    assert found.form.tree == items.form.tree
    assert found.form.chunks == items.form.chunks
    assert found.rows.tolist() == list(range(len(batch)))
    assert found.batch_dims.tolist() == items.batch_dims[rows].tolist()
    for told, dims in zip(found.dims, items.dims, strict=True):
        assert told.dtype == np.int64
        assert told.tolist() == dims[rows].tolist()
    raw = [one.alignment for one in items.form.chunks]
    for row, item in enumerate(rows):
        start, size = int(batch.starts[row]), int(batch.sizes[row])
        for piece, alignment, at, nbytes in zip(
            items.pieces[item], raw, found.offsets[row], found.sizes[row], strict=True
        ):
            assert batch.data[at : at + nbytes].tobytes() == piece.tobytes()
            assert start + 32 <= at <= at + nbytes <= start + size
            assert at % alignment == 0


def copied(batch: RecordBatch, rows: list[int]) -> RecordBatch:
    """Copies records as the ring returns them: whole, in any order, some more than once."""
    cut = [batch.data[batch.starts[row] :][: batch.sizes[row]].tobytes() for row in rows]
    return join([record[HEADER_BYTES:] for record in cut])


def one(form: Form, dims: list[list[int]], *pieces: bytes) -> RecordBatch:
    """Makes a batch of one record."""
    return items_of(form, [[given] for given in dims], [list(pieces)]).assemble()


# What is written can be read.


@given(st.randoms(use_true_random=True), st.integers(1, 5))
def test_written_records_are_located(source: random.Random, count: int) -> None:
    items = drawn(source, count)
    batch = items.assemble()
    assert len(batch) == count
    (found,) = locate(batch, "here")
    require_same(items, batch, found, list(range(count)))


@given(st.randoms(use_true_random=True), st.integers(1, 5))
def test_a_record_is_whole_without_the_records_behind_it(source: random.Random, count: int) -> None:
    items = drawn(source, count)
    rows = [source.randrange(count) for _ in range(4)]
    batch = copied(items.assemble(), rows)
    (found,) = locate(batch, "here")
    require_same(items, batch, found, rows)


@given(st.randoms(use_true_random=True), st.integers(1, 5))
def test_every_byte_is_as_documented(source: random.Random, count: int) -> None:
    items = drawn(source, count)
    empty = np.empty

    def used(*args: Any, **kwargs: Any) -> Any:  # memory with other content
        array = empty(*args, **kwargs)
        array.view(np.uint8)[...] = 0xA5
        return array

    with patch.object(np, "empty", used):
        batch = items.assemble()
    data, sizes = as_documented(items)
    assert batch.data.tobytes() == data
    assert batch.sizes.tolist() == sizes


def test_records_of_equal_sizes_are_written_and_located_as_any_others() -> None:
    form = encode_form(
        ["tensordict", ["dims", 0], None, None, [["a", ["chunk", 0]], ["b", ["chunk", 1]]]],
        [Chunk("tensor", "uint8", 1), Chunk("tensor", "int64", 0)],
    )
    pieces = [[bytes([row, 1, 2]), bytes([row] * 8)] for row in range(100)]
    items = items_of(form, [[[3]] * 100, [[]] * 100], pieces)
    batch = items.assemble()
    assert (batch.data.tobytes(), batch.sizes.tolist()) == as_documented(items)
    (found,) = locate(batch, "here")
    require_same(items, batch, found, list(range(100)))
    assert found.alike


def test_records_are_alike_where_their_dims_are_whatever_their_stored_sizes() -> None:
    form = encode_form(
        ["list", [["chunk", 0], ["chunk", 1]]],
        [Chunk("tensor", "uint8", 2, Codec.ZSTD), Chunk("tensor", "uint8", 1)],
    )
    for dims, alike in (([[4, 6]] * 3, True), ([[4, 6], [6, 4], [4, 6]], False)):
        pieces = [[bytes(20 + row), bytes(3)] for row in range(3)]
        items = items_of(form, [dims, [[3]] * 3], pieces)
        batch = items.assemble()
        (found,) = locate(batch, "here")
        require_same(items, batch, found, [0, 1, 2])
        assert found.expanded.tolist() == [[24, 3]] * 3
        assert found.alike is alike


def test_records_of_several_forms_are_located_by_form() -> None:
    forms = [encode_form(["list", [["chunk", 0]] * 1], [TEXT]), encode_form(["chunk", 0], [FLOAT])]
    # the same number of bytes as the first
    forms.append(encode_form(["tuple", [["chunk", 0]]], [TEXT]))
    texts = [b"a", b"\0\0\0\0", b"bc"]
    order = [0, 1, 2, 1, 0, 2, 2]
    records = []
    for kind in order:
        dims = [] if kind == 1 else [len(texts[kind])]
        records.append(bytes(one(forms[kind], [dims], texts[kind]).body(0)))
    batch = join(records)
    located = locate(batch, "here")
    assert [found.form for found in located] == forms
    assert [found.rows.tolist() for found in located] == [[0, 4], [1, 3], [2, 5, 6]]
    for kind, found in enumerate(located):
        for at, size in zip(found.offsets[:, 0], found.sizes[:, 0], strict=True):
            assert batch.data[at : at + size].tobytes() == texts[kind]


def test_a_batch_may_have_no_records() -> None:
    batch = items_of(encode_form(*EXAMPLE), [[]] * 5, []).assemble()
    assert (len(batch), batch.data.size, locate(batch, "here")) == (0, 0, [])


def test_an_item_may_have_nothing_in_it() -> None:
    form = encode_form(["dict", []], [])
    batch = items_of(form, [], [[], []]).assemble()
    (found,) = locate(batch, "here")
    assert found.offsets.shape == found.sizes.shape == (2, 0)
    assert batch.sizes.tolist() == [34, 34]


def test_an_item_may_have_as_many_leaves_as_a_form() -> None:
    chunks = [FLOAT, TEXT] * (MAX_CHUNKS // 2)
    form = encode_form(["list", [["chunk", at] for at in range(MAX_CHUNKS)]], chunks)
    pieces = [[bytes([at % 256] * 4) for at in range(MAX_CHUNKS)]] * 3
    items = items_of(form, [[[]] * 3, [[4]] * 3] * (MAX_CHUNKS // 2), pieces)
    batch = items.assemble()
    require_same(items, batch, locate(batch, "here")[0], [0, 1, 2])


@pytest.mark.parametrize(
    ("dtype", "alignment"),
    [("<c16", 8), ("<U3", 4), ("<U1", 4), ("|S6", 2), ("|S5", 1), ("<U0", 1)],
)
def test_a_raw_piece_starts_where_its_numbers_may(dtype: str, alignment: int) -> None:
    chunk = Chunk("number", dtype)
    assert chunk.alignment == alignment
    form = encode_form(["list", [["chunk", 0], ["chunk", 1]]], [TEXT, chunk])
    for length in range(9):
        batch = one(form, [[length], []], bytes(length), bytes(chunk.itemsize))
        assert locate(batch, "here")[0].offsets[0, 1] % alignment == 0


# The bytes are pinned: records of this version are read by every later one.

# An item of two frames of two numbers, a reward, a text, and a list of an int and None.
# docs/format/records.md explains it byte by byte.
NOTE = ["object", ["dims", 0], ["list", [["chunk", 2], ["chunk", 3], ["chunk", 4]]]]
EXAMPLE = (
    [
        "tensordict",
        ["dims", 0],
        None,
        None,
        [["obs", ["chunk", 0]], ["reward", ["chunk", 1]], ["note", NOTE]],
    ],
    [
        Chunk("tensor", "uint8", 2),
        FLOAT,
        TEXT,
        Chunk("int", rank=1),
        NONE,
    ],
)


def example() -> Items:
    pieces = [
        [
            bytes(obs),
            struct.pack("<f", reward),
            note,
            number.to_bytes(2, "little", signed=True),
            b"",
        ]
        for obs, reward, note, number in (
            ([1, 2, 3, 4], 1.5, b"left", 300),
            ([3, 4, 5, 6], -2.0, b"go", -2),
        )
    ]
    dims: list[list[list[int]]] = [[[2, 2]] * 2, [[]] * 2, [[4], [2]], [[2], [2]], [[]] * 2]
    return items_of(encode_form(*EXAMPLE), dims, pieces)


def test_the_example_of_the_document() -> None:
    batch = example().assemble()
    assert batch.starts.tolist() == [0, 120]
    assert batch.sizes.tolist() == [114, 112]
    assert batch.data.tobytes() == bytes.fromhex(
        """
        0000000000000000 0000000000000000 0000000000000000
        01 00 0400 32000000
        02000000 02000000  04000000  02000000
        01 00 00 03
          03 6f6273          10 00 05 75696e7438 02
          06 726577617264    10 00 07 666c6f61743332 00
          04 6e6f7465        05 00  08 03  14 00  15 00  18 00
        01020304
        0000 0000c03f
        6c656674
        2c01
        000000000000

        0000000000000000 0000000000000000 0000000000000000
        01 00 0400 32000000
        02000000 02000000  02000000  02000000
        01 00 00 03
          03 6f6273          10 00 05 75696e7438 02
          06 726577617264    10 00 07 666c6f61743332 00
          04 6e6f7465        05 00  08 03  14 00  15 00  18 00
        03040506
        0000 000000c0
        676f
        feff
        """
    )
    (found,) = locate(batch, "here")
    require_same(example(), batch, found, [0, 1])
    assert found.offsets[0].tolist() == [98, 104, 108, 112, 114]


CHUNK = ["chunk", 0]
RANK0 = ["dims", 0]


@pytest.mark.product(few=8)
@pytest.mark.parametrize(
    ("tree", "chunks", "code"),
    [
        (CHUNK, [FLOAT], "10 00 07 666c6f61743332 00"),
        (CHUNK, [Chunk("tensor", "bool", 2, Codec.ZSTD)], "10 01 04 626f6f6c 02"),
        (CHUNK, [Chunk("tensor", "bool", 2, Codec.OWN)], "10 02 04 626f6f6c 02"),
        (CHUNK, [Chunk("array", "|u1", 2, Codec.ZSTD, planar=True)], "11 09 03 7c7531 02"),
        (CHUNK, [Chunk("array", "<U3", 1)], "11 00 03 3c5533 01"),
        (
            ["list", [CHUNK, ["chunk", 1], ["chunk", 2]]],
            [Chunk("tensor", "int8", 1, Codec.ZSTD), NONE, JOINED],
            "08 03 10 01 04 696e7438 01 18 00 13 03 00",
        ),
        (CHUNK, [Chunk("number", "<f8")], "12 00 03 3c6638"),
        (CHUNK, [Chunk("bytes", rank=1)], "13 00"),
        (CHUNK, [TEXT], "14 00"),
        (CHUNK, [Chunk("int", rank=1)], "15 00"),
        (CHUNK, [Chunk("float")], "16 00"),
        (CHUNK, [Chunk("bool")], "17 00"),
        (CHUNK, [NONE], "18 00"),
        (["tensordict", RANK0, None, None, []], [], "01 00 00 00"),
        (["tensordict", RANK0, "cpu", [], []], [], "01 00 03 00"),
        (
            ["tensordict", ["dims", 1], "cpu", ["t"], [["é", CHUNK]]],
            [FLOATS],
            "01 01 03 01 01 74 01 02 c3a9 10 00 07 666c6f61743332 01",
        ),
        (
            ["tensorclass", "m:C", ["tensordict", RANK0, None, None, []]],
            [],
            "02 03 6d3a43 01 00 00 00",
        ),
        (["lazy", 0, [["tensordict", RANK0, None, None, []]]], [], "03 00 01 01 00 00 00"),
        (["lazy", 0, []], [], "03 00 00"),
        (["objects", 1, [["object", ["dims", 1], CHUNK]]], [NONE], "04 01 01 05 01 18 00"),
        (["object", RANK0, CHUNK], [NONE], "05 00 18 00"),
        (["dict", [["a", CHUNK]]], [NONE], "06 01 05 01 61 18 00"),
        (["ordered", [[None, ["list", []]]]], [], "07 01 00 08 00"),
        (["dict", [[False, CHUNK], [True, ["chunk", 1]]]], [NONE] * 2, "06 02 01 18 00 02 18 00"),
        (["dict", [[0, ["list", []]]]], [], "06 01 03 01 00 08 00"),
        (["dict", [[127, ["list", []]]]], [], "06 01 03 01 7f 08 00"),
        (["dict", [[128, ["list", []]]]], [], "06 01 03 02 8000 08 00"),
        (["dict", [[-128, ["list", []]]]], [], "06 01 03 01 80 08 00"),
        (["dict", [[0.5, ["list", []]]]], [], "06 01 04 000000000000e03f 08 00"),
        (["dict", [[["a", [1]], ["list", []]]]], [], "06 01 06 02 05 01 61 06 01 03 01 01 08 00"),
        (["dict", [["\ud800", ["list", []]]]], [], "06 01 05 03 eda080 08 00"),
        (["list", [CHUNK, ["tuple", []]]], [NONE], "08 02 18 00 09 00"),
        (["namedtuple", "m:N", [CHUNK]], [NONE], "0a 03 6d3a4e 01 18 00"),
    ],
)  # fmt: skip
def test_a_form_is_written_in_one_way(tree: Any, chunks: list[Chunk], code: str) -> None:
    form = encode_form(tree, chunks)
    assert form.code.hex() == bytes.fromhex(code).hex()
    read = parse_form(form.code)
    assert (read.tree, read.chunks, read.batch_dims) == (tree, tuple(chunks), form.batch_dims)


def test_batch_sizes_are_numbered_as_the_tree_goes() -> None:
    inner = ["tensordict", ["dims", 2], None, None, [["x", CHUNK]]]
    form = encode_form(
        [
            "tensordict",
            ["dims", 1],
            None,
            None,
            [["a", inner], ["b", ["object", ["dims", 1], ["chunk", 1]]]],
        ],
        [Chunk("tensor", "bool", 3), NONE],
    )
    assert form.batch_dims == 4
    batch = items_of(form, [[[2, 3, 1]], [[]]], [[bytes(6), b""]], [[2, 2, 3, 2]]).assemble()
    assert locate(batch, "here")[0].batch_dims.tolist() == [[2, 2, 3, 2]]
    assert struct.unpack_from("<7I", batch.data, 32) == (2, 2, 3, 2, 2, 3, 1)


# Cached schemas.


def test_forms_are_equal_if_their_code_is() -> None:
    forms = [encode_form(["list", [CHUNK]], [one]) for one in (NONE, NONE, TEXT)]
    assert forms[0] == forms[1] != forms[2]
    assert len(set(forms)) == 2
    assert pickle.loads(pickle.dumps(forms[0])) == forms[0]


def test_a_form_is_parsed_once() -> None:
    code = encode_form(["list", [CHUNK]], [FLOATS]).code
    assert parse_form(code) is parse_form(bytes(bytearray(code)))


@pytest.mark.parametrize(("kept", "length"), [("_parsed", 10), ("_parsed_large", 5000)])
def test_not_all_forms_are_kept(kept: str, length: int) -> None:
    for number in range(300):
        parse_form(encode_form(["dict", [[f"{number:{length}}", CHUNK]]], [NONE]).code)
    info = getattr(parsed_forms, kept).cache_info()
    assert info.currsize == info.maxsize <= 256


def test_the_itemsize_of_a_chunk() -> None:
    assert Chunk("tensor", "bfloat16").itemsize == 2
    assert Chunk("array", "<U3").itemsize == 12
    assert [Chunk(kind).itemsize for kind in ("str", "float", "none")] == [1, 8, 0]


# Invalid schemas.


def nested(depth: int) -> Any:
    tree: Any = ["list", []]
    for _ in range(depth):
        tree = ["list", [tree]]
    return tree


TD = ["tensordict", RANK0, None, None, []]


@pytest.mark.parametrize(
    ("tree", "chunks", "message"),
    [
        (["value"], [], r"\['value'\] is not a valid form of an item"),
        ("list", [], "'list' is not a valid form"),
        (["set", []], [], r"\['set', \[\]\] is not a valid form"),
        (["tensordict", RANK0, "cuda:0", None, []], [], "is not a valid form"),
        (["tensordict", [0], None, None, []], [], "is not a valid form"),
        (["list", [["chunk", "0"]]], [], r"\['chunk', '0'\] is not a valid form"),
        (
            ["tensordict", RANK0, None, None, [[1, CHUNK]]],
            [NONE],
            "the key of a tensordict must be a string, but is 1",
        ),
        (
            ["tensordict", ["dims", 1], None, [1], []],
            [],
            "the name of a dim must be a string, but is 1",
        ),
        (["dict", [[{"key": 1}, CHUNK]]], [NONE], "or a tuple of these, but is {'key': 1}"),
        (["dict", [["a"]]], [], r"\['dict', \[\['a'\]\]\] is not a valid form of an item"),
        (["dict", [3]], [], r"\['dict', \[3\]\] is not a valid form of an item"),
        (
            ["tensorclass", "m:C", ["list", []]],
            [],
            r"\['list', \[\]\] \(list\) cannot be the content of a tensorclass",
        ),
        (["objects", 0, [TD]], [], r"\(tensordict\) cannot be an element of a NonTensorStack"),
        (["lazy", 0, [["list", []]]], [], r"\(list\) cannot be an element of a lazy stack"),
        (
            ["lazy", 0, [["object", RANK0, CHUNK]]],
            [NONE],
            r"\(object\) cannot be an element of a lazy stack",
        ),
        (
            ["lazy", 0, [CHUNK]],
            [FLOAT],
            r"\['chunk', 0\] \(tensor\) cannot be an element of a lazy stack",
        ),
        (
            ["tensordict", RANK0, None, None, [["a", CHUNK]]],
            [NONE],
            r"\['chunk', 0\] \(none\) cannot be an entry of a tensordict",
        ),
        (
            ["tensordict", RANK0, None, None, [["a", ["dict", []]]]],
            [],
            r"\['dict', \[\]\] \(dict\) cannot be an entry of a tensordict",
        ),
        (["objects", 0, [7]], [], "7 is not a valid form of an item"),
    ],
)
def test_an_expression_outside_the_grammar(tree: Any, chunks: list[Chunk], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_form(tree, chunks)


@pytest.mark.product(few=12)
@pytest.mark.parametrize(
    ("tree", "chunks", "message"),
    [
        (nested(MAX_DEPTH + 1), [], f"nested deeper than {MAX_DEPTH}"),
        (["list", [CHUNK] * 2], [NONE] * 2, "the tree has chunk 0 in the position of chunk 1"),
        (["list", [["chunk", 1]]], [NONE] * 2, "the tree has chunk 1 in the position of chunk 0"),
        (["list", [CHUNK]], [NONE] * 2, "2 chunks were passed, but the tree contains 1 chunks"),
        (CHUNK, [], "the tree has chunk 0 in the position of chunk 0"),
        (
            CHUNK,
            [NONE] * (MAX_CHUNKS + 1),
            f"has {MAX_CHUNKS + 1} leaves, but the limit is {MAX_CHUNKS}",
        ),
        (
            ["list", [["list", []]] * MAX_PARTS],
            [],
            f"has more than {MAX_PARTS} nodes, keys and names",
        ),
        (
            ["dict", [["x" * MAX_FORM_BYTES, CHUNK]]],
            [NONE],
            f"takes {MAX_FORM_BYTES + 8} bytes",
        ),
        (["dict", [["a", ["list", []]]] * 2], [], "the key 'a' occurs twice"),
        (["dict", [[1, ["list", []]], [True, ["list", []]]]], [], "the key True occurs twice"),
        (
            ["tensordict", RANK0, None, None, [["a", TD]] * 2],
            [],
            "the key 'a' occurs twice",
        ),
        (["dict", [[float("nan"), CHUNK]]], [NONE], "the key nan is not finite"),
        (
            ["dict", [[1 << 9000, CHUNK]]],
            [NONE],
            "a key is an int of 9001 bits, but the limit is 8192",
        ),
        (
            ["tensordict", ["dims", 33], None, None, []],
            [],
            "batch dims must be from 0 to 32, but is 33",
        ),
        (
            ["tensordict", ["dims", -1], None, None, []],
            [],
            "batch dims must be from 0 to 32, but is -1",
        ),
        (
            ["tensordict", ["dims", 2], None, ["a"], []],
            [],
            r"must be a list with 2 entries, but are \['a'\]",
        ),
        (
            ["tensordict", ["dims", 2], None, None, [["x", CHUNK]]],
            [FLOATS],
            "chunk 0 has 1 dims, but is in a tensordict with 2 batch dims",
        ),
        (
            ["tensordict", ["dims", 2], None, None, [["x", TD]]],
            [],
            "batch dims must be from 2 to 32, but is 0",
        ),
        (
            ["lazy", 1, [TD]],
            [],
            "a stack along dim 1 must have the same number of batch dims, at least 1",
        ),
        (
            ["lazy", 0, [TD, ["tensordict", ["dims", 1], None, None, []]]],
            [],
            "must have the same number of batch dims",
        ),
        (["lazy", 1, []], [], "must have the same number of batch dims"),
        (
            ["lazy", 0, [["tensordict", ["dims", MAX_RANK], None, None, []]]],
            [],
            "a stack along dim 0 must have the same number of batch dims, at least 0",
        ),
        (["lazy", -1, [TD]], [], "a stack dim must be from 0 to 32, but is -1"),
        (CHUNK, [Chunk("tensor", "float31")], "'float31' is not a torch dtype"),
        (CHUNK, [Chunk("array", "float32")], "'float32' is not a NumPy dtype"),
        (CHUNK, [Chunk("array", "|O8")], "'|O8' is not a NumPy dtype"),
        (CHUNK, [Chunk("array", "<f3")], "'<f3' is not a NumPy dtype"),
        (CHUNK, [Chunk("array", "|f4")], ".|f4. is not a NumPy dtype"),
        (
            CHUNK,
            [Chunk("str", "<f4", 1)],
            "a chunk of kind 'str' must not have a dtype, but has dtype '<f4'",
        ),
        (CHUNK, [Chunk("set")], "the kind 'set' is not one of tensor, array"),
        (CHUNK, [Chunk("str")], "chunk 0 .str. must have from 1 to 1 dims, but has 0"),
        (
            CHUNK,
            [Chunk("tensor", "bool", 33)],
            "chunk 0 .tensor. must have from 0 to 32 dims, but has 33",
        ),
        (
            ["list", [["chunk", at] for at in range(2048)]],
            [Chunk("tensor", "bool", MAX_RANK)] * 2048,
            f"has 65536 sizes, but the limit is {MAX_NUMBERS}",
        ),
        (CHUNK, [Chunk("bool", codec=4)], "chunk 0 has the codec 4, which does not"),
        (
            CHUNK,
            [JOINED],
            ("chunk 0 cannot be joined to chunk 0, which is not an earlier chunk compressed with"),
        ),
        (
            ["list", [CHUNK, ["chunk", 1]]],
            [TEXT, JOINED],
            (
                "chunk 1 cannot be joined to chunk 0, which is not an earlier chunk compressed "
                "with zstd"
            ),
        ),
        (
            ["list", [CHUNK, ["chunk", 1], ["chunk", 2]]],
            [Chunk("bytes", rank=1, codec=Codec.ZSTD), JOINED, replace(JOINED, joined=1)],
            "chunk 2 cannot be joined to chunk 1",
        ),
        (
            CHUNK,
            [replace(JOINED, joined=None)],
            "chunk 0 must have the codec JOINED if it is joined",
        ),
        (
            CHUNK,
            [replace(TEXT, joined=0)],
            "chunk 0 must have the codec JOINED if it is joined own",
        ),
    ],
)
def test_an_impossible_form(tree: Any, chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_form(tree, chunks)


def test_a_form_may_be_as_large_as_the_limits_say() -> None:
    forms = [
        encode_form(nested(MAX_DEPTH), []),
        encode_form(["list", [["list", []]] * (MAX_PARTS - 1)], []),
        encode_form(["dict", [["x" * (MAX_FORM_BYTES - 8), ["list", []]]]], []),
        encode_form(["tensordict", ["dims", MAX_RANK], None, None, []], []),
        encode_form(["dict", [[-(1 << 8191), ["list", []]]]], []),
    ]
    for form in forms:
        assert parse_form(form.code).tree == form.tree


@pytest.mark.product(few=10)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "it ends at byte 0, but 1 bytes were expected"),
        ("00", "byte 0 of 1 is 0x00, which is not a known tag"),
        ("0b", "byte 0 of 1 is 0x0b"),
        ("19", "byte 0 of 1 is 0x19"),
        ("08 01 19", "byte 2 of 3 is 0x19"),
        ("08 00 00", "1 bytes follow its end"),
        ("08 01", "it ends at byte 2, but 3 bytes were expected"),
        ("08 80 00", "its code is not the shortest one"),
        ("08 ff ff ff ff ff", "it ends at byte 6, but 7 bytes were expected"),
        ("06 01 05 ff ff ff ff 0f 61", "it ends at byte 9, but 4294967303 bytes were expected"),
        ("06 01 03 02 00 00 08 00", "its code is not the shortest one"),
        ("06 01 03 00 08 00", "its code is not the shortest one"),
        ("06 01 07 08 00", "0x07 is not a kind of key"),
        ("06 01 04 000000000000f07f 08 00", "the key inf is not finite"),
        ("06 01 05 01 ff 08 00", "invalid start byte"),
        ("06 02 02 08 00 03 01 01 08 00", "the key 1 occurs twice"),
        ("01 00 04 00", "the marks 0x04 of a tensordict are not known"),
        ("01 01 01 02 00", "a flag is 0x02, but must be 0 or 1"),
        ("01 21 00 00", "batch dims must be from 0 to 32, but is 33"),
        ("02 01 61 08 00", "['list', []] (list) cannot be the content of a tensorclass"),
        (
            "03 01 01 01 00 00 00",
            "a stack along dim 1 must have the same number of batch dims, at least 1",
        ),
        ("10 03 04 626f6f6c 00 00", "chunk 0 cannot be joined to chunk 0"),
        ("08 02 13 01 13 03 01", "chunk 1 cannot be joined to chunk 1"),
        ("08 02 13 01 13 03 ff ff ff ff 0f", "chunk 1 cannot be joined to chunk 4294967295"),
        ("10 10 04 626f6f6c 00", "the flags 0x10 of a chunk are not known"),
        ("10 04 04 626f6f6c 00 01", "the flags 0x04 of a chunk are not known"),
        (
            "10 08 04 626f6f6c 01",
            "chunk 0 (tensor bool) cannot be planar: planar chunks have elements of one byte",
        ),
        ("10 0a 04 626f6f6c 02", "chunk 0 (tensor bool) cannot be planar"),
        ("10 08 05 696e743136 02", "chunk 0 (tensor int16) cannot be planar"),
        ("10 00 04 626f6f6b 00", "'book' is not a torch dtype"),
        ("11 00 03 7c4f38 00", "'|O8' is not a NumPy dtype"),
        ("11 00 0d 3c553939393939393939393939 00", "is not a NumPy dtype"),
        ("08" + "01 08" * MAX_DEPTH + "01 08 00", f"nested deeper than {MAX_DEPTH}"),
        ("08 ff ff 07" + "08 00" * (2**17 - 1), f"or has more than {MAX_PARTS} nodes and keys"),
        ("08 81 20" + "18 00" * (MAX_CHUNKS + 1), f"it has more than {MAX_CHUNKS} chunks"),
        (
            "00" * (MAX_FORM_BYTES + 1),
            f"it has {MAX_FORM_BYTES + 1} bytes, but the limit is {MAX_FORM_BYTES}",
        ),
    ],
)
def test_invalid_bytes_of_a_form(code: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are compared below
        parse_form(bytes.fromhex(code))
    assert message in str(caught.value)


# Items that cannot be written.


def arguments(**changed: Any) -> dict[str, Any]:
    """Returns the arguments for two records of 3 bytes and two floats."""
    text = np.frombuffer(b"abcdefgh", np.uint8)
    form = encode_form(["list", [CHUNK, ["chunk", 1]]], [Chunk("bytes", rank=1), FLOATS])
    given = {
        "form": form,
        "batch_dims": np.empty((2, 0), np.int64),
        "dims": [np.array([[3], [3]]), np.array([[2], [2]])],
        "addresses": np.full((2, 2), address(text)),
        "sizes": np.array([[3, 8], [3, 8]]),
    }
    assert len(assemble(**given)) == 2
    return given | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"addresses": np.zeros((2, 3), np.int64)},
            r"addresses must be int64\[2, 2\], but is int64\[2, 3\]",
        ),
        (
            {"addresses": np.zeros((2, 2))},
            r"addresses must be int64\[2, 2\], but is float64\[2, 2\]",
        ),
        (
            {"sizes": np.zeros((1, 2), np.int64)},
            r"sizes must be int64\[2, 2\], but is int64\[1, 2\]",
        ),
        ({"batch_dims": np.zeros((2, 1), np.int64)}, r"batch_dims must be int64\[2, 0\]"),
        ({"dims": []}, "dims for 0 chunks were passed, but the form has 2"),
        (
            {"dims": [np.array([[3], [3]]), np.array([2, 2])]},
            r"dims\[1\] must be int64\[2, 1\], but is int64\[2\]",
        ),
        (
            {"dims": [np.array([[3], [3]]), np.array([[2], [-1]])]},
            "record 1 cannot be written: -1 does not fit into 32 bits",
        ),
        (
            {"dims": [np.array([[2**32], [3]]), np.array([[2], [2]])]},
            "record 0 cannot be written: 4294967296 does not fit",
        ),
        (
            {"sizes": np.array([[3, 8], [4, 8]])},
            r"record 1 cannot be written: chunk 0 \(bytes\) has 4 bytes, but its dims need 3",
        ),
        (
            {"sizes": np.array([[3, 8], [3, 4]])},
            (
                r"record 1 cannot be written: chunk 1 \(float32\) has 4 bytes, but its dims "
                r"need 8"
            ),
        ),
        (
            {"dims": [np.array([[3], [3]]), np.array([[2], [2**32 - 1]])]},
            r"record 1 cannot be written: it contains 17179869183 bytes, but the limit is "
            r"4294967296: chunk 1 \(float32\[4294967295\]\)",
        ),
    ],
)
def test_an_invalid_write(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(**arguments(**changed))


def test_a_record_has_less_than_4_gib() -> None:
    form = encode_form(
        ["list", [CHUNK, ["chunk", 1]]], [Chunk("bytes", rank=1, codec=Codec.OWN)] * 2
    )
    with pytest.raises(ValueError, match=r"it takes 8589934.* bytes, but the limit is 4294967295"):
        assemble(
            form,
            np.empty((1, 0), np.int64),
            [np.array([[1]])] * 2,
            np.zeros((1, 2), np.int64),
            np.full((1, 2), 2**32 - 1),
        )


# One record at a time.


def assembled_alone(items: Items) -> RecordBatch | None:
    dims = [size for dims in items.dims for size in dims[0].tolist()]
    pieces = [piece.tobytes() for piece in items.pieces[0]]
    return assemble_one(items.form, items.batch_dims[0].tolist() + dims, pieces)


@given(st.randoms(use_true_random=True))
def test_a_record_alone_is_the_one_of_a_batch(source: random.Random) -> None:
    items = drawn(source, 1)
    batch, record = items.assemble(), assembled_alone(items)
    assert record is not None
    assert record.data.tobytes() == batch.data.tobytes() == as_documented(items)[0]
    assert record.starts.tolist() == [0]
    assert record.sizes.tolist() == batch.sizes.tolist()
    assert record.sizes.dtype == record.starts.dtype == np.int64
    assert record.data.flags.writeable
    assert address(record.data) % 8 == 0


def test_no_record_is_made_alone_that_cannot_be_one_of_a_batch() -> None:
    lazy = ["lazy", 0, [["tensordict", ["dims", 1], None, None, [["x", CHUNK]]]]]
    led = encode_form(lazy, [Chunk("tensor", "bool", 1)])
    packed = encode_form(CHUNK, [Chunk("bytes", rank=1, codec=Codec.ZSTD)])
    own = encode_form(CHUNK, [Chunk("bytes", rank=1, codec=Codec.OWN)])
    wide = encode_form(CHUNK, [Chunk("tensor", "float64", 4)])
    floats = encode_form(CHUNK, [FLOATS])
    for form, batch_dims, dims, piece, possible in (
        (led, [3], [3], bytes(3), True),
        (led, [2], [3], bytes(3), False),  # batch sizes lead the shapes
        (floats, [], [2], bytes(8), True),
        (floats, [], [2], bytes(4), False),  # contradicts its dims
        (own, [], [2**32], b"x", False),  # more than 32 bits
        (own, [], [2**32 - 1], b"x", True),
        (packed, [], [2**17 + 2**15], b"x", True),
        (packed, [], [2**17 + 2**15 + 1], b"x", False),  # denser than zstd
        (wide, [], [0, 2**20, 2**17, 1], b"", True),
        (wide, [], [0, 2**20, 2**17, 2], b"", False),  # impossibly large
    ):
        items = items_of(form, [[dims]], [[piece]], [batch_dims])
        record = assembled_alone(items)
        if possible:
            assert record is not None
            assert record.data.tobytes() == items.assemble().data.tobytes()
        else:
            assert record is None
            with pytest.raises(ValueError, match="record 0 cannot be written"):
                items.assemble()


def test_joined_chunks_are_dense_together() -> None:
    form = encode_form(
        ["list", [CHUNK, ["chunk", 1], ["chunk", 2]]],
        [Chunk("bytes", rank=1, codec=Codec.ZSTD), JOINED, JOINED],
    )
    limit = 2**17 + 3 * 2**15
    for sizes, possible in (
        ([1, 0, limit - 1], True),
        ([limit - 9, 4, 5], True),
        ([limit - 9, 4, 6], False),
        ([0, 0, limit + 1], False),
    ):
        items = items_of(form, [[[size]] for size in sizes], [[b"xyz", b"", b""]])
        record = assembled_alone(items)
        if possible:
            assert record is not None
            assert record.data.tobytes() == items.assemble().data.tobytes()
            (found,) = locate(record, "run/buffer")
            assert found.sizes.tolist() == [[3, 0, 0]]
        else:
            assert record is None
            with pytest.raises(ValueError, match="bytes are compressed to 3, which is impossible"):
                items.assemble()


def test_a_joined_chunk_has_no_bytes_of_its_own() -> None:
    form = encode_form(
        ["list", [CHUNK, ["chunk", 1]]], [Chunk("bytes", rank=1, codec=Codec.ZSTD), JOINED]
    )
    assert assemble_one(form, [4, 4], [b"xyz", b"a"]) is None
    with pytest.raises(
        ValueError, match=r"chunk 1 .bytes. is joined to another chunk, but has a piece of 1 bytes"
    ):
        items_of(form, [[[4]], [[4]]], [[b"xyz", b"a"]]).assemble()


def test_an_item_alone_has_4_gib_at_most() -> None:
    form = encode_form(
        ["list", [CHUNK, ["chunk", 1]]], [Chunk("bytes", rank=1, codec=Codec.OWN)] * 2
    )
    assert assemble_one(form, [2**31, 2**31], [b"", b""]) is not None
    assert assemble_one(form, [2**31, 2**31 + 1], [b"", b""]) is None


class Strided:
    """A tensor, as the core sees one."""

    def __init__(self, place: int) -> None:
        self.data_ptr = lambda: place


def test_pieces_of_a_record_alone_are_buffers_or_tensors_as_their_dims_say() -> None:
    form = encode_form(["list", [CHUNK, ["chunk", 1]]], [FLOATS, Chunk("bytes", rank=1)])
    numbers = np.arange(3.0, dtype=np.float32)
    expected = assemble_one(form, [3, 2], [numbers.tobytes(), b"ab"])
    assert expected is not None
    for piece in (numbers, numbers.data, Strided(address(numbers))):
        found = assemble_one(form, [3, 2], [piece, bytearray(b"ab")])
        assert found is not None
        assert found.data.tobytes() == expected.data.tobytes()
    assert assemble_one(form, [3, 2], [Strided(0), b"ab"]) is None
    assert assemble_one(form, [0, 2], [Strided(0), b"ab"]) is not None


def test_a_record_alone_has_a_number_for_each_dim_and_a_piece_for_each_chunk() -> None:
    form = encode_form(["list", [CHUNK, ["chunk", 1]]], [FLOATS, Chunk("bytes", rank=1)])
    floats = bytes(8)
    assert assemble_one(form, [2, 1], [floats, b"x"]) is not None
    for dims in ([], [2], [2, 1, 1], [2, -1]):
        assert assemble_one(form, dims, [floats, b"x"]) is None
    for pieces in ([], [floats], [floats, b"x", b"x"]):
        assert assemble_one(form, [2, 1], pieces) is None
    with pytest.raises(OverflowError):
        assemble_one(form, [2, 2**64], [floats, b"x"])
    with pytest.raises(AttributeError, match="data_ptr"):
        assemble_one(form, [2, 1], [floats, None])
    with pytest.raises(ValueError, match="not C-contiguous"):
        assemble_one(form, [2, 1], [np.zeros((2, 2), np.float32)[:, 0], b"x"])
    packed = encode_form(CHUNK, [Chunk("bytes", rank=1, codec=Codec.ZSTD)])
    assert assemble_one(packed, [1], [Strided(address(np.zeros(1)))]) is None
    assert assemble_one(packed, [1, 1], [Strided(address(np.zeros(1)))]) is None


def test_a_record_may_have_many_pieces() -> None:
    count = 200
    form = encode_form(["list", [["chunk", at] for at in range(count)]], [FLOATS] * count)
    pieces = [np.full(1, at, np.float32).tobytes() for at in range(count)]
    items = items_of(form, [[[1]]] * count, [pieces])
    found = assembled_alone(items)
    assert found is not None
    assert found.data.tobytes() == items.assemble().data.tobytes()


def test_a_record_that_a_reader_would_refuse_is_not_written() -> None:
    form = encode_form(CHUNK, [Chunk("bytes", rank=1, codec=Codec.ZSTD)])
    with pytest.raises(ValueError, match="163841 bytes are compressed to 1, which is impossible"):
        one(form, [[2**17 + 2**15 + 1]], b"x")
    assert len(one(form, [[2**17 + 2**15]], b"x")) == 1


# Refused records.


def changed(at: int, kind: str, value: int, source: RecordBatch | None = None) -> RecordBatch:
    """Makes the document's example with other bytes in its second record."""
    batch = example().assemble() if source is None else source
    struct.pack_into("<" + kind, batch.data, int(batch.starts[1]) + at, value)
    return batch


@pytest.mark.parametrize(
    ("at", "kind", "value", "message"),
    [
        (
            24,
            "B",
            2,
            "its body is of version 2, or does not start with the bytes of version 1",
        ),
        (25, "B", 1, "its body is of version 1, or does not start with the bytes"),
        (
            26,
            "H",
            65535,
            "65535 numbers and a form of 50 bytes do not fit into its 112 bytes",
        ),
        (28, "I", 2**32 - 1, "4 numbers and a form of 4294967295 bytes do not fit"),
        (28, "I", 49, "its form cannot be read: it ends at byte 49, but 50 bytes were expected"),
        (28, "I", 51, "its form cannot be read: 1 bytes follow its end"),
        (36, "I", 4, "it has 112 bytes, but its pieces end at 116"),
        (
            36,
            "I",
            2**32 - 1,
            r"8589934598 bytes, but the limit is 4294967296: chunk 0 (uint8[2, 4294967295])",
        ),
        (40, "I", 1, "it has 112 bytes, but its pieces end at 111"),
        (40, "I", 3, "it has 112 bytes, but its pieces end at 113"),
        (
            44,
            "I",
            2**32 - 1,
            "it contains 4294967305 bytes, but the limit is 4294967296: chunk 3 (int[4294967295])",
        ),
        (48, "B", 0x0B, "its form cannot be read: byte 0 of 50 is 0x0b"),
    ],
)
def test_a_damaged_record_is_refused(at: int, kind: str, value: int, message: str) -> None:
    with pytest.raises(CorruptBufferError) as caught:
        locate(changed(at, kind, value), "run/buffer")
    assert str(caught.value).startswith("run/buffer: record 1: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith(
        ", because the buffer was damaged or changed by another program; restore the buffer "
        "from a copy"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.path, again.row) == ("run/buffer", 1)


@pytest.mark.parametrize(
    ("start", "size", "message"),
    [
        (-8, 100, "100 bytes from -8 are not within the 232 bytes that were read"),
        (2**62, 100, "100 bytes from 4611686018427387904 are not within the 232"),
        (4, 100, "100 bytes from 4 are not within"),
        (120, 113, "113 bytes from 120 are not within"),
        (120, 2**62, "4611686018427387904 bytes from 120 are not within"),
        (120, -1, "it has -1 bytes, but needs at least 32"),
        (120, 0, "it has 0 bytes, but needs at least 32"),
        (120, 31, "it has 31 bytes, but needs at least 32"),
        (120, 110, "it has 110 bytes, but its pieces end at 112"),
        (232, 0, "it has 0 bytes"),
    ],
)
def test_a_record_that_is_not_there_is_refused(start: int, size: int, message: str) -> None:
    whole = example().assemble()
    batch = RecordBatch(whole.data, np.array([0, start]), np.array([114, size]))
    with pytest.raises(CorruptBufferError, match="here: record 1: .*" + message):
        locate(batch, "here")


def test_a_record_has_as_many_numbers_as_its_form() -> None:
    code = encode_form(CHUNK, [FLOATS]).code
    batch = join([struct.pack("<BBHI", 1, 0, 0, len(code)) + code + bytes(8)])
    with pytest.raises(CorruptBufferError, match="record 0: it has 0 numbers, but its form has 1"):
        locate(batch, "here")


def test_a_form_ends_in_its_record() -> None:
    batch = items_of(encode_form(["dict", []], []), [], [[]]).assemble()
    batch.sizes[0] = 33
    with pytest.raises(CorruptBufferError, match="a form of 2 bytes do not fit into its 33 bytes"):
        locate(batch, "here")


@pytest.mark.parametrize(
    ("starts", "sizes", "message"),
    [
        ([0, 64, 136], [64] * 3, "record 2: 64 bytes from 136 are not within the 192"),
        ([0, 64, 2**40], [64] * 3, "record 2: 64 bytes from 1099511627776 are not within"),
        ([0, -64, 128], [64] * 3, "record 1: 64 bytes from -64 are not within"),
        ([0, 68, 128], [64] * 3, "record 1: 64 bytes from 68 are not within"),
        ([0, 64, 128], [64, 72, 64], "record 1: it has 72 bytes, but its pieces end at 64"),
        ([0, 64, 128], [64, 64, 72], "record 2: 72 bytes from 128 are not within"),
        ([0, 64, 128], [56] * 3, "record 0: it has 56 bytes, but its pieces end at 64"),
        ([0, 64, 128], [72] * 3, "record 2: 72 bytes from 128 are not within"),
        ([0, 64], [72] * 2, "record 0: it has 72 bytes, but its pieces end at 64"),
        ([0, 64, 128], [24] * 3, "record 0: it has 24 bytes, but needs at least 32"),
        ([0, 64, 128], [-8] * 3, "record 0: it has -8 bytes"),
    ],
)
def test_records_of_equal_sizes_are_looked_at_as_any_others(
    starts: list[int], sizes: list[int], message: str
) -> None:
    form = encode_form(["list", [CHUNK]], [FLOATS])
    whole = items_of(form, [[[3]] * 3], [[bytes(12)]] * 3).assemble()
    assert (whole.starts.tolist(), whole.sizes.tolist()) == ([0, 64, 128], [64] * 3)
    with pytest.raises(CorruptBufferError, match="here: " + message):
        locate(RecordBatch(whole.data, np.array(starts), np.array(sizes)), "here")


@pytest.mark.parametrize("at", [24, 25])
def test_the_head_of_a_body_is_that_of_its_version(at: int) -> None:
    whole = items_of(encode_form(["list", [CHUNK]], [FLOATS]), [[[3]]], [[bytes(12)]]).assemble()
    whole.data[at] ^= 4
    with pytest.raises(CorruptBufferError, match=f"its body is of version {5 if at == 24 else 1}"):
        locate(whole, "here")


def test_a_defect_of_all_records_is_reported_for_the_first() -> None:
    form = encode_form(["list", [CHUNK]], [FLOATS])
    batch = items_of(form, [[[2]] * 3], [[bytes(8)]] * 3).assemble()
    words = batch.data.view(np.uint32).reshape(3, -1)
    words[:, 8] = 3
    with pytest.raises(
        CorruptBufferError, match="record 0: it has 60 bytes, but its pieces end at 64"
    ):
        locate(batch, "here")
    words[:, 8] = 2**31
    with pytest.raises(CorruptBufferError, match="record 0: it contains 8589934592 bytes, but"):
        locate(batch, "here")
    words[:, 9] = 0
    with pytest.raises(CorruptBufferError, match="record 0: its form cannot be read: byte 0 of"):
        locate(batch, "here")


def test_a_row_of_a_later_form_is_named_as_it_is_in_the_batch() -> None:
    texts = one(encode_form(CHUNK, [TEXT]), [[2]], b"ab")
    batch = join([bytes(texts.body(0)), *[bytes(example().assemble().body(1))] * 2])
    assert len(locate(batch, "here")) == 2
    batch.data[int(batch.starts[2]) + 36] = 1
    with pytest.raises(
        CorruptBufferError, match="record 2: it has 112 bytes, but its pieces end at"
    ):
        locate(batch, "here")


def test_batch_sizes_lead_the_shapes_of_what_is_in_a_tensordict() -> None:
    lazy = ["lazy", 0, [["tensordict", ["dims", 1], None, None, [["x", ["chunk", 1]]]]]]
    tree = ["tensordict", ["dims", 2], None, None, [["a", CHUNK], ["b", lazy]]]
    form = encode_form(tree, [Chunk("tensor", "bool", 3), Chunk("tensor", "bool", 1)])
    pieces = [[bytes(6), bytes(3)]]
    good = items_of(form, [[[1, 3, 2]], [[3]]], pieces, [[1, 3, 3]])
    assert len(locate(good.assemble(), "here")) == 1
    bad = [
        ([2, 3, 1], [3], [1, 3, 3], "a batch size is 2, but its shapes need 1"),  # the tensor
        (
            [2, 3, 1],
            [3],
            [2, 3, 3],
            "a batch size is 2, but its shapes need 1",
        ),  # the number of parts
        ([1, 3, 2], [2], [1, 3, 2], "a batch size is 2, but its shapes need 3"),  # the parts
        ([1, 3, 2], [2], [1, 3, 3], "a batch size is 2, but its shapes need 3"),  # what is in them
    ]
    for dims, others, batch_dims, message in bad:
        pieces = [[bytes(6), bytes(others[0])]]
        with pytest.raises(ValueError, match=message):
            items_of(form, [[dims], [others]], pieces, [batch_dims]).assemble()


def test_sizes_that_are_zero_do_not_hide_the_others() -> None:
    form = encode_form(CHUNK, [Chunk("tensor", "float64", 4)])
    assert len(one(form, [[0, 2**20, 2**17, 1]], b"")) == 1
    for dims in ([0, 2**20, 2**17, 2], [0] + [2**32 - 1] * 3):
        with pytest.raises(ValueError, match=r"chunk 0 \(float64\[0, .* is impossibly large"):
            one(form, [dims], b"")
    most = encode_form(CHUNK, [Chunk("tensor", "complex128", MAX_RANK)])
    with pytest.raises(ValueError, match="impossibly large"):
        one(most, [[2**32 - 1] * MAX_RANK], b"")


@pytest.mark.full
def test_how_dense_zstd_can_be() -> None:
    for raw in (0, 1, 100, 2**17, 2**17 + 1, 10**6, 10**8):
        stored = len(zstandard.ZstdCompressor(level=19).compress(bytes(raw)))
        assert plausible(raw, stored)
    assert plausible(MAX_RAW_BYTES, 2**17)
    assert not plausible(MAX_RAW_BYTES, 2**17 - 5)
    assert not plausible(MAX_RAW_BYTES + 1, 2**20)
