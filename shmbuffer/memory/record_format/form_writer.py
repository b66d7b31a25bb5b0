"""Encodes the tree of a form as binary code, and checks that the tree is valid."""

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
    "tensorclass": (_STACKED, "the content of a tensorclass"),
    "lazy": (_STACKED, "an element of a lazy stack"),
    "objects": (_OBJECTS, "an element of a NonTensorStack"),
}
"""The kinds of nodes that a container can contain, and a description of them for messages."""


class FormWriter:
    """Encodes a tree, checks it, and collects the sizes that must be equal in every record."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self.out = bytearray()  # the code
        self.chunk = 0  # number of chunks that were written
        self.batch_dims = 0  # number of batch sizes that were written
        self.equal: list[tuple[Place, Place]] = []  # pairs of sizes that must be equal
        self._chunks = chunks
        self._parts = 0

    def write_node(self, tree: Any, lead: tuple[int, ...], depth: int) -> int:
        """Writes a node and all nodes below it.

        Args:
            tree: The tree of the node.
            lead: Columns of the batch sizes of the container, with which the shapes in it begin.
            depth: Number of nodes above this node.

        Returns:
            The number of batch dims of the node.
        """
        self._count_part(depth)
        match tree:
            case ["chunk", int(number)]:
                self._write_leaf(number, lead)
                return 0
        kind, batch, about, keys, parts = split(tree)
        self.out.append(grammar.TAGS[kind])
        rank, inner = 0, tuple[int, ...]()
        match kind, batch, about:
            case "tensordict", ["dims", int(rank)], [None | "cpu" as device, names]:
                inner = self._write_batch(rank, lead)
                self._write_marks(device, names, rank)
            case "object", ["dims", int(rank)], _:
                self._write_batch(rank, lead)
            case "tensorclass" | "namedtuple", _, [str(name)]:
                self._write_text(name)
                inner = lead if kind == "tensorclass" else ()
            case "lazy" | "objects", _, [int(dim)]:
                inner = self._write_stack(dim, len(parts), lead)
            case "dict" | "ordered" | "list" | "tuple", _, _:
                pass
            case _:
                raise TypeError(f"{tree!r:.60} is not a valid form of an item")
        if kind not in grammar.SINGLE:
            self._write_count(len(parts))
        known: set[Any] = set()
        ranks = set()
        for at, part in enumerate(parts):
            if kind in grammar.KEYED:
                self._write_entry_key(keys[at], kind, known, depth + 1)
            if kind in _HOLDS:
                self._require_kind(part, *_HOLDS[kind])
            ranks.add(self.write_node(part, inner, depth + 1))
        if kind in grammar.STACKS:
            rank = ranks.pop() if ranks else 0
            if ranks or not max(about[0], len(inner)) <= rank < bounds.MAX_RANK:
                raise ValueError(
                    f"the elements of a stack along dim {about[0]} must have the same number of"
                    f" batch dims, at least {max(about[0], len(inner))} and less than"
                    f" {bounds.MAX_RANK}"
                )
            return rank + 1
        return ranks.pop() if kind == "tensorclass" else rank

    def _require_kind(self, tree: Any, kinds: frozenset[str], role: str) -> None:
        """Raises TypeError unless a node has one of these kinds. ``role`` describes the node."""
        match tree:
            case ["chunk", int(number)] if 0 <= number < len(self._chunks):
                kind = self._chunks[number].kind
            case [str(kind), *_]:
                pass
            case _:
                raise TypeError(f"{tree!r:.60} is not a valid form of an item")
        if kind not in kinds:
            raise TypeError(f"{tree!r:.60} ({kind}) cannot be {role}")

    def _write_leaf(self, number: int, lead: tuple[int, ...]) -> None:
        """Writes a leaf, and checks its chunk. ``lead`` is described in `write_node`."""
        if number != self.chunk or number >= len(self._chunks):
            raise ValueError(
                f"the tree has chunk {number} in the position of chunk {self.chunk}; it must"
                f" contain each of the {len(self._chunks)} chunks once, in order"
            )
        chunk = self._chunks[number]
        self.chunk += 1
        require_possible(chunk, number)
        if chunk.joined is not None:
            self._require_joinable(number, chunk.joined)
        if chunk.kind == "tensor":
            if chunk.rank < len(lead):
                raise ValueError(
                    f"chunk {number} has {chunk.rank} dims, but is in a tensordict with"
                    f" {len(lead)} batch dims"
                )
            self.equal += [
                (("batch", expected, 0), ("dim", number, dim)) for dim, expected in enumerate(lead)
            ]
        kind = KINDS.index(chunk.kind)
        flags = chunk.codec | grammar.PLANAR * chunk.planar
        self.out += bytes((grammar.CHUNK_TAG + kind, flags))
        if chunk.kind in DTYPED:
            self._write_text(chunk.dtype)
        if rank_of(chunk.kind) is None:
            self.out.append(chunk.rank)
        if chunk.joined is not None:
            self._write_count(chunk.joined)

    def _require_joinable(self, number: int, head: int) -> None:
        """Raises ValueError if the chunk ``number`` cannot be joined to the chunk ``head``."""
        base = self._chunks[head] if 0 <= head < number else None
        if base is None or base.codec is not Codec.ZSTD:
            raise ValueError(
                f"chunk {number} cannot be joined to chunk {head}, which is not an earlier chunk "
                "compressed with zstd"
            )

    def _write_stack(self, dim: int, parts: int, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Writes a stack dim, and returns the columns of the elements' batch sizes.

        Args:
            dim: The stack dim.
            parts: Number of elements of the stack.
            lead: Columns of the stack's leading batch sizes.
        """
        if not 0 <= dim <= bounds.MAX_RANK:
            raise ValueError(f"a stack dim must be from 0 to {bounds.MAX_RANK}, but is {dim}")
        self.out.append(dim)
        if dim >= len(lead):
            return lead
        self.equal.append((("value", parts, 0), ("batch", lead[dim], 0)))
        return lead[:dim] + lead[dim + 1 :]

    def _write_batch(self, rank: int, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Writes the number of batch dims, and returns the columns of the batch sizes."""
        if not len(lead) <= rank <= bounds.MAX_RANK:
            raise ValueError(
                f"the number of batch dims must be from {len(lead)} to {bounds.MAX_RANK}, but is"
                f" {rank}"
            )
        self.out.append(rank)
        columns = tuple(range(self.batch_dims, self.batch_dims + rank))
        self.batch_dims += rank
        self.equal += [
            (("batch", expected, 0), ("batch", column, 0))
            for expected, column in zip(lead, columns, strict=False)
        ]
        return columns

    def _write_marks(self, device: str | None, names: Any, rank: int) -> None:
        """Writes the marks of a tensordict and the names of its dims, if it has names."""
        self.out.append(
            (names is not None) * grammar.NAMED | (device is not None) * grammar.ON_DEVICE
        )
        if names is None:
            return
        if not isinstance(names, (list, tuple)) or len(names) != rank:
            raise ValueError(
                f"the names of {rank} dims must be a list with {rank} entries, but are"
                f" {names!r:.60}"
            )
        for name in names:
            self.out.append(name is not None)
            if name is not None:
                if not isinstance(name, str):
                    raise TypeError(f"the name of a dim must be a string, but is {name!r:.60}")
                self._count_part(0)
                self._write_text(name)

    def _write_key(self, key: Any, depth: int) -> Any:
        """Writes a key, and returns it in hashable form: a list becomes a tuple."""
        self._count_part(depth)
        if key is None or isinstance(key, bool):
            self.out.append(0 if key is None else 1 + key)
        elif isinstance(key, int):
            if key.bit_length() > bounds.MAX_INT_KEY_BITS:
                raise ValueError(
                    f"a key is an int of {key.bit_length()} bits, but the limit is"
                    f" {bounds.MAX_INT_KEY_BITS}"
                )
            self.out.append(3)
            self._write_bytes(_encode_int(key))
        elif isinstance(key, float):
            if not math.isfinite(key):
                raise ValueError(f"the key {key} is not finite")
            self.out += struct.pack("<Bd", 4, key)
        elif isinstance(key, str):
            self.out.append(5)
            self._write_text(key)
        elif isinstance(key, list):
            self.out.append(6)
            self._write_count(len(key))
            return tuple([self._write_key(part, depth + 1) for part in key])
        else:
            raise TypeError(
                f"a key must be a string, a number, None or a tuple of these, but is {key!r:.60}"
            )
        return key

    def _write_entry_key(self, key: Any, kind: str, known: set[Any], depth: int) -> None:
        """Writes the key of a container's entry. Raises ValueError if it is in ``known``."""
        if kind != "tensordict":
            value = self._write_key(key, depth)
        elif isinstance(key, str):
            self._write_text(value := key)
        else:
            raise TypeError(f"the key of a tensordict must be a string, but is {key!r:.60}")
        if value in known:
            raise ValueError(f"the key {key!r:.60} occurs twice")
        known.add(value)

    def _count_part(self, depth: int) -> None:
        """Counts a node, key or name. Raises ValueError if there are too many or nested too deep.

        Args:
            depth: Number of nodes above it.
        """
        if depth > bounds.MAX_DEPTH:
            raise ValueError(f"the item is nested deeper than {bounds.MAX_DEPTH} levels")
        self._parts += 1
        if self._parts > bounds.MAX_PARTS:
            raise ValueError(f"the item has more than {bounds.MAX_PARTS} nodes, keys and names")

    def _write_text(self, text: str) -> None:
        """Writes a string in UTF-8, after its length."""
        self._write_bytes(text.encode("utf-8", "surrogatepass"))

    def _write_bytes(self, data: bytes) -> None:
        """Writes bytes after their number."""
        self._write_count(len(data))
        self.out += data

    def _write_count(self, count: int) -> None:
        """Writes an unsigned integer in the variable-length code LEB128."""
        if not 0 <= count <= bounds.MAX_U32:
            raise ValueError(f"the count {count} does not fit into 32 bits")
        while count > 127:
            self.out.append(count & 127 | 128)
            count >>= 7
        self.out.append(count)


def _encode_int(value: int) -> bytes:
    """Returns an integer in two's complement, little-endian, with as few bytes as possible."""
    return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "little", signed=True)
