"""The grammar of trees, which describe items, and the tags, flags and marks of their binary code.

A tree has leaves and containers. Each user of the grammar defines its leaves; those of a record are
``["chunk", number]``. The containers are:

    ["tensordict", batch, device, names, [[key, tree], ...]]
    ["tensorclass", class, tree]                  the tree of its TensorDict
    ["lazy" | "objects", stack_dim, [tree, ...]]  a lazy stack; a stack of NonTensorData
    ["object", batch, tree]                       NonTensorData
    ["dict" | "ordered", [[key, tree], ...]]      key as JSON
    ["list" | "tuple", [tree, ...]]
    ["namedtuple", class, [tree, ...]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

TAGS = {
    "tensordict": 0x01,
    "tensorclass": 0x02,
    "lazy": 0x03,
    "objects": 0x04,
    "object": 0x05,
    "dict": 0x06,
    "ordered": 0x07,
    "list": 0x08,
    "tuple": 0x09,
    "namedtuple": 0x0A,
}
"""The tags of containers. The tags of chunks follow, in the order of their kinds."""
NAMES = {tag: name for name, tag in TAGS.items()}
CHUNK_TAG = 0x10
# Flags of a chunk, in addition to its codec; marks of a tensordict.
PLANAR = 8
NAMED, ON_DEVICE = 1, 2

BATCHED = ("tensordict", "object")
SINGLE = ("tensorclass", "object")
DICTS = ("dict", "ordered")
KEYED = ("tensordict", *DICTS)
CLASSES = ("tensorclass", "namedtuple")
STACKS = ("lazy", "objects")
UNNAMED = (*SINGLE, *STACKS)
"""Containers whose entries have no keys of their own."""
_ABOUT = {"tensordict": 2, **dict.fromkeys((*CLASSES, *STACKS), 1)}


class Container(NamedTuple):
    """A container, split into its fields and the trees below it."""

    kind: str
    batch: Any
    about: list[Any]
    keys: list[Any]
    """The keys of the tree; empty if its parts have no keys."""
    parts: list[Any]


def join(kind: str, batch: Any, about: Iterable[Any], held: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns the tree of a container from its keys and the trees under them."""
    fields = [kind, *([batch] if kind in BATCHED else ()), *about]
    if kind in KEYED:
        return [*fields, list(map(list, held))]
    trees = [tree for _, tree in held]
    return [*fields, *trees] if kind in SINGLE else [*fields, trees]


def split(tree: Any) -> Container:
    """Splits the tree of a container into its fields and the trees below it."""
    with suppress(TypeError, ValueError):
        kind, *about, held = tree
        if kind in TAGS and len(about) == (kind in BATCHED) + _ABOUT.get(kind, 0):
            batch = about.pop(0) if kind in BATCHED else ()
            if kind in SINGLE:
                return Container(kind, batch, about, [], [held])
            if kind in KEYED:
                return Container(
                    kind, batch, about, [key for key, _ in held], [one for _, one in held]
                )
            return Container(kind, batch, about, [], list(held))
    raise TypeError(f"{tree!r:.60} is not a form that a record can have")
