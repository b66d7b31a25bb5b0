"""The structure of data that may contain TensorDicts: a tree of containers over the leaves."""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, is_non_tensor, is_tensorclass

from shmbuffer.items.form.mismatch import not_a_tensor
from shmbuffer.items.form.nodes import Node
from shmbuffer.items.form.structure import Container, Structure
from shmbuffer.items.records.containers import register
from shmbuffer.tensors.form.tensor_nodes import (
    LazyStackNode,
    ObjectNode,
    PyTreeNode,
    TensorClassNode,
    TensorDictNode,
    fields,
    is_collection,
    unwrap,
)

_NODES: dict[str, Any] = {
    "tensordict": TensorDictNode,
    "tensorclass": TensorClassNode,
    "lazy_stack": LazyStackNode,
}


class _WithTensorDicts(Structure):
    """Structure whose nodes include TensorDicts, tensorclasses, lazy stacks and objects."""

    name_of = staticmethod(register)
    held = staticmethod(unwrap)

    def describe(self, data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
        """Returns the tree of ``data``.

        The first ``dims`` dimensions are those of the storage and not part of an element.
        """
        if root and is_collection(data) and len(data.batch_size) < dims:
            raise ValueError(
                f"the data have batch size {list(data.batch_size)}, which must include the "
                f"storage's {dims} leading dimensions; add() takes one item, extend() a batch"
            )
        if not is_non_tensor(data):
            return super().describe(data, dims, mapping=mapping, root=root)
        if root:
            raise TypeError(not_a_tensor(data.data if isinstance(data, NonTensorData) else data))
        return ObjectNode(tuple(data.batch_size[dims:]))

    def container(self, data: Any, dims: int, mapping: str) -> Container | None:
        """Returns the kind, entries and attributes of a container, or None for a leaf."""
        if isinstance(data, LazyStackedTensorDict) and data.stack_dim >= dims and _differ(data):
            about = {"dim": data.stack_dim - dims, "batch_dims": data.batch_dims - dims}
            return "lazy_stack", dict(enumerate(data.tensordicts)), about
        if not is_collection(data):
            return super().container(data, dims, mapping)
        batch = list(data.batch_size[dims:])
        if is_tensorclass(data):
            return "tensorclass", fields(data), {"batch": batch, "class": register(type(data))}
        return "tensordict", fields(data), {"batch": batch}

    def node(self, kind: str, items: dict[Any, Node], **about: Any) -> Node:
        """Returns a node for a container of this kind with these entries."""
        if kind in _NODES:
            return _NODES[kind](items, **about)  # type: ignore[no-any-return]
        return PyTreeNode(kind, items, **about)

    def _from_json(self, spec: dict[str, Any]) -> Node:
        if spec.get("kind") == "object":
            return ObjectNode(tuple(int(size) for size in spec["shape"]))
        return super()._from_json(spec)


STRUCTURE = _WithTensorDicts()
from_json = STRUCTURE.from_json
leaves_of = STRUCTURE.leaves_of
of_schema = STRUCTURE.of_schema


def _differ(stack: LazyStackedTensorDict) -> bool:
    """True if the TensorDicts of a stack differ in keys or shapes."""
    first, *others = (
        {key: getattr(value, "shape", None) for key, value in part.items(True, True)}
        for part in stack.tensordicts
    )
    return any(form != first for form in others)
