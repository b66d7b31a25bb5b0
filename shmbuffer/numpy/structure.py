"""The form of the data, as a tree over its leaves.

    data  ──collect──▶  [leaf, leaf, ...]  ──the engine moves the bytes──▶  [leaf, leaf, ...]
    ──build──▶  data

The first batch decides the tree. It is stored as JSON in the schema, so that every process gives
the data back in this form. Here TensorDicts, tensorclasses and dicts are dicts; lists, lazy stacks,
tuples and namedtuples are lists and tuples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shmbuffer.errors import FormatError
from shmbuffer.numpy import labels
from shmbuffer.numpy.keys import OWN_KEYS
from shmbuffer.numpy.mismatch import Numbers, no_names, not_a_tensor
from shmbuffer.numpy.nodes import LEAF, BranchNode, FormDiffersError, KeyPath, Node, nest

_DICTS = frozenset(("tensordict", "tensorclass", "dict"))
_NESTED = frozenset(("tensordict", "tensorclass"))
_TUPLES = frozenset(("tuple", "namedtuple"))


class ArrayNode(BranchNode):
    """A dict, list or tuple, whichever class the schema names."""

    def collect(self, data: Any, out: list[Any]) -> None:
        """See `LeafNode.collect`."""
        if self.kind in _DICTS:
            if not isinstance(data, Mapping):
                raise FormDiffersError
            start = len(out)
            try:
                self._collect(data, out)
            except FormDiffersError:  # it may have tuples for keys
                if self.kind not in _NESTED:
                    raise
                del out[start:]
                self._collect(nest(data), out)
        elif isinstance(data, (tuple, list)):
            self._collect(dict(enumerate(data)), out)
        else:
            raise FormDiffersError

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: Any = None) -> Any:
        """See `LeafNode.build`."""
        children = self.children(leaves, lead, device)
        if self.kind in _DICTS:
            return children
        return (tuple if self.kind in _TUPLES else list)(children.values())


class Structure:
    """Makes trees, of data or of what the schema says; a family that has more classes derives."""

    def describe(self, data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
        """The tree of a first batch whose ``dims`` leading dimensions are the storage's.

        ``mapping`` says what a plain dict is: ``"tensordict"`` or ``"dict"``.
        """
        if isinstance(data, Mapping):
            if mapping == "tensordict":
                data = nest(data)
                for key in data:
                    if not isinstance(key, str):
                        raise TypeError(
                            f"the key {key!r} in the data is no text, and a TensorDict has no "
                            "other keys; rename it, or use a ReplayBuffer, which keeps dicts"
                        )
            entries: dict[Any, Node] = {
                key: self.describe(data[key], dims, mapping=mapping, root=False)
                for key in data
                if not (root and key in OWN_KEYS)
            }
            if mapping == "tensordict":
                return self.tensordict(entries)
            return self.pytree("dict", entries)
        if isinstance(data, Numbers):
            return LEAF
        if isinstance(data, (tuple, list)) and mapping == "tensordict":
            if root:
                raise TypeError(no_names(data))
            return LEAF
        if isinstance(data, (tuple, list)):
            parts = {
                at: self.describe(value, dims, mapping=mapping, root=False)
                for at, value in enumerate(data)
            }
            if hasattr(data, "_fields"):
                return self.pytree("namedtuple", parts, **{"class": self.name_of(type(data))})
            return self.pytree("tuple" if isinstance(data, tuple) else "list", parts)
        if self.is_leaf(data):
            return LEAF
        raise TypeError(not_a_tensor(data))

    def from_json(self, spec: dict[str, Any]) -> Node:
        """The tree that `Node.to_json` wrote."""
        try:
            return self._from_json(spec)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"the schema's structure cannot be read ({type(error).__name__}: {error}); open "
                "the buffer with the version that wrote it"
            ) from error

    def of_schema(self, recorded: dict[str, Any], paths: list[KeyPath], where: str) -> Node:
        """The tree of a schema, which has leaves at these places."""
        if recorded.get("kind") == "leaf" or "items" in recorded:
            node = self.from_json(recorded)
        else:
            node = self.from_paths(paths)
        if paths_of(node) != paths:
            raise FormatError(
                f"{where}: leaves and structure of the schema do not fit together: {paths}, "
                f"{recorded}"
            )
        return node

    def from_paths(self, paths: list[KeyPath]) -> Node:
        """The TensorDict with leaves at these places: for a schema without a structure."""
        items: dict[str, Any] = {}
        for path in paths:
            level = items
            for name in path[:-1]:
                level = level.setdefault(name, {})
            level[path[-1]] = LEAF

        def node(level: dict[str, Any]) -> Node:
            return self.tensordict(
                {key: child if child is LEAF else node(child) for key, child in level.items()}
            )

        return node(items)

    def _from_json(self, spec: dict[str, Any]) -> Node:
        kind = spec.get("kind")
        if kind == "leaf":
            return LEAF
        items = {
            labels.from_json(key): self._from_json(child) for key, child in spec.get("items", ())
        }
        batch = tuple(int(size) for size in spec.get("batch", ()))
        if kind in _NESTED and not all(isinstance(key, str) for key in items):
            raise ValueError(f"a key of {list(items)!r:.60} is no text")
        if kind == "tensordict":
            return self.tensordict(items, batch)
        if kind == "tensorclass":
            return self.tensorclass(items, batch, str(spec["class"]))
        if kind == "lazy_stack":
            dim, batch_dims = int(spec["dim"]), int(spec["batch_dims"])
            if not 0 <= dim < batch_dims:
                raise FormatError(
                    f"a lazy stack along dimension {dim} of {batch_dims} is not possible"
                )
            return self.lazy_stack(items, dim, batch_dims)
        if kind in ("dict", "tuple", "list", "namedtuple"):
            return self.pytree(kind, items, **{key: spec[key] for key in spec if key == "class"})
        raise FormatError(
            f"the schema names a structure {kind!r} that this version of shmbuffer does not know; "
            "open the buffer with the version that wrote it"
        )

    def without(self, data: Any, keys: frozenset[str]) -> Any:
        """``data`` without these root entries; a plain dict where there were any."""
        if not isinstance(data, Mapping) or keys.isdisjoint(data.keys()):
            return data
        return {key: value for key, value in data.items() if key not in keys}

    # What a family has.

    def is_leaf(self, data: Any) -> bool:
        """An array, or what becomes one, or a number."""
        raise NotImplementedError

    def name_of(self, cls: type) -> str:
        """The name under which the schema has a class of the data."""
        return f"{cls.__module__}:{cls.__qualname__}"

    def tensordict(self, items: dict[Any, Node], batch: tuple[int, ...] = ()) -> Node:
        """The node of a TensorDict."""
        return ArrayNode("tensordict", items, batch=list(batch))

    def tensorclass(self, items: dict[Any, Node], batch: tuple[int, ...], name: str) -> Node:
        """The node of a tensorclass."""
        return ArrayNode("tensorclass", items, batch=list(batch), **{"class": name})

    def lazy_stack(self, items: dict[Any, Node], dim: int, batch_dims: int) -> Node:
        """The node of a lazy stack within an item."""
        return ArrayNode("lazy_stack", items, dim=dim, batch_dims=batch_dims)

    def pytree(self, kind: str, items: dict[Any, Node], **about: Any) -> Node:
        """The node of a dict, list, tuple or namedtuple."""
        return ArrayNode(kind, items, **about)


def paths_of(node: Node) -> list[KeyPath]:
    """The paths of the leaves, in order; ``("data",)`` where the data are one leaf."""
    return [path or ("data",) for path in node.paths()]
