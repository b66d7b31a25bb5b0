"""The nodes of the trees in `structure`: leaves, and containers with a child under each key.

``tensors/form/nodes`` defines the nodes for torch's containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shmbuffer.items.form import labels
from shmbuffer.memory.format.leaf import Key, KeyPath

NESTED = frozenset(("tensordict", "tensorclass"))
"""Kinds of containers whose keys are strings. A tuple of strings is the key of a nested entry."""
_DICTS = NESTED | {"dict"}


class FormDiffersError(Exception):
    """Raised if data do not have the structure of a tree. The caller creates the message."""


class LeafNode:
    """A tensor or array."""

    kind = "leaf"
    batch: tuple[int, ...] = ()

    def collect(self, data: Any, out: list[Any]) -> None:
        """Appends ``data``, which is a leaf, to ``out``."""
        out.append(data)

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """Returns the next leaf, which has the shape ``[*lead, *shape]``."""
        return next(leaves)

    def paths(self) -> Iterator[KeyPath]:
        """Yields the empty path, because the node itself is a leaf."""
        yield ()

    def to_json(self) -> dict[str, Any]:
        """Returns the node as it is stored in the schema file."""
        return {"kind": self.kind}

    def private(self) -> str | None:
        """Returns None, because all processes can read a leaf."""
        return None


LEAF = LeafNode()


class BranchNode:
    """A container with a child under each key.

    ``about`` contains further attributes of the container, which are stored in the schema.
    ``batch`` is the batch size of a TensorDict in one item, and ``()`` for other containers. The
    keys of a sequence are its positions. This class builds a tuple for a namedtuple, and a list for
    a lazy stack.
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
        """Appends the leaves of ``data`` to ``out`` in the order of the tree.

        Raises FormDiffersError if the structure of ``data`` is different.
        """
        source, start = self.opened(data), len(out)
        try:
            self._collect(source, out)
        except FormDiffersError:
            if self.kind not in NESTED or (nested := nest(source)) is source:
                raise
            del out[start:]
            self._collect(nested, out)

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """Returns the entries of ``data`` by key.

        Raises FormDiffersError if ``data`` is not a container of this kind.
        """
        if self.kind in _DICTS:
            if isinstance(data, Mapping):
                return data
        elif isinstance(data, (tuple, list)):
            return dict(enumerate(data))
        raise FormDiffersError

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any) -> Any:
        """Builds a container from the next leaves, which have the shape ``[*lead, *shape]``."""
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
        """Builds the entries of a container, each from the next leaves."""
        if self.flat is not None:
            # The iterator is not exhausted, because it also has the leaves of later nodes.
            return dict(zip(self.flat, leaves, strict=False))
        return {key: child.build(leaves, lead, device) for key, child in self.pairs}

    def to_json(self) -> dict[str, Any]:
        """Returns the node as it is stored in the schema file.

        The result is not valid JSON if `private` returns a reason.
        """
        return {
            "kind": self.kind,
            "items": [[labels.to_json(key), child.to_json()] for key, child in self.pairs],
            **self.about,
        }

    def private(self) -> str | None:
        """Returns the reason why other processes cannot read the data, or None if they can.

        The reason is a verb phrase, or a clause that begins with the word "entry".
        """
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
    """Converts a mapping with tuple keys to nested dicts. Returns other mappings unchanged."""
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
    """Looks up a key or a path of keys in a dict. Returns None if the entry is missing."""
    if isinstance(key, str):
        return data.get(key)
    found: Any = nest(data)
    for name in key:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def named_entries(data: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Converts tuple keys to nested entries. Raises TypeError if a key is not a string."""
    data = nest(data)
    for key in data:
        if not isinstance(key, str):
            raise TypeError(
                f"the key {key!r} in the data is not a string, but a TensorDict only has string "
                "keys; rename it, or use a ReplayBuffer, which supports dicts"
            )
    return data


def tree_of(node: Node) -> tuple[Any, ...]:
    """Returns the keys of a node for the C core, as ``((key, subtree), ...)``.

    The subtree of a leaf is None. Returns ``()`` if the core does not support the structure.
    """
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
    """Builds nested dicts from a result of `tree_of` and the values of its leaves in order."""
    return {key: next(values) if below is None else as_dict(below, values) for key, below in tree}
