"""What items of one kind are made of, and its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.bodies.chunks import Chunk
from shmbuffer.memory.bodies.form_reader import FormReader
from shmbuffer.memory.bodies.form_writer import FormWriter
from shmbuffer.memory.bodies.impossible import ImpossibleError, refuse
from shmbuffer.memory.bodies.limits import MAX_CHUNKS, MAX_FORM_BYTES, MAX_NUMBERS, SMALL_BYTES
from shmbuffer.memory.bodies.numbers import Columns, columns_of

WHAT_TO_DO = "it was damaged or changed from outside: restore the buffer from a copy"


@dataclass(frozen=True)
class Form:
    """What items of one kind are made of. Two are equal if their code is.

    Attributes:
        code: the bytes in the record.
        tree: nested lists, as in `packing`, where a leaf is ``["chunk", number]``
            and batch sizes are ``["dims", rank]``: their numbers come before those of the chunks.
            The device of a tensordict is ``"cpu"`` where it had any, else None. Not to be changed.
        batch_dims: how many numbers belong to batch sizes, in the order of the tree.
        chunks: the leaves in order.
    """

    code: bytes
    tree: Any = field(compare=False)
    batch_dims: int = field(compare=False)
    chunks: tuple[Chunk, ...] = field(compare=False)
    columns: Columns = field(compare=False, repr=False)
    """Where its numbers are; for this package."""


def encode_form(tree: Any, chunks: Sequence[Chunk]) -> Form:
    """A form from its tree and leaves.

    Args:
        tree: as `Form.tree`. Keys of dicts are as `labels.to_json` gives them.
        chunks: those that the tree has, each once, in order.

    Raises:
        TypeError: something in the tree that the grammar does not have.
        ValueError: deeper, or larger, than a form may be; or what cannot be: a chunk of another
            itemsize than its dtype, an entry of a tensordict with fewer dims than the tensordict.
    """
    chunks = tuple(chunks)
    if len(chunks) > MAX_CHUNKS:
        raise ValueError(f"the item has {len(chunks)} leaves, {MAX_CHUNKS} are the limit")
    writer = FormWriter(chunks)
    writer.node(tree, (), 0)
    if writer.chunk != len(chunks):
        raise ValueError(f"{len(chunks)} chunks were given, the tree has {writer.chunk} of them")
    if len(writer.out) > MAX_FORM_BYTES:
        raise ValueError(
            f"what the item is made of takes {len(writer.out)} bytes to say, {MAX_FORM_BYTES} are "
            "the limit: it has too many keys, or too long ones"
        )
    numbers = writer.batch_dims + sum(chunk.numbers for chunk in chunks)
    if numbers > MAX_NUMBERS:
        raise ValueError(f"the item has {numbers} sizes, {MAX_NUMBERS} are the limit")
    columns = columns_of(writer.batch_dims, chunks, writer.equal)
    return Form(bytes(writer.out), tree, writer.batch_dims, chunks, columns)


def parse_form(code: bytes, where: str) -> Form:
    """The form that these bytes say. Parsed forms are kept, a bounded number of them.

    Raises:
        CorruptBufferError: they are none.
    """
    try:
        return _kept(code)
    except ValueError as error:
        raise CorruptBufferError(
            f"{where}: the form of a record cannot be read: {error}; {WHAT_TO_DO}",
            path=where,
            found=code[:64],
        ) from None


def form_of(code: bytes, told: NDArray[np.int64]) -> Form:
    """The form of records whose code is this, and which have so many numbers each.

    Raises:
        ImpossibleError: it is none, or has another number of them.
    """
    try:
        form = _kept(code)
    except ValueError as error:
        raise ImpossibleError(0, f"its form cannot be read: {error}") from None
    numbers = form.columns.numbers
    refuse(told != numbers, lambda row: f"it has {told[row]} numbers, its form has {numbers}")
    return form


def _parse(code: bytes) -> Form:
    """What was read is written again, so that one set of rules holds for both ways."""
    if len(code) > MAX_FORM_BYTES:
        raise ValueError(f"it has {len(code)} bytes, {MAX_FORM_BYTES} are the limit")
    reader = FormReader(code)
    try:
        form = encode_form(reader.whole(), reader.chunks)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if form.code != code:
        raise ValueError("there is a shorter way to write what it says")
    return form


_parsed = lru_cache(256)(_parse)
_parsed_large = lru_cache(8)(_parse)


def _kept(code: bytes) -> Form:
    """The form that these bytes say, if they were parsed lately the same object."""
    return (_parsed if len(code) <= SMALL_BYTES else _parsed_large)(code)
