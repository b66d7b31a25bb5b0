"""Chunks, which are the leaves of a form, and the rules that they must satisfy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.record_format.bounds import MAX_RANK

DTYPED = ("tensor", "array", "number")
_PLAIN = {"bytes": (1, 1), "str": (1, 1), "int": (1, 1), "float": (8, 0), "bool": (1, 0)}
_PLAIN["none"] = (0, 0)  # itemsize, rank
KINDS = (*DTYPED, *_PLAIN)
"""All kinds, in the order of their tags."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?")


class Codec(IntEnum):
    """How the bytes of a chunk are stored."""

    RAW = 0
    ZSTD = 1
    OWN = 2
    """Compressed by the user's ``compression_fn``."""
    JOINED = 3
    """In the zstd frame of an earlier chunk, after the bytes that are already there."""


@dataclass(frozen=True)
class Chunk:
    """A leaf of a form. It defines the meaning of its numbers and its piece."""

    # ``tensor``, ``array`` (numpy), ``number`` (numpy scalar), ``bytes``, ``str``, ``int``,
    # ``float``, ``bool`` or ``none``
    kind: str
    # torch's name (``float32``) for a tensor, numpy's (``<f4``) for an array or number; else empty
    dtype: str = ""
    rank: int = 0  # the number of dims; text, bytes and integers have one
    codec: Codec = Codec.RAW
    # the chunk whose frame contains its bytes; None: its bytes are its own
    joined: int | None = None
    planar: bool = False  # it is compressed with the last dim first, one plane after the other

    @cached_property
    def itemsize(self) -> int:
        """The bytes of one number; 1 for text, bytes and integers, 0 for None.

        Raises ValueError if the kind or dtype does not exist.
        """
        if self.kind in _PLAIN:
            if self.dtype:
                raise ValueError(
                    f"a chunk of the kind {self.kind!r} has no dtype, but {self.dtype!r} was given"
                )
            return _PLAIN[self.kind][0]
        if self.kind == "tensor":
            if self.dtype not in DTYPES:
                raise ValueError(f"{self.dtype!r:.40} is not a dtype of torch that can be stored")
            return DTYPES[self.dtype].itemsize
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r:.40} is not one of the chunks {', '.join(KINDS)}")
        if _NUMPY_DTYPE.fullmatch(self.dtype):
            try:
                found = np.dtype(self.dtype)
            except (TypeError, ValueError):  # reported below
                pass
            else:
                if found.str == self.dtype:
                    return found.itemsize
        raise ValueError(f"{self.dtype!r:.40} is not a dtype of numpy that can be stored")

    @property
    def numbers(self) -> int:
        """The number of numbers that the chunk has in the body."""
        return self.rank + (self.codec in (Codec.ZSTD, Codec.OWN))

    @property
    def alignment(self) -> int:
        """The alignment of a raw piece in bytes."""
        if self.codec is not Codec.RAW or not self.itemsize:
            return 1
        return min(8, self.itemsize & -self.itemsize)


def rank_of(kind: str) -> int | None:
    """Returns the number of dims of chunks of this kind; None if each chunk has its own."""
    return None if kind in ("tensor", "array") else _PLAIN.get(kind, (0, 0))[1]


def require_possible(chunk: Chunk, number: int) -> None:
    """Raises ValueError if no such chunk can exist."""
    itemsize = chunk.itemsize  # raises for an unknown kind or dtype
    rank = rank_of(chunk.kind)
    least, most = (0, MAX_RANK) if rank is None else (rank, rank)
    if not least <= chunk.rank <= most:
        raise ValueError(
            f"chunk {number} ({chunk.kind}) has {chunk.rank} dims, not {least} to {most}"
        )
    if chunk.planar and not (
        itemsize == 1
        and chunk.rank > 1
        and chunk.kind in ("tensor", "array")
        and chunk.codec in (Codec.ZSTD, Codec.JOINED)
    ):
        raise ValueError(
            f"chunk {number} ({chunk.kind} {chunk.dtype}) cannot be planar: planes are of bytes, "
            "along the last of several dims, and compressed with zstd"
        )
    if chunk.codec not in tuple(Codec):
        raise ValueError(f"chunk {number} has the codec {chunk.codec!r}, which does not exist")
    if (chunk.joined is None) is (chunk.codec is Codec.JOINED):
        raise ValueError(f"chunk {number} is either joined to another, or has its own codec")
