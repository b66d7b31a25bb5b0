"""Forms: the structure of items without their numbers, and its binary code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format import bounds, grammar
from shmbuffer.memory.record_format.bounds import ImpossibleError, refuse
from shmbuffer.memory.record_format.chunks import DTYPED, KINDS, Chunk, Codec, rank_of
from shmbuffer.memory.record_format.form_writer import FormWriter
from shmbuffer.memory.record_format.grammar import join
from shmbuffer.memory.record_format.numbers import NumberColumns, columns_of


@dataclass(frozen=True)
class Form:
    """The structure of items, without their numbers. Forms are equal if their codes are.

    Attributes:
        code: The bytes in the record.
        tree: Nested lists, as in `grammar`. A leaf is ``["chunk", number]``, and batch sizes are
            ``["dims", rank]``; their numbers precede those of the chunks. The device of a
            tensordict is ``"cpu"`` if it had any device, else None. Do not modify it.
        batch_dims: The number of batch sizes, in the order of the tree.
        chunks: The leaves in order.
    """

    code: bytes
    tree: Any = field(compare=False)
    batch_dims: int = field(compare=False)
    chunks: tuple[Chunk, ...] = field(compare=False)
    columns: NumberColumns = field(compare=False, repr=False)
    """The places of its numbers, for this package."""


def encode_form(tree: Any, chunks: Sequence[Chunk]) -> Form:
    """Creates a form from its tree and leaves."""
    chunks = tuple(chunks)
    if len(chunks) > bounds.MAX_CHUNKS:
        raise ValueError(
            f"the item has {len(chunks)} leaves, but {bounds.MAX_CHUNKS} are the limit"
        )
    writer = FormWriter(chunks)
    writer.node(tree, (), 0)
    if writer.chunk != len(chunks):
        raise ValueError(f"{len(chunks)} chunks were given, but the tree has {writer.chunk} chunks")
    if len(writer.out) > bounds.MAX_FORM_BYTES:
        raise ValueError(
            f"the form of the item takes {len(writer.out)} bytes, but {bounds.MAX_FORM_BYTES} are "
            "the limit, because it has too many keys or too long ones; shorten them"
        )
    numbers = writer.batch_dims + sum(chunk.numbers for chunk in chunks)
    if numbers > bounds.MAX_NUMBERS:
        raise ValueError(f"the item has {numbers} sizes, but {bounds.MAX_NUMBERS} are the limit")
    columns = columns_of(writer.batch_dims, chunks, writer.equal)
    return Form(bytes(writer.out), tree, writer.batch_dims, chunks, columns)


def form_of(code: bytes, counts: Ints) -> Form:
    """Parses the form of records, and checks how many numbers they have."""
    try:
        form = parse_form(code)
    except ValueError as error:
        raise ImpossibleError(0, f"its form cannot be read: {error}") from None
    numbers = form.columns.numbers
    refuse(
        counts != numbers, lambda row: f"it has {counts[row]} numbers, but its form has {numbers}"
    )
    return form


def _parse(code: bytes) -> Form:
    """Parses a form, then encodes it again, so that reading and writing share one set of rules."""
    if len(code) > bounds.MAX_FORM_BYTES:
        raise ValueError(f"it has {len(code)} bytes, but {bounds.MAX_FORM_BYTES} are the limit")
    reader = _Reader(code)
    try:
        form = encode_form(reader.read_tree(), reader.chunks)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if form.code != code:
        raise ValueError("it is not written in its shortest form")
    return form


_parsed = lru_cache(256)(_parse)
_parsed_large = lru_cache(8)(_parse)


def parse_form(code: bytes) -> Form:
    """Parses the code of a form; returns the same object for code that was parsed recently."""
    return (_parsed if len(code) <= bounds.SMALL_BYTES else _parsed_large)(code)


class _Reader:
    """Reads the tree and the chunks of a form; `FormWriter` checks their rules."""

    def __init__(self, code: bytes) -> None:
        self.chunks: list[Chunk] = []
        self._code = code
        self._at = 0
        self._parts = 0

    def read_tree(self) -> Any:
        """Returns the tree."""
        tree = self._node(0)
        if self._at != len(self._code):
            raise ValueError(f"{len(self._code) - self._at} bytes follow after its end")
        return tree

    def _node(self, depth: int) -> Any:
        """Reads a node and the nodes below it."""
        self._part(depth)
        at = self._at
        tag = self._u8()
        if 0 <= tag - grammar.CHUNK_TAG < len(KINDS):
            return self._chunk(KINDS[tag - grammar.CHUNK_TAG])
        kind = grammar.NAMES.get(tag)
        if kind is None:
            raise ValueError(
                f"byte {at} of {len(self._code)} is {tag:#04x}, which is not a known tag"
            )
        rank = self._u8() if kind in grammar.BATCHED else 0
        about: tuple[Any, ...] = ()
        if kind == "tensordict":
            about = self._marks(rank)
        elif kind in grammar.CLASSES:
            about = (self._text(),)
        elif kind in grammar.STACKS:
            about = (self._u8(),)
        held = []
        for _ in range(1 if kind in grammar.SINGLE else self._count()):
            key = None
            if kind in grammar.KEYED:
                key = self._text() if kind == "tensordict" else self._key(depth + 1)
            held.append((key, self._node(depth + 1)))
        return join(kind, ["dims", rank], about, held)

    def _chunk(self, kind: str) -> Any:
        """Reads a leaf and its chunk."""
        flags = self._u8()
        codec = Codec(flags & 3)
        if flags & ~(3 | grammar.PLANAR):
            raise ValueError(f"the flags {flags:#04x} of a chunk are not known")
        dtype = self._text() if kind in DTYPED else ""
        if (rank := rank_of(kind)) is None:
            rank = self._u8()
        joined = self._count() if codec is Codec.JOINED else None
        planar = bool(flags & grammar.PLANAR)
        self.chunks.append(Chunk(kind, dtype, rank, codec, joined, planar))
        if len(self.chunks) > bounds.MAX_CHUNKS:
            raise ValueError(f"it has more than {bounds.MAX_CHUNKS} chunks")
        return ["chunk", len(self.chunks) - 1]

    def _marks(self, rank: int) -> tuple[str | None, list[str | None] | None]:
        """Reads the marks of a tensordict, and the names of its dims."""
        marks = self._u8()
        if marks & ~(grammar.NAMED | grammar.ON_DEVICE):
            raise ValueError(f"the marks {marks:#04x} of a tensordict are not known")
        names = [
            self._text() if self._bit() else None
            for _ in range(rank if marks & grammar.NAMED else 0)
        ]
        return (
            "cpu" if marks & grammar.ON_DEVICE else None,
            names if marks & grammar.NAMED else None,
        )

    def _key(self, depth: int) -> Any:
        """Reads a key."""
        self._part(depth)
        match self._u8():
            case 0:
                return None
            case 1 | 2 as value:
                return value == 2
            case 3:
                return int.from_bytes(self._bytes(self._count()), "little", signed=True)
            case 4:
                return struct.unpack("<d", self._bytes(8))[0]
            case 5:
                return self._text()
            case 6:
                return [self._key(depth + 1) for _ in range(self._count())]
            case kind:
                raise ValueError(f"{kind:#04x} is not a kind of key")

    def _part(self, depth: int) -> None:
        """Counts a part, and checks the limits of depth and number."""
        self._parts += 1
        if depth > bounds.MAX_DEPTH or self._parts > bounds.MAX_PARTS:
            raise ValueError(
                f"it is nested deeper than {bounds.MAX_DEPTH}, or has over {bounds.MAX_PARTS} parts"
            )

    def _text(self) -> str:
        return self._bytes(self._count()).decode("utf-8", "surrogatepass")

    def _count(self) -> int:
        """Reads a count in the variable-length code of LEB128."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self._u8()
            value |= (byte & 127) << shift
            if byte < 128:
                break
        return value

    def _bit(self) -> int:
        if (bit := self._u8()) > 1:
            raise ValueError(f"a flag is {bit:#04x}, but must be 0 or 1")
        return bit

    def _u8(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        """Reads ``count`` bytes; raises ValueError at the end."""
        at = self._at
        if count > len(self._code) - at:
            raise ValueError(
                f"it ends at byte {len(self._code)}, but {at + count} bytes were expected"
            )
        self._at += count
        return self._code[at : at + count]
