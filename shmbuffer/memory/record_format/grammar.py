"""The grammar of trees: what an item is made of; and the tags, flags and marks of its binary code.

A tree has leaves and containers. Leaves are for those who use it to say: ``["chunk", number]`` in a
record. Containers are these:

    ["tensordict", batch, device, names, [[key, tree], ...]]
    ["tensorclass", class, tree]                  the tree of its TensorDict
    ["lazy" | "objects", stack_dim, [tree, ...]]  a lazy stack; one of NonTensorData
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
"""Containers. Chunks follow, by their kind."""
NAMES = {tag: name for name, tag in TAGS.items()}
CHUNK_TAG = 0x10
# In the flags of a chunk, beside its codec; in the marks of a tensordict.
PLANAR = 8
NAMED, ON_DEVICE = 1, 2

BATCHED = ("tensordict", "object")
SINGLE = ("tensorclass", "object")
DICTS = ("dict", "ordered")
KEYED = ("tensordict", *DICTS)
CLASSES = ("tensorclass", "namedtuple")
STACKS = ("lazy", "objects")
UNNAMED = (*SINGLE, *STACKS)
"""Containers whose entries have no path of their own."""
_ABOUT = {"tensordict": 2, **dict.fromkeys((*CLASSES, *STACKS), 1)}


class Container(NamedTuple):
    """A tree of a container, taken apart by one level."""

    kind: str
    batch: Any
    about: list[Any]
    keys: list[Any]
    """As the tree has them; none where what is in it has no names."""
    parts: list[Any]


def join(kind: str, batch: Any, about: Iterable[Any], held: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns the tree of a container, from its keys with the trees under them."""
    fields = [kind, *([batch] if kind in BATCHED else ()), *about]
    if kind in KEYED:
        return [*fields, list(map(list, held))]
    trees = [tree for _, tree in held]
    return [*fields, *trees] if kind in SINGLE else [*fields, trees]


def split(tree: Any) -> Container:
    """Returns a container, taken apart by one level."""
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
    raise TypeError(f"{tree!r:.60} is not a form that a record may have")
