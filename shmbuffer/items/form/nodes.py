"""Nodes of a `structure`: leaves, and containers with children under keys.

``tensors/form/nodes`` defines the nodes for torch's containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shmbuffer.items.form import labels
from shmbuffer.memory.format.leaf import Key, KeyPath

NESTED = frozenset(("tensordict", "tensorclass"))
"""Kinds with text as keys; a tuple of keys names a nested entry."""
_DICTS = NESTED | {"dict"}


class FormDiffersError(Exception):
    """Raised for data of another structure. The caller creates the message."""


class LeafNode:
    """A tensor or array."""

    kind = "leaf"
    batch: tuple[int, ...] = ()

    def collect(self, data: Any, out: list[Any]) -> None:
        """Appends the leaves of ``data`` to ``out`` in order; FormDiffersError for other data."""
        out.append(data)

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """Builds the data from leaves ``[*lead, *shape]``."""
        return next(leaves)

    def paths(self) -> Iterator[KeyPath]:
        """Yields the path of each leaf in order."""
        yield ()

    def to_json(self) -> dict[str, Any]:
        """Returns the node for the schema file; JSON unless a part is private."""
        return {"kind": self.kind}

    def private(self) -> str | None:
        """Returns the reason why a part cannot leave this process, as the start of a sentence."""
        return None


LEAF = LeafNode()


class BranchNode:
    """A container with children under keys. ``about`` has additional attributes for the schema.

    ``batch`` is the batch size of one item of a TensorDict, and ``()`` for other containers. The
    keys of a sequence are its positions. This class treats a namedtuple as a tuple, and a lazy
    stack as a list.
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
        """Appends the leaves of ``data`` to ``out`` in order; FormDiffersError for other data."""
        source, start = self.opened(data), len(out)
        try:
            self._collect(source, out)
        except FormDiffersError:
            if self.kind not in NESTED or (nested := nest(source)) is source:
                raise
            del out[start:]
            self._collect(nested, out)

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """Returns the entries of a container of this kind; FormDiffersError for other data."""
        if self.kind in _DICTS:
            if isinstance(data, Mapping):
                return data
        elif isinstance(data, (tuple, list)):
            return dict(enumerate(data))
        raise FormDiffersError

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """Builds the data from leaves ``[*lead, *shape]``."""
        children = self.children(leaves, lead, device)
        if self.kind in _DICTS:
            return children
        return (tuple if "tuple" in self.kind else list)(children.values())

    def paths(self) -> Iterator[KeyPath]:
        """Yields the path of each leaf in order."""
        for name, child in zip(self.names, self.items.values(), strict=True):
            for path in child.paths():
                yield (name, *path)

    def children(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> dict[Any, Any]:
        """Builds each entry from its own leaves."""
        if self.flat is not None:
            # The other leaves belong to the nodes after this one.
            return dict(zip(self.flat, leaves, strict=False))
        return {key: child.build(leaves, lead, device) for key, child in self.pairs}

    def to_json(self) -> dict[str, Any]:
        """Returns the node for the schema file; JSON unless a part is private."""
        return {
            "kind": self.kind,
            "items": [[labels.to_json(key), child.to_json()] for key, child in self.pairs],
            **self.about,
        }

    def private(self) -> str | None:
        """Returns the reason why a part cannot leave this process, as the start of a sentence."""
        for key, child in self.pairs:
            if not labels.is_json(key):
                return (
                    f"has the key {key!r}, which is not a string, a finite number or a tuple of "
                    "them"
                )
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
"""A leaf or a container."""


def nest(data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Converts a mapping with tuple keys to nested dicts; returns others unchanged."""
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
    """Returns an entry of nested dicts or of a dict with tuple keys; None if it is missing."""
    if isinstance(key, str):
        return data.get(key)
    found: Any = nest(data)
    for name in key:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def named_entries(data: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns a dict with text or tuple keys as nested entries; TypeError for other keys."""
    data = nest(data)
    for key in data:
        if not isinstance(key, str):
            raise TypeError(
                f"the key {key!r} in the data is not a string, but a TensorDict only has string "
                "keys; rename it, or use a ReplayBuffer, which supports dicts"
            )
    return data


def tree_of(node: Node) -> tuple[Any, ...]:
    """Returns a node for the core as ``((key, None or its tree), ...)``; ``()`` without keys."""
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
    """Arranges leaves under the keys of such a tree."""
    return {key: next(values) if below is None else as_dict(below, values) for key, below in tree}
