"""Chunks, which are the leaves of a form, and the checks of their properties."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.record_format.bounds import MAX_RANK

DTYPED = ("tensor", "array", "number")
# The kinds of chunks without a dtype, with the itemsize and the rank of each.
_PLAIN = {"bytes": (1, 1), "str": (1, 1), "int": (1, 1), "float": (8, 0), "bool": (1, 0)}
_PLAIN["none"] = (0, 0)
KINDS = (*DTYPED, *_PLAIN)
"""All kinds of chunks, in the order of their tags."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?")


class Codec(IntEnum):
    """The encoding in which the bytes of a chunk are stored."""

    RAW = 0
    ZSTD = 1
    OWN = 2
    """Compressed by the user's ``compression_fn``."""
    JOINED = 3
    """Stored in the zstd frame of an earlier chunk, after the bytes that the frame contains."""


@dataclass(frozen=True)
class Chunk:
    """A leaf of a form. It defines how the numbers and the piece of this leaf are interpreted."""

    # "tensor", "array" (of NumPy), "number" (scalar of NumPy), "bytes", "str", "int", "float",
    # "bool" or "none"
    kind: str
    # torch's name ("float32") of a tensor's dtype, or NumPy's name ("<f4") of the dtype of an array
    # or number; otherwise empty
    dtype: str = ""
    rank: int = 0  # number of dims; text, bytes and integers have one dim, their length in bytes
    codec: Codec = Codec.RAW
    # number of the chunk whose frame contains the bytes; None if the chunk has its own piece
    joined: int | None = None
    # True if the last dim is moved to the front before compression, so that planes follow each
    # other
    planar: bool = False

    @cached_property
    def itemsize(self) -> int:
        """Size of one element in bytes: 1 for text, bytes and integers, and 0 for None.

        Raises:
            ValueError: The kind or the dtype does not exist.
        """
        if self.kind in _PLAIN:
            if self.dtype:
                raise ValueError(
                    f"a chunk of kind {self.kind!r} must not have a dtype, but has dtype"
                    f" {self.dtype!r}"
                )
            return _PLAIN[self.kind][0]
        if self.kind == "tensor":
            if self.dtype not in DTYPES:
                raise ValueError(f"{self.dtype!r:.40} is not a torch dtype that can be stored")
            return DTYPES[self.dtype].itemsize
        if self.kind not in KINDS:
            raise ValueError(f"the kind {self.kind!r:.40} is not one of {', '.join(KINDS)}")
        if _NUMPY_DTYPE.fullmatch(self.dtype):
            try:
                found = np.dtype(self.dtype)
            except (TypeError, ValueError):  # the error below is raised instead
                pass
            else:
                if found.str == self.dtype:
                    return found.itemsize
        raise ValueError(f"{self.dtype!r:.40} is not a NumPy dtype that can be stored")

    @property
    def numbers(self) -> int:
        """Count of the numbers that a record stores for this chunk.

        These are its dims and, if it has a compressed piece, the size of this piece.
        """
        return self.rank + (self.codec in (Codec.ZSTD, Codec.OWN))

    @property
    def alignment(self) -> int:
        """Alignment of the piece in bytes. It is 1 unless the piece is raw."""
        if self.codec is not Codec.RAW or not self.itemsize:
            return 1
        return min(8, self.itemsize & -self.itemsize)


def rank_of(kind: str) -> int | None:
    """Returns the number of dims of all chunks of a kind, or None if it differs between chunks."""
    return None if kind in ("tensor", "array") else _PLAIN.get(kind, (0, 0))[1]


def require_possible(chunk: Chunk, number: int) -> None:
    """Raises ValueError if the properties of a chunk contradict each other.

    Args:
        chunk: The chunk.
        number: Number of the chunk in its form, for the message.
    """
    itemsize = chunk.itemsize  # raises ValueError if the kind or dtype is unknown
    rank = rank_of(chunk.kind)
    least, most = (0, MAX_RANK) if rank is None else (rank, rank)
    if not least <= chunk.rank <= most:
        raise ValueError(
            f"chunk {number} ({chunk.kind}) must have from {least} to {most} dims, but has"
            f" {chunk.rank}"
        )
    if chunk.planar and not (
        itemsize == 1
        and chunk.rank > 1
        and chunk.kind in ("tensor", "array")
        and chunk.codec in (Codec.ZSTD, Codec.JOINED)
    ):
        raise ValueError(
            f"chunk {number} ({chunk.kind} {chunk.dtype}) cannot be planar: planar chunks have "
            "elements of one byte and at least two dims, and are compressed with zstd"
        )
    if chunk.codec not in tuple(Codec):
        raise ValueError(f"chunk {number} has the codec {chunk.codec!r}, which does not exist")
    if (chunk.joined is None) is (chunk.codec is Codec.JOINED):
        raise ValueError(
            f"chunk {number} must have the codec JOINED if it is joined to another chunk, and only"
            " then"
        )
