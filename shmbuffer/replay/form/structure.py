"""The form of the data, as a tree over its leaves, where they may be TensorDicts."""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensorclass

from shmbuffer.numpy.keys import OWN_KEYS
from shmbuffer.numpy.nodes import Node
from shmbuffer.numpy.records.containers import register
from shmbuffer.numpy.structure import Structure
from shmbuffer.replay.form.mismatch import not_a_tensor
from shmbuffer.replay.form.nodes import (
    LazyStackNode,
    ObjectNode,
    PyTreeNode,
    TensorClassNode,
    TensorDictNode,
    fields,
    is_collection,
)
from shmbuffer.replay.form.tensors import is_number


class _WithTensorDicts(Structure):
    """Trees with nodes of TensorDicts, tensorclasses, lazy stacks and objects."""

    tensordict = staticmethod(TensorDictNode)
    tensorclass = staticmethod(TensorClassNode)
    lazy_stack = staticmethod(LazyStackNode)
    pytree = staticmethod(PyTreeNode)
    is_leaf = staticmethod(is_number)  # type: ignore[assignment]
    name_of = staticmethod(register)

    def describe(self, data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
        """See `Structure.describe`."""
        if is_non_tensor(data):
            if root:
                raise TypeError(not_a_tensor(data))
            return ObjectNode(tuple(data.batch_size[dims:]))
        if isinstance(data, LazyStackedTensorDict) and data.stack_dim >= dims and _differ(data):
            stacked: dict[Any, Node] = {
                at: self.describe(part, dims, mapping=mapping, root=root)
                for at, part in enumerate(data.tensordicts)
            }
            return LazyStackNode(stacked, data.stack_dim - dims, data.batch_dims - dims)
        if not is_collection(data):
            return super().describe(data, dims, mapping=mapping, root=root)
        batch = tuple(data.batch_size[dims:])
        items = {
            str(key): self.describe(value, dims, mapping=mapping, root=False)
            for key, value in fields(data).items()
            if not (root and key in OWN_KEYS)
        }
        if is_tensorclass(data):
            return TensorClassNode(items, batch, register(type(data)))
        return TensorDictNode(items, batch)

    def without(self, data: Any, keys: frozenset[str]) -> Any:
        """See `Structure.without`."""
        if is_collection(data) and not keys.isdisjoint(data.keys()):
            data = fields(data)
        return super().without(data, keys)

    def _from_json(self, spec: dict[str, Any]) -> Node:
        if spec.get("kind") == "object":
            return ObjectNode(tuple(int(size) for size in spec["shape"]))
        return super()._from_json(spec)


STRUCTURE = _WithTensorDicts()
from_json = STRUCTURE.from_json
of_schema = STRUCTURE.of_schema


def _differ(stack: LazyStackedTensorDict) -> bool:
    """Whether what is stacked cannot be one TensorDict."""
    first, *others = (
        {key: getattr(value, "shape", None) for key, value in part.items(True, True)}
        for part in stack.tensordicts
    )
    return any(form != first for form in others)
