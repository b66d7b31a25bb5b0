"""The grammar of the trees that describe items, and the constants of their binary code.

A tree consists of containers and leaves. Each module that uses the grammar defines its own leaves.
The leaves of a record's form are ``["chunk", number]``. The containers are:

    ["tensordict", batch, device, names, [[key, tree], ...]]
    ["tensorclass", class, tree]                  the tree of its TensorDict
    ["lazy" | "objects", stack_dim, [tree, ...]]  a lazy stack; a NonTensorStack
    ["object", batch, tree]                       NonTensorData
    ["dict" | "ordered", [[key, tree], ...]]      a dict or OrderedDict; keys as in JSON
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
"""The tags of containers in the binary code."""
NAMES = {tag: name for name, tag in TAGS.items()}
CHUNK_TAG = 0x10
"""Tag of the first kind of chunk. The tags of the other kinds follow in the order of `KINDS`."""
# Bit in the flags of a chunk, besides the codec.
PLANAR = 8
# Bits in the marks of a tensordict: its dims have names; it had a device.
NAMED, ON_DEVICE = 1, 2

# Containers with a batch size; with a single tree; with keys; with the name of a class; with a
# stack dim.
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
    """The fields of a container's tree."""

    kind: str
    batch: Any
    """The batch size; () if this kind of container has none."""
    about: list[Any]
    """The other fields, such as the name of the class."""
    keys: list[Any]
    """The keys of the entries; empty if this kind of container has no keys."""
    parts: list[Any]
    """The trees of the entries."""


def join(
    kind: str, batch: Any, about: Iterable[Any], entries: Sequence[tuple[Any, Any]]
) -> list[Any]:
    """Builds the tree of a container. `split` is the inverse function.

    Args:
        kind: Name of the container, such as ``"tensordict"``.
        batch: Batch size, which is used only for kinds in `BATCHED`.
        about: The other fields of the container, such as the name of its class.
        entries: Pairs of a key and a tree. The keys are used only for kinds in `KEYED`.
    """
    fields = [kind, *([batch] if kind in BATCHED else ()), *about]
    if kind in KEYED:
        return [*fields, list(map(list, entries))]
    trees = [tree for _, tree in entries]
    return [*fields, *trees] if kind in SINGLE else [*fields, trees]


def split(tree: Any) -> Container:
    """Splits the tree of a container into its fields and the trees of its entries.

    Raises:
        TypeError: The tree does not match the grammar.
    """
    with suppress(TypeError, ValueError):
        kind, *about, entries = tree
        if kind in TAGS and len(about) == (kind in BATCHED) + _ABOUT.get(kind, 0):
            batch = about.pop(0) if kind in BATCHED else ()
            if kind in SINGLE:
                return Container(kind, batch, about, [], [entries])
            if kind in KEYED:
                return Container(
                    kind, batch, about, [key for key, _ in entries], [entry for _, entry in entries]
                )
            return Container(kind, batch, about, [], list(entries))
    raise TypeError(f"{tree!r:.60} is not a valid form of an item")
