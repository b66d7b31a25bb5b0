"""The leaves of a form: what a chunk is, and which there can be."""

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
"""In the order of their tags."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?")


class Codec(IntEnum):
    """How the bytes of a chunk are stored."""

    RAW = 0
    ZSTD = 1
    OWN = 2
    """By the user's ``compression_fn``."""
    JOINED = 3
    """In the zstd frame of a chunk before it, behind what is there already."""


@dataclass(frozen=True)
class Chunk:
    """A leaf of a form: what its numbers and its piece mean."""

    # ``tensor``, ``array`` (numpy), ``number`` (numpy scalar), ``bytes``, ``str``, ``int``,
    # ``float``, ``bool`` or ``none``
    kind: str
    # torch's name (``float32``) of a tensor, numpy's (``<f4``) of an array or number; else empty
    dtype: str = ""
    rank: int = 0  # how many dims it has; text, bytes and integers have one
    codec: Codec = Codec.RAW
    joined: int | None = None  # the chunk in whose frame its bytes are; None: its bytes are its own
    planar: bool = False  # it is compressed with the last dim first, one plane behind the other

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one number; 1 for text, bytes and integers, 0 for None.

        ValueError where there is no such kind or dtype.
        """
        if self.kind in _PLAIN:
            if self.dtype:
                raise ValueError(
                    f"a chunk of the kind {self.kind!r} has no dtype, got {self.dtype!r}"
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
            except (TypeError, ValueError):  # said below
                pass
            else:
                if found.str == self.dtype:
                    return found.itemsize
        raise ValueError(f"{self.dtype!r:.40} is not a dtype of numpy that can be stored")

    @property
    def numbers(self) -> int:
        """How many it has."""
        return self.rank + (self.codec in (Codec.ZSTD, Codec.OWN))

    @property
    def alignment(self) -> int:
        """A raw piece starts at a multiple of it."""
        if self.codec is not Codec.RAW or not self.itemsize:
            return 1
        return min(8, self.itemsize & -self.itemsize)


def rank_of(kind: str) -> int | None:
    """How many dims each chunk of this kind has; None: as many as it says."""
    return None if kind in ("tensor", "array") else _PLAIN.get(kind, (0, 0))[1]


def require_possible(chunk: Chunk, number: int) -> None:
    """ValueError if there is no such chunk."""
    itemsize = chunk.itemsize  # of a kind and dtype that exist
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
