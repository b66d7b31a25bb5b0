"""The structure of items: a tree that splits data into leaves and rebuilds data from leaves.

    data  ──collect──▶  [leaf, leaf, ...]  ──the engine moves the bytes──▶  [leaf, leaf, ...]
    ──build──▶  data

The first batch defines the tree. The tree is stored as JSON in the schema, so that every process
builds data of the same structure. This module handles TensorDicts and tensorclasses like dicts, and
lazy stacks and namedtuples like lists and tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shmbuffer.errors import FormatError
from shmbuffer.items.form import labels
from shmbuffer.items.form.arrays import is_array
from shmbuffer.items.form.mismatch import Numbers, no_names, not_a_tensor
from shmbuffer.items.form.nodes import LEAF, NESTED, BranchNode, Node, named_entries, nest
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory.format.leaf import KeyPath


def _sizes(sizes: Any) -> list[int]:
    return list(map(int, sizes))


Container = tuple[str, Mapping[Any, Any], dict[str, Any]]
"""A container that has been split: its kind, its entries by key, and attributes for the schema."""

_ABOUT: dict[str, dict[str, Callable[[Any], Any]]] = {
    "tensordict": {"batch": _sizes},
    "tensorclass": {"batch": _sizes, "class": str},
    "lazy_stack": {"dim": int, "batch_dims": int},
    "dict": {},
    "list": {},
    "tuple": {},
    "namedtuple": {"class": str},
}
"""For each kind of container, the attributes in the schema and the functions that parse them."""


class Structure:
    """Creates trees from data or from a schema. In this class, leaves are arrays and numbers."""

    def describe(self, data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
        """Returns the tree for the first batch, in which each leaf has ``dims`` leading dimensions.

        ``mapping`` is the kind that a plain dict gets, ``"tensordict"`` or ``"dict"``.
        """
        if isinstance(data, (tuple, list)) and mapping == "tensordict":
            if root and not isinstance(data, Numbers):
                raise TypeError(no_names(data))
            return LEAF
        container = self.container(data, dims, mapping)
        if container is None:
            return LEAF
        kind, entries, about = container
        items = {
            key: self.describe(value, dims, mapping=mapping, root=root and kind == "lazy_stack")
            for key, value in entries.items()
            if not (root and key in OWN_KEYS)
        }
        return self.node(kind, items, **about)

    def leaves_of(
        self,
        data: Any,
        nested: bool = True,  # True for a TensorDict: keys can be tuples, and lists are leaves
        prefix: KeyPath = (),  # path of ``data`` in the item
    ) -> dict[KeyPath, Any]:
        """Returns the leaves of data by path, without the entries that a sample adds."""
        container = self.held(data)
        if isinstance(container, Mapping):
            container = nest(container) if nested else container
            entries = list(zip(labels.names_of(container), container.values(), strict=True))
        elif isinstance(container, (tuple, list)) and not (
            nested or isinstance(container, Numbers)
        ):
            entries = [(str(at), value) for at, value in enumerate(container)]
        else:
            return {prefix or ("data",): data}
        return {
            path: leaf
            for name, value in entries
            if prefix or name not in OWN_KEYS
            for path, leaf in self.leaves_of(value, nested, (*prefix, name)).items()
        }

    def without(self, data: Any, keys: frozenset[str]) -> Any:
        """Removes root entries. Returns a plain dict, or ``data`` itself if it has none of them."""
        names = getattr(data, "keys", None)  # a namedtuple can have a field named "keys"
        if not callable(names) or keys.isdisjoint(names()):
            return data
        return {key: value for key, value in self.held(data).items() if key not in keys}

    def from_json(self, spec: dict[str, Any]) -> Node:
        """Creates a tree from the result of `Node.to_json`. Raises FormatError if it is invalid."""
        try:
            return self._from_json(spec)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"the structure in the schema cannot be read ({type(error).__name__}: {error}); "
                "open the buffer with the version of shmbuffer that wrote it"
            ) from error

    def of_schema(self, recorded: dict[str, Any], paths: list[KeyPath], where: str) -> Node:
        """Returns the tree for the structure in a schema whose leaves have the given paths.

        If the schema contains no structure, the data are a TensorDict. Raises FormatError if the
        leaves and the structure do not match.
        """
        if recorded.get("kind") == "leaf" or "items" in recorded:
            node = self.from_json(recorded)
        else:
            node = self.describe(dict.fromkeys(paths, 0), 0, mapping="tensordict", root=False)
        if paths_of(node) != paths:
            raise FormatError(
                f"{where}: the leaves {paths} in the schema do not match its structure {recorded}; "
                "restore the schema from a copy"
            )
        return node

    def _from_json(self, spec: dict[str, Any]) -> Node:
        kind = spec.get("kind")
        if kind == "leaf":
            return LEAF
        if kind not in _ABOUT:
            raise FormatError(
                f"the schema has a structure {kind!r}, which this version of shmbuffer does not "
                "support; open the buffer with the version that wrote it"
            )
        items = {
            labels.from_json(key): self._from_json(child) for key, child in spec.get("items", ())
        }
        if kind in NESTED and not all(isinstance(key, str) for key in items):
            raise ValueError(f"a key of {list(items)!r:.60} is not a string")
        spec = {"batch": (), **spec}
        about = {name: to(spec[name]) for name, to in _ABOUT[kind].items()}
        if kind == "lazy_stack" and not 0 <= about["dim"] < about["batch_dims"]:
            raise ValueError(
                f"a lazy stack along dimension {about['dim']} of {about['batch_dims']} is not "
                "possible"
            )
        return self.node(kind, items, **about)

    # Methods that a subclass may override.

    def name_of(self, cls: type) -> str:
        """Returns the name under which the schema stores a class."""
        return f"{cls.__module__}:{cls.__qualname__}"

    def held(self, data: Any) -> Any:
        """Converts a container to a dict, list or tuple. Returns a leaf unchanged."""
        return data

    def container(self, data: Any, dims: int, mapping: str) -> Container | None:
        """Splits a container into its entries, without splitting these further.

        Returns None for a leaf. Raises TypeError for an object that is neither.
        """
        # The length of a TensorDict is its batch size, not its number of keys.
        if isinstance(data, Mapping) and len(data) == len(data.keys()):
            if mapping == "tensordict":
                return mapping, named_entries(data), {"batch": []}
            return "dict", data, {}
        if isinstance(data, Numbers):
            return None
        if not isinstance(data, (tuple, list)):  # a list with __array__ stays a list
            if is_array(data):
                return None
            raise TypeError(not_a_tensor(data))
        entries = dict(enumerate(data))
        if hasattr(data, "_fields"):
            return "namedtuple", entries, {"class": self.name_of(type(data))}
        return "tuple" if isinstance(data, tuple) else "list", entries, {}

    def node(self, kind: str, items: dict[Any, Node], **about: Any) -> Node:
        """Creates a node for a container of the given kind."""
        return BranchNode(kind, items, **about)


def paths_of(node: Node) -> list[KeyPath]:
    """Returns the paths of the leaves in order. If the tree is one leaf, its path is ("data",)."""
    return [path or ("data",) for path in node.paths()]
