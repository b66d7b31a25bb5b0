"""Damaged and hostile bodies are refused with an error, or describe only bytes inside them."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest

from shmbuffer import CorruptBufferError
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, RecordBatch, join
from shmbuffer.memory.record_format import (
    Chunk,
    Codec,
    Form,
    encode_form,
    locate,
    locating,
)
from shmbuffer.memory.record_format.bounds import (
    MAX_FORM_BYTES,
    MAX_NUMBERS,
    MAX_RAW_BYTES,
    plausible,
)
from shmbuffer.memory.record_format.record_forms import parse_form
from tests.memory.record_format.test_record_format import drawn, example

SEED = 20240817
HEAD = struct.Struct("<BBHI")

# Values that sizes, counts and offsets are set to, in addition to those near the original.
NUMBERS = (0, 1, 2, 7, 31, 32, 33, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31)
NUMBERS += (2**32 - 8, 2**32 - 1)


@cache
def records() -> list[bytes]:
    """Makes valid bodies with many schemas."""
    found = []
    for seed in range(60):
        source = random.Random(seed)
        batch = drawn(source, source.randrange(1, 4)).assemble()
        found += [bytes(batch.body(row)) for row in range(len(batch))]
    batch = example().assemble()
    return [*found, *[bytes(batch.body(row)) for row in range(2)]]


@cache
def forms() -> list[bytes]:
    """Returns the schemas of these bodies."""
    return list(dict.fromkeys(code_of(body) for body in records()))


def code_of(body: bytes) -> bytes:
    _, _, numbers, form_bytes = HEAD.unpack_from(body)
    at = HEAD.size + 4 * numbers
    return body[at : at + form_bytes]


# Mutants.


def flipped(source: random.Random, body: bytearray) -> None:
    for _ in range(source.choice((1, 1, 1, 2, 8))):
        body[source.randrange(len(body))] ^= 1 << source.randrange(8)


def cut(source: random.Random, body: bytearray) -> None:
    del body[source.randrange(len(body)) :]


def without_a_part(source: random.Random, body: bytearray) -> None:
    at = source.randrange(len(body))
    del body[at : at + source.randrange(1, 9)]


def longer(source: random.Random, body: bytearray) -> None:
    at = source.randrange(len(body) + 1)
    body[at:at] = source.randbytes(source.randrange(1, 9))


def spliced(source: random.Random, body: bytearray) -> None:
    other = source.choice(records())
    body[source.randrange(len(body)) :] = other[source.randrange(len(other)) :]


def doubled(source: random.Random, body: bytearray) -> None:
    at = source.randrange(len(body))
    body[at:at] = body[at : at + source.randrange(1, 40)] * source.randrange(1, 4)


def with_a_number(source: random.Random, body: bytearray) -> None:
    """Replaces a number near the beginning of the body or header, where decisions depend on it."""
    at = 4 * source.randrange(max(1, min(len(body) // 4, 40)))
    if at + 4 <= len(body):
        (was,) = struct.unpack_from("<I", body, at)
        value = source.choice((*NUMBERS, was + 1, was - 1, was * 2, was + 8, was ^ 1 << 16))
        struct.pack_into("<I", body, at, value & 2**32 - 1)


def with_two_numbers(source: random.Random, body: bytearray) -> None:
    with_a_number(source, body)
    with_a_number(source, body)


def nested(source: random.Random, body: bytearray) -> None:
    """Nests the schema in many lists or stacks and updates the header."""
    if len(body) < HEAD.size or not (code := code_of(body)):
        return
    deep = source.choice((b"\x08\x01", b"\x09\x01", b"\x03\x00\x01")) * source.randrange(1, 100)
    at = bytes(body).find(code)
    body[at:at] = deep
    struct.pack_into("<I", body, 4, len(code) + len(deep))


MUTATIONS = (flipped, cut, without_a_part, longer, spliced, doubled)
MUTATIONS += (with_a_number, with_two_numbers, with_two_numbers, nested)


def mutants(seed: int) -> Iterator[bytes]:
    source = random.Random(seed)
    while True:
        body = bytearray(source.choice(records()))
        for _ in range(source.choice((1, 1, 2, 3))):
            if body:
                source.choice(MUTATIONS)(source, body)
        yield bytes(body)


# Properties of accepted bodies.


def located(batch: RecordBatch) -> bool:
    """True if the batch is accepted; the core's locator must agree with the Python one."""
    found = refused_or_found(batch)
    with patch.object(locating, "_locate_by_core", lambda batch: None):
        assert refused_or_found(batch) == found
    return not isinstance(found, str)


def refused_or_found(batch: RecordBatch) -> str | list[Any]:
    """Returns the refusal, or the located content after checking that it is inside its record."""
    groups, error = [], None
    try:
        groups = locate(batch, "here")
    except CorruptBufferError as caught:
        error = caught
    if error is not None:
        assert str(error).startswith("here: record ")
        assert 0 <= error.row < len(batch)
        return str(error)
    assert sorted(row for found in groups for row in found.rows.tolist()) == list(range(len(batch)))
    for found in groups:
        if found.alike:
            assert all((dims == dims[:1]).all() for dims in [found.batch_dims, *found.dims])
        for at, row in enumerate(found.rows.tolist()):
            require_inside(
                found.form,
                [dims[at].tolist() for dims in found.dims],
                (found.offsets[at] - batch.starts[row]).tolist(),
                found.sizes[at].tolist(),
                int(batch.sizes[row]),
            )
    return [(found.form.code, *map(_plain, found[1:-1])) for found in groups]


def _plain(told: Any) -> Any:
    return [one.tolist() for one in told] if isinstance(told, tuple) else told.tolist()


def require_inside(
    form: Form, dims: list[list[int]], offsets: list[int], sizes: list[int], size: int
) -> None:
    """Checks the bounds with Python's integers, which do not overflow."""
    total = 0
    for chunk, shape, at, nbytes in zip(form.chunks, dims, offsets, sizes, strict=True):
        expanded = chunk.itemsize
        for dim in shape:
            assert 0 <= dim < 2**32
            expanded *= dim
        total += expanded
        assert at >= HEADER_BYTES + HEAD.size
        assert nbytes >= 0
        assert at + nbytes <= size
        if chunk.codec is Codec.RAW:
            assert nbytes == expanded
            assert at % chunk.alignment == 0
        if chunk.codec is Codec.ZSTD:
            assert plausible(expanded, nbytes)
    assert total <= MAX_RAW_BYTES


@pytest.fixture
def many(full: bool) -> int:
    """Returns how many of the drawn mutants are tried."""
    return 10_000 if full else 1_500


def test_a_mutant_is_refused_or_lies_inside_its_record(many: int) -> None:
    accepted = sum(located(join([body])) for body in islice(mutants(SEED), many))
    assert 0.03 * many < accepted < 0.97 * many  # both outcomes occur


@pytest.mark.full
def test_a_mutant_among_others_does_no_harm(many: int) -> None:
    source, others = random.Random(SEED), records()
    for body in islice(mutants(SEED + 1), many // 5):
        batch = [body] * source.randrange(1, 4) + source.choices(others, k=source.randrange(3))
        source.shuffle(batch)
        located(join(batch))


def test_records_that_are_not_there_do_no_harm(many: int) -> None:
    source = random.Random(SEED)
    for _ in range(many // 5):
        whole = join(source.choices(records(), k=1) * source.randrange(1, 4))
        starts, sizes = whole.starts.copy(), whole.sizes.copy()
        rows = source.choice((slice(None), slice(source.randrange(len(starts)), None)))
        changed = source.choice((starts, sizes))
        changed[rows] += source.choice((-(2**40), -8, -1, 1, 4, 8, 48, 2**20, 2**62))
        located(RecordBatch(whole.data, starts, sizes))


def test_a_record_may_be_cut_anywhere(many: int) -> None:
    for body in random.Random(SEED).sample(records(), many // 500):
        for length in range(len(body)):
            assert not located(join([body[:length]]))


def test_a_form_is_refused_or_comes_back_as_it_was(many: int) -> None:
    source, accepted = random.Random(SEED), 0
    for _ in range(many):
        code = bytearray(source.choice(forms()))
        for _ in range(source.choice((1, 1, 2))):
            if code:
                source.choice(MUTATIONS)(source, code)
        form = None
        with suppress(ValueError):
            form = parse_form(bytes(code))
        if form is not None:
            accepted += 1
            assert encode_form(form.tree, form.chunks).code == form.code == code
    assert 0.03 * many < accepted < 0.97 * many


# Refusals cost no more than their bytes.


def body_of(code: bytes, numbers: bytes = b"", rest: bytes = b"") -> bytes:
    return HEAD.pack(1, 0, len(numbers) // 4, len(code)) + numbers + code + rest


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def stuffed(tag: bytes, node: bytes) -> bytes:
    """Makes a container that declares 2**32 - 1 nodes, with as many as fit into a schema."""
    start = tag + b"\xff\xff\xff\xff\x0f"
    return start + node * ((MAX_FORM_BYTES - len(start)) // len(node))


TENSOR = encode_form(["chunk", 0], [Chunk("tensor", "float64", 3)]).code
STRETCHED = encode_form(["chunk", 0], [Chunk("bytes", rank=1, codec=Codec.ZSTD)]).code


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "body",
    [
        body_of(TENSOR, u32(2**32 - 1, 2**32 - 1, 2**32 - 1)),
        body_of(TENSOR, u32(2**29, 1, 1)),
        body_of(TENSOR, u32(2**31, 2**31, 0)),
        body_of(TENSOR, u32(2**32 - 1, 2**30, 4)),  # 2**64 bytes and a few: 0 in 64 bits
        body_of(STRETCHED, u32(2**32 - 1, 8), bytes(8)),
        body_of(stuffed(b"\x08", b"\x08\x00")),
        body_of(stuffed(b"\x08", b"\x18\x00")),
        pytest.param(body_of(stuffed(b"\x08", b"\x06\x00")), marks=pytest.mark.full),
        pytest.param(body_of(stuffed(b"\x06", b"\x00\x08\x00")), marks=pytest.mark.full),
        body_of(stuffed(b"\x06\x01\x06", b"\x00")),
        pytest.param(body_of(stuffed(b"\x01\x00\x00", b"\x00\x08\x00")), marks=pytest.mark.full),
        pytest.param(
            body_of(stuffed(b"\x08", b"\x08\x01" * 63 + b"\x08\x00")), marks=pytest.mark.full
        ),
        body_of(stuffed(b"\x08", b"\x01\x20\x00\x00")),
        body_of(stuffed(b"\x08", b"\x10\x00\x04bool\x20")),  # 32 dims each
        body_of(stuffed(b"\x08", b"\x11\x00\x0b<U536870911\x00")),
        body_of(b"\x06\x01\x05\xff\xff\xff\xff\x0f"),
        body_of(b"\x06\x01\x03\x80\x80\x3f" + bytes(2**20 - 2**14) + b"\x08\x00"),
        body_of(b"\x18\x00", bytes(4 * MAX_NUMBERS)),
        body_of(bytes(2 * MAX_FORM_BYTES)),
    ],
)
def test_a_refusal_needs_little_memory(body: bytes) -> None:
    batch = join([body] * 4)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBufferError):
            locate(batch, "here")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**16 + 24 * len(body)
