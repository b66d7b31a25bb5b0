"""Encodes a tree as the code of a form, and checks its rules."""

from __future__ import annotations

import math
import struct
from typing import Any

from shmbuffer.memory.record_format import bounds, grammar
from shmbuffer.memory.record_format.chunks import (
    DTYPED,
    KINDS,
    Chunk,
    Codec,
    rank_of,
    require_possible,
)
from shmbuffer.memory.record_format.grammar import split
from shmbuffer.memory.record_format.numbers import Place

_STACKED = frozenset({"tensordict", "tensorclass", "lazy"})
_OBJECTS = frozenset({"objects", "object"})
_HOLDS = {
    "tensordict": (_STACKED | _OBJECTS | {"tensor"}, "an entry of a tensordict"),
    "tensorclass": (_STACKED, "what a tensorclass holds"),
    "lazy": (_STACKED, "stacked as lazy"),
    "objects": (_OBJECTS, "stacked as objects"),
}
"""For each container, the kinds of nodes that it may contain, and their name for messages."""


class FormWriter:
    """Writes a tree, checks it, and records which sizes must be equal."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self.out = bytearray()
        self.chunk = 0
        self.batch_dims = 0
        self.equal: list[tuple[Place, Place]] = []
        self._chunks = chunks
        self._parts = 0

    def node(self, tree: Any, lead: tuple[int, ...], depth: int) -> int:
        """Writes a node whose shape starts with ``lead``; returns its number of batch dims."""
        self._part(depth)
        match tree:
            case ["chunk", int(number)]:
                self._leaf(number, lead)
                return 0
        kind, batch, about, keys, parts = split(tree)
        self.out.append(grammar.TAGS[kind])
        rank, inner = 0, tuple[int, ...]()
        match kind, batch, about:
            case "tensordict", ["dims", int(rank)], [None | "cpu" as device, names]:
                inner = self._batch(rank, lead)
                self._marks(device, names, rank)
            case "object", ["dims", int(rank)], _:
                self._batch(rank, lead)
            case "tensorclass" | "namedtuple", _, [str(name)]:
                self._text(name)
                inner = lead if kind == "tensorclass" else ()
            case "lazy" | "objects", _, [int(dim)]:
                inner = self._stack(dim, len(parts), lead)
            case "dict" | "ordered" | "list" | "tuple", _, _:
                pass
            case _:
                raise TypeError(f"{tree!r:.60} is not a form that a record can have")
        if kind not in grammar.SINGLE:
            self._count(len(parts))
        known: set[Any] = set()
        ranks = set()
        for at, part in enumerate(parts):
            if kind in grammar.KEYED:
                self._entry(keys[at], kind, known, depth + 1)
            if kind in _HOLDS:
                self._require_kind(part, *_HOLDS[kind])
            ranks.add(self.node(part, inner, depth + 1))
        if kind in grammar.STACKS:
            rank = ranks.pop() if ranks else 0
            if ranks or not max(about[0], len(inner)) <= rank < bounds.MAX_RANK:
                raise ValueError(f"the parts stacked along dim {about[0]} have too few dims")
            return rank + 1
        return ranks.pop() if kind == "tensorclass" else rank

    def _require_kind(self, tree: Any, kinds: frozenset[str], role: str) -> None:
        """Raises TypeError unless a node has one of these kinds."""
        match tree:
            case ["chunk", int(number)] if 0 <= number < len(self._chunks):
                kind = self._chunks[number].kind
            case [str(kind), *_]:
                pass
            case _:
                raise TypeError(f"{tree!r:.60} is not a form that a record can have")
        if kind not in kinds:
            raise TypeError(f"{tree!r:.60} ({kind}) cannot be {role}")

    def _leaf(self, number: int, lead: tuple[int, ...]) -> None:
        """Writes a leaf, and checks its chunk."""
        if number != self.chunk or number >= len(self._chunks):
            raise ValueError(
                f"chunk {number} is at the place of chunk {self.chunk} of {len(self._chunks)}"
            )
        chunk = self._chunks[number]
        self.chunk += 1
        require_possible(chunk, number)
        if chunk.joined is not None:
            self._require_head(number, chunk.joined)
        if chunk.kind == "tensor":
            if chunk.rank < len(lead):
                raise ValueError(
                    f"chunk {number} has {chunk.rank} dims in a tensordict of {len(lead)}"
                )
            self.equal += [
                (("batch", expected, 0), ("dim", number, dim)) for dim, expected in enumerate(lead)
            ]
        kind = KINDS.index(chunk.kind)
        flags = chunk.codec | grammar.PLANAR * chunk.planar
        self.out += bytes((grammar.CHUNK_TAG + kind, flags))
        if chunk.kind in DTYPED:
            self._text(chunk.dtype)
        if rank_of(chunk.kind) is None:
            self.out.append(chunk.rank)
        if chunk.joined is not None:
            self._count(chunk.joined)

    def _require_head(self, number: int, head: int) -> None:
        """Raises ValueError if no chunk can be joined to this one."""
        one = self._chunks[head] if 0 <= head < number else None
        if one is None or one.codec is not Codec.ZSTD:
            raise ValueError(
                f"chunk {number} cannot be joined to chunk {head}, which is not an earlier chunk "
                "compressed with zstd"
            )

    def _stack(self, dim: int, parts: int, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Writes a stack dim; returns the batch dims of the stacked parts."""
        if not 0 <= dim <= bounds.MAX_RANK:
            raise ValueError(f"the stack dim {dim} is not between 0 and {bounds.MAX_RANK}")
        self.out.append(dim)
        if dim >= len(lead):
            return lead
        self.equal.append((("value", parts, 0), ("batch", lead[dim], 0)))
        return lead[:dim] + lead[dim + 1 :]

    def _batch(self, rank: int, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Writes batch dims; returns their columns."""
        if not len(lead) <= rank <= bounds.MAX_RANK:
            raise ValueError(f"{rank} batch dims are not between {len(lead)} and {bounds.MAX_RANK}")
        self.out.append(rank)
        columns = tuple(range(self.batch_dims, self.batch_dims + rank))
        self.batch_dims += rank
        self.equal += [
            (("batch", expected, 0), ("batch", column, 0))
            for expected, column in zip(lead, columns, strict=False)
        ]
        return columns

    def _marks(self, device: str | None, names: Any, rank: int) -> None:
        """Writes the marks of a tensordict, and the names of its dims."""
        self.out.append(
            (names is not None) * grammar.NAMED | (device is not None) * grammar.ON_DEVICE
        )
        if names is None:
            return
        if not isinstance(names, (list, tuple)) or len(names) != rank:
            raise ValueError(f"the names {names!r:.60} are not those of {rank} dims")
        for name in names:
            self.out.append(name is not None)
            if name is not None:
                if not isinstance(name, str):
                    raise TypeError(f"the name {name!r:.60} of a dim is not text")
                self._part(0)
                self._text(name)

    def _key(self, key: Any, depth: int) -> Any:
        """Writes a key, and returns it as it is in a dict."""
        self._part(depth)
        if key is None or isinstance(key, bool):
            self.out.append(0 if key is None else 1 + key)
        elif isinstance(key, int):
            if key.bit_length() > bounds.MAX_INT_KEY_BITS:
                raise ValueError(
                    f"a key is an int of {key.bit_length()} bits, "
                    f"{bounds.MAX_INT_KEY_BITS} are the limit"
                )
            self.out.append(3)
            self._bytes(_int_bytes(key))
        elif isinstance(key, float):
            if not math.isfinite(key):
                raise ValueError(f"the key {key} is not finite")
            self.out += struct.pack("<Bd", 4, key)
        elif isinstance(key, str):
            self.out.append(5)
            self._text(key)
        elif isinstance(key, list):
            self.out.append(6)
            self._count(len(key))
            return tuple([self._key(part, depth + 1) for part in key])
        else:
            raise TypeError(f"the key {key!r:.60} is not text, a number, None or a tuple of them")
        return key

    def _entry(self, key: Any, kind: str, known: set[Any], depth: int) -> None:
        """Writes the key of an entry, which must be unique."""
        if kind != "tensordict":
            value = self._key(key, depth)
        elif isinstance(key, str):
            self._text(value := key)
        else:
            raise TypeError(f"the key {key!r:.60} of a tensordict is not text")
        if value in known:
            raise ValueError(f"the key {key!r:.60} occurs twice")
        known.add(value)

    def _part(self, depth: int) -> None:
        """Counts a part, and checks the limits of depth and number."""
        if depth > bounds.MAX_DEPTH:
            raise ValueError(f"the item is nested deeper than {bounds.MAX_DEPTH}")
        self._parts += 1
        if self._parts > bounds.MAX_PARTS:
            raise ValueError(f"the item has more than {bounds.MAX_PARTS} parts")

    def _text(self, text: str) -> None:
        self._bytes(text.encode("utf-8", "surrogatepass"))

    def _bytes(self, data: bytes) -> None:
        self._count(len(data))
        self.out += data

    def _count(self, count: int) -> None:
        """Writes a count in the variable-length code of LEB128."""
        if not 0 <= count <= bounds.MAX_U32:
            raise ValueError(f"the count {count} does not fit into 32 bits")
        while count > 127:
            self.out.append(count & 127 | 128)
            count >>= 7
        self.out.append(count)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "little", signed=True)
