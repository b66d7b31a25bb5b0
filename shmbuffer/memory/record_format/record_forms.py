"""Forms, which describe the structure of items without sizes, and their binary code."""

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
from shmbuffer.memory.record_format.numbers import NumberColumns, compute_columns


@dataclass(frozen=True)
class Form:
    """The structure of items without sizes. Two forms are equal if their codes are equal.

    Attributes:
        code: The binary code, as it is stored in records.
        tree: The tree as nested lists, in the grammar of `grammar`. A leaf is
            ``["chunk", number]``. A batch size is ``["dims", rank]``. The device of a tensordict is
            ``"cpu"`` if it had any device, otherwise None. Do not modify the lists.
        batch_dims: Total number of batch sizes in the tree. In a record, their numbers precede
            those of the chunks.
        chunks: The leaves, in the order of the tree.
    """

    code: bytes
    tree: Any = field(compare=False)
    batch_dims: int = field(compare=False)
    chunks: tuple[Chunk, ...] = field(compare=False)
    columns: NumberColumns = field(compare=False, repr=False)
    """The columns of the numbers. Only `record_format` and the decoders use them."""


def encode_form(tree: Any, chunks: Sequence[Chunk]) -> Form:
    """Creates a form from its tree and chunks.

    Raises:
        ValueError: The tree or a chunk violates a rule or a limit.
        TypeError: The tree does not match the grammar.
    """
    chunks = tuple(chunks)
    if len(chunks) > bounds.MAX_CHUNKS:
        raise ValueError(f"the item has {len(chunks)} leaves, but the limit is {bounds.MAX_CHUNKS}")
    writer = FormWriter(chunks)
    writer.write_node(tree, (), 0)
    if writer.chunk != len(chunks):
        raise ValueError(
            f"{len(chunks)} chunks were passed, but the tree contains {writer.chunk} chunks"
        )
    if len(writer.out) > bounds.MAX_FORM_BYTES:
        raise ValueError(
            f"the form of the item takes {len(writer.out)} bytes, but the limit is"
            f" {bounds.MAX_FORM_BYTES}; use fewer or shorter keys"
        )
    numbers = writer.batch_dims + sum(chunk.numbers for chunk in chunks)
    if numbers > bounds.MAX_NUMBERS:
        raise ValueError(f"the item has {numbers} sizes, but the limit is {bounds.MAX_NUMBERS}")
    columns = compute_columns(writer.batch_dims, chunks, writer.equal)
    return Form(bytes(writer.out), tree, writer.batch_dims, chunks, columns)


def parse_checked_form(code: bytes, counts: Ints) -> Form:
    """Parses the form of n records, and checks that their numbers match it.

    Args:
        code: The code of the form.
        counts: Number of numbers in each record, int64[n].

    Raises:
        ImpossibleError: The code is invalid, or a record has a wrong number of numbers.
    """
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
    """Parses the code of a form.

    The result is encoded again and compared with the code. All rules are therefore checked by
    `FormWriter`, and each form has only one valid code.
    """
    if len(code) > bounds.MAX_FORM_BYTES:
        raise ValueError(f"it has {len(code)} bytes, but the limit is {bounds.MAX_FORM_BYTES}")
    reader = _Reader(code)
    try:
        form = encode_form(reader.read_tree(), reader.chunks)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if form.code != code:
        raise ValueError("its code is not the shortest one for this form")
    return form


_parsed = lru_cache(256)(_parse)
_parsed_large = lru_cache(8)(_parse)


def parse_form(code: bytes) -> Form:
    """Parses the code of a form. Recent results are cached.

    Raises:
        ValueError: The code is invalid.
    """
    return (_parsed if len(code) <= bounds.SMALL_BYTES else _parsed_large)(code)


class _Reader:
    """Reads the tree and the chunks from the code of a form.

    It only checks what is necessary to read on. `FormWriter` checks the other rules.
    """

    def __init__(self, code: bytes) -> None:
        self.chunks: list[Chunk] = []
        self._code = code
        self._at = 0
        self._parts = 0

    def read_tree(self) -> Any:
        """Reads the whole code and returns its tree. The chunks are then in ``chunks``."""
        tree = self._read_node(0)
        if self._at != len(self._code):
            raise ValueError(f"{len(self._code) - self._at} bytes follow its end")
        return tree

    def _read_node(self, depth: int) -> Any:
        """Reads a node and all nodes below it. ``depth`` is the number of nodes above it."""
        self._count_part(depth)
        at = self._at
        tag = self._read_u8()
        if 0 <= tag - grammar.CHUNK_TAG < len(KINDS):
            return self._read_chunk(KINDS[tag - grammar.CHUNK_TAG])
        kind = grammar.NAMES.get(tag)
        if kind is None:
            raise ValueError(
                f"byte {at} of {len(self._code)} is {tag:#04x}, which is not a known tag"
            )
        rank = self._read_u8() if kind in grammar.BATCHED else 0
        about: tuple[Any, ...] = ()
        if kind == "tensordict":
            about = self._read_marks(rank)
        elif kind in grammar.CLASSES:
            about = (self._read_text(),)
        elif kind in grammar.STACKS:
            about = (self._read_u8(),)
        entries = []
        for _ in range(1 if kind in grammar.SINGLE else self._read_count()):
            key = None
            if kind in grammar.KEYED:
                key = self._read_text() if kind == "tensordict" else self._read_key(depth + 1)
            entries.append((key, self._read_node(depth + 1)))
        return join(kind, ["dims", rank], about, entries)

    def _read_chunk(self, kind: str) -> Any:
        """Reads a leaf, adds its chunk to ``chunks``, and returns the tree of the leaf."""
        flags = self._read_u8()
        codec = Codec(flags & 3)
        if flags & ~(3 | grammar.PLANAR):
            raise ValueError(f"the flags {flags:#04x} of a chunk are not known")
        dtype = self._read_text() if kind in DTYPED else ""
        if (rank := rank_of(kind)) is None:
            rank = self._read_u8()
        joined = self._read_count() if codec is Codec.JOINED else None
        planar = bool(flags & grammar.PLANAR)
        self.chunks.append(Chunk(kind, dtype, rank, codec, joined, planar))
        if len(self.chunks) > bounds.MAX_CHUNKS:
            raise ValueError(f"it has more than {bounds.MAX_CHUNKS} chunks")
        return ["chunk", len(self.chunks) - 1]

    def _read_marks(self, rank: int) -> tuple[str | None, list[str | None] | None]:
        """Reads the marks of a tensordict with ``rank`` batch dims.

        Returns:
            The device, ``"cpu"`` or None, and the names of the dims, or None if they have no names.
        """
        marks = self._read_u8()
        if marks & ~(grammar.NAMED | grammar.ON_DEVICE):
            raise ValueError(f"the marks {marks:#04x} of a tensordict are not known")
        names = [
            self._read_text() if self._read_bit() else None
            for _ in range(rank if marks & grammar.NAMED else 0)
        ]
        return (
            "cpu" if marks & grammar.ON_DEVICE else None,
            names if marks & grammar.NAMED else None,
        )

    def _read_key(self, depth: int) -> Any:
        """Reads the key of an entry in a dict. A tuple is returned as a list, as in JSON."""
        self._count_part(depth)
        match self._read_u8():
            case 0:
                return None
            case 1 | 2 as value:
                return value == 2
            case 3:
                return int.from_bytes(self._read_bytes(self._read_count()), "little", signed=True)
            case 4:
                return struct.unpack("<d", self._read_bytes(8))[0]
            case 5:
                return self._read_text()
            case 6:
                return [self._read_key(depth + 1) for _ in range(self._read_count())]
            case kind:
                raise ValueError(f"{kind:#04x} is not a kind of key")

    def _count_part(self, depth: int) -> None:
        """Counts a node or key. Raises ValueError if there are too many or nested too deep."""
        self._parts += 1
        if depth > bounds.MAX_DEPTH or self._parts > bounds.MAX_PARTS:
            raise ValueError(
                f"it is nested more than {bounds.MAX_DEPTH} levels deep, or has more than"
                f" {bounds.MAX_PARTS} nodes and keys"
            )

    def _read_text(self) -> str:
        """Reads a string in UTF-8, after its length."""
        return self._read_bytes(self._read_count()).decode("utf-8", "surrogatepass")

    def _read_count(self) -> int:
        """Reads an unsigned integer in the variable-length code LEB128."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self._read_u8()
            value |= (byte & 127) << shift
            if byte < 128:
                break
        return value

    def _read_bit(self) -> int:
        """Reads a byte that must be 0 or 1."""
        if (bit := self._read_u8()) > 1:
            raise ValueError(f"a flag is {bit:#04x}, but must be 0 or 1")
        return bit

    def _read_u8(self) -> int:
        """Reads a byte as an unsigned integer."""
        return self._read_bytes(1)[0]

    def _read_bytes(self, count: int) -> bytes:
        """Reads ``count`` bytes. Raises ValueError if the code ends before."""
        at = self._at
        if count > len(self._code) - at:
            raise ValueError(
                f"it ends at byte {len(self._code)}, but {at + count} bytes were expected"
            )
        self._at += count
        return self._code[at : at + count]
