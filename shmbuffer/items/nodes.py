"""The nodes of a `structure`: a leaf, and a container with children under keys.

How containers of a family's own are taken apart and made, its classes say: ``tensors/form/nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shmbuffer.items import labels
from shmbuffer.memory.format.leaf import Key, KeyPath

NESTED = frozenset(("tensordict", "tensorclass"))
"""Kinds whose keys are text; a tuple of it names what is in several of them."""
_DICTS = NESTED | {"dict"}


class FormDiffersError(Exception):
    """The data have another form than the tree; the caller finds the words for it."""


class LeafNode:
    """One tensor or array."""

    kind = "leaf"
    batch: tuple[int, ...] = ()

    def collect(self, data: Any, out: list[Any]) -> None:
        """Append the leaves of ``data`` to ``out``, in order, or raise FormDiffersError."""
        out.append(data)

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """The data again, from leaves ``[*lead, *shape]``."""
        return next(leaves)

    def paths(self) -> Iterator[KeyPath]:
        """Where each leaf is, in order."""
        yield ()

    def to_json(self) -> dict[str, Any]:
        """The node in the words of the schema file; JSON where nothing in it is private."""
        return {"kind": self.kind}

    def private(self) -> str | None:
        """The part that cannot leave this process, as the start of a sentence; None if all can."""
        return None


LEAF = LeafNode()


class BranchNode:
    """A node with children under keys; ``about`` is what else the schema says of it.

    ``batch`` is the batch size of one item where it is a TensorDict, else ``()``. The keys of a
    sequence are its positions. Here a namedtuple is a tuple, and a lazy stack a list.
    """

    def __init__(self, kind: str, items: dict[Any, Node], **about: Any) -> None:
        self.kind = kind
        self.items = items
        self.about = about
        self.batch = tuple(about.get("batch", ()))
        self.names = labels.names_of(items)
        self.size = len(items)
        self.flat = tuple(items) if all(child is LEAF for child in items.values()) else None
        self.pairs = tuple(items.items())

    def collect(self, data: Any, out: list[Any]) -> None:
        """See `LeafNode.collect`."""
        source, start = self.opened(data), len(out)
        try:
            self._collect(source, out)
        except FormDiffersError:
            if self.kind not in NESTED or (nested := nest(source)) is source:
                raise
            del out[start:]
            self._collect(nested, out)

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """The entries of a container of this kind; FormDiffersError for any other data."""
        if self.kind in _DICTS:
            if isinstance(data, Mapping):
                return data
        elif isinstance(data, (tuple, list)):
            return dict(enumerate(data))
        raise FormDiffersError

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """See `LeafNode.build`."""
        children = self.children(leaves, lead, device)
        if self.kind in _DICTS:
            return children
        return (tuple if "tuple" in self.kind else list)(children.values())

    def paths(self) -> Iterator[KeyPath]:
        """See `LeafNode.paths`."""
        for name, child in zip(self.names, self.items.values(), strict=True):
            for path in child.paths():
                yield (name, *path)

    def children(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> dict[Any, Any]:
        """Build the entries, each from its own leaves."""
        if self.flat is not None:
            # What is left of the iterator is for the nodes after this one.
            return dict(zip(self.flat, leaves, strict=False))
        return {key: child.build(leaves, lead, device) for key, child in self.pairs}

    def to_json(self) -> dict[str, Any]:
        """See `LeafNode.to_json`."""
        return {
            "kind": self.kind,
            "items": [[labels.to_json(key), child.to_json()] for key, child in self.pairs],
            **self.about,
        }

    def private(self) -> str | None:
        """See `LeafNode.private`."""
        for key, child in self.pairs:
            if not labels.is_json(key):
                return f"has the key {key!r}, which is no text, number or tuple of them"
            if (reason := child.private()) is not None:
                place = f"entry {key!r}"
                return f"{place} {'-> ' if reason.startswith('entry') else ''}{reason}"
        return None

    def _collect(self, source: Mapping[Any, Any], out: list[Any]) -> None:
        if len(source) != self.size:
            raise FormDiffersError
        try:
            for key, child in self.pairs:
                if child is LEAF:
                    out.append(source[key])
                else:
                    child.collect(source[key], out)
        except KeyError:
            raise FormDiffersError from None


Node = LeafNode | BranchNode
"""A leaf, or a container with children under keys."""


def nest(data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A mapping with tuple keys as nested dicts; any other as it is."""
    if not any(type(key) is tuple for key in data):
        return data
    nested: dict[Any, Any] = {}
    for key, value in data.items():
        path = key if isinstance(key, tuple) else (key,)
        level = nested
        for name in path[:-1]:
            level = level.setdefault(name, {})
        level[path[-1]] = value
    return nested


def entry_of(data: Mapping[Any, Any], key: Key) -> Any:
    """An entry of nested dicts, or of one with tuples for keys; None if it is missing."""
    if isinstance(key, str):
        return data.get(key)
    found: Any = nest(data)
    for name in key:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def named_entries(data: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The entries of a TensorDict, from a dict that may have tuples for keys; or TypeError."""
    data = nest(data)
    for key in data:
        if not isinstance(key, str):
            raise TypeError(
                f"the key {key!r} in the data is no text, and a TensorDict has no other keys; "
                "rename it, or use a ReplayBuffer, which keeps dicts"
            )
    return data


def tree_of(node: Node) -> tuple[Any, ...]:
    """A node as the core takes it: ``((key, None or its tree), ...)``; ``()`` if it cannot."""
    if not isinstance(node, BranchNode) or node.kind not in ("tensordict", "dict"):
        return ()
    found = []
    for key, child in node.pairs:
        below = None if child is LEAF else tree_of(child)
        if below == () or type(key) is not str:
            return ()
        found.append((key, below))
    return tuple(found)


def as_dict(tree: tuple[Any, ...], values: Iterator[Any]) -> dict[str, Any]:
    """The leaves under the keys of such a tree."""
    return {key: next(values) if below is None else as_dict(below, values) for key, below in tree}
