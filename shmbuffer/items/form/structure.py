"""The structure of data, as a tree over its leaves.

    data  ──collect──▶  [leaf, leaf, ...]  ──the engine moves the bytes──▶  [leaf, leaf, ...]
    ──build──▶  data

The first batch defines the tree. The schema stores it as JSON, so that every process returns data
of this structure. This module treats TensorDicts, tensorclasses and dicts as dicts, and lists, lazy
stacks, tuples and namedtuples as lists and tuples.
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
"""Kind, entries by key, and further attributes for the schema."""

_ABOUT: dict[str, dict[str, Callable[[Any], Any]]] = {
    "tensordict": {"batch": _sizes},
    "tensorclass": {"batch": _sizes, "class": str},
    "lazy_stack": {"dim": int, "batch_dims": int},
    "dict": {},
    "list": {},
    "tuple": {},
    "namedtuple": {"class": str},
}
"""Attributes that the schema stores for each kind of container."""


class Structure:
    """Makes trees from data or from a schema. Leaves are arrays and numbers."""

    def describe(self, data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
        """Returns the tree of a first batch, whose first ``dims`` dimensions are the storage's.

        ``mapping`` is the kind of a plain dict, ``"tensordict"`` or ``"dict"``.
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
        data: Any,  # of any structure
        nested: bool = True,  # a TensorDict: keys may be tuples, and lists are leaves
        prefix: KeyPath = (),  # path of the data
    ) -> dict[KeyPath, Any]:
        """Returns the leaves by path, without the entries that a sample adds."""
        held = self.held(data)
        if isinstance(held, Mapping):
            held = nest(held) if nested else held
            entries = list(zip(labels.names_of(held), held.values(), strict=True))
        elif isinstance(held, (tuple, list)) and not (nested or isinstance(held, Numbers)):
            entries = [(str(at), value) for at, value in enumerate(held)]
        else:
            return {prefix or ("data",): data}
        return {
            path: leaf
            for name, value in entries
            if prefix or name not in OWN_KEYS
            for path, leaf in self.leaves_of(value, nested, (*prefix, name)).items()
        }

    def without(self, data: Any, keys: frozenset[str]) -> Any:
        """Returns ``data`` without these root entries, as a plain dict if some were removed."""
        names = getattr(data, "keys", None)  # a named tuple may have a field with this name
        if not callable(names) or keys.isdisjoint(names()):
            return data
        return {key: value for key, value in self.held(data).items() if key not in keys}

    def from_json(self, spec: dict[str, Any]) -> Node:
        """Reverses `Node.to_json`."""
        try:
            return self._from_json(spec)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"the structure in the schema cannot be read ({type(error).__name__}: {error}); "
                "open the buffer with the version of shmbuffer that wrote it"
            ) from error

    def of_schema(self, recorded: dict[str, Any], paths: list[KeyPath], where: str) -> Node:
        """Returns the tree of a schema with these leaves; by default that of a TensorDict."""
        if recorded.get("kind") == "leaf" or "items" in recorded:
            node = self.from_json(recorded)
        else:
            node = self.describe(dict.fromkeys(paths, 0), 0, mapping="tensordict", root=False)
        if paths_of(node) != paths:
            raise FormatError(
                f"{where}: the leaves and the structure of the schema do not match: {paths}, "
                f"{recorded}"
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
        """Returns the name of a class in the schema."""
        return f"{cls.__module__}:{cls.__qualname__}"

    def held(self, data: Any) -> Any:
        """Returns the data as a dict, list or tuple. Other objects are leaves."""
        return data

    def container(self, data: Any, dims: int, mapping: str) -> Container | None:
        """Splits a container by one level; None for a leaf, TypeError for other data."""
        if isinstance(data, Mapping) and len(data) == len(data.keys()):  # not true for a TensorDict
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
        """Returns the node of a container."""
        return BranchNode(kind, items, **about)


def paths_of(node: Node) -> list[KeyPath]:
    """Returns the paths of the leaves in order; ``("data",)`` if the data are one leaf."""
    return [path or ("data",) for path in node.paths()]
