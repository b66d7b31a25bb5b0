"""Nodes of a structure. Each type of node splits one type of container and rebuilds it.

Reading a file never imports a module or unpickles an object. A tensorclass or namedtuple is
restored if this process has imported its class. Otherwise it is restored as a TensorDict or tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)

from shmbuffer.items.form.nodes import BranchNode, FormDiffersError, LeafNode, Node, entry_of
from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.form.objects import non_tensor
from shmbuffer.tensors.form.tensor_containers import class_of


class ObjectNode(LeafNode):
    """Node for text and other objects (NonTensorData).

    ``shape`` is the shape of the array of objects within one element of the storage.
    """

    kind = "object"

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Returns the objects as NonTensorData or a NonTensorStack."""
        return non_tensor(next(leaves))

    def to_json(self) -> dict[str, Any]:
        """Returns the node as JSON."""
        return {"kind": self.kind, "shape": list(self.shape)}

    def private(self) -> str | None:
        """Returns the reason why other processes cannot share the data."""
        return "contains text or other Python objects"


class TensorDictNode(BranchNode):
    """Node for a TensorDict. ``batch`` is its batch size within one element of the storage."""

    def __init__(self, items: dict[Any, Node], batch: Iterable[int] = (), **about: Any) -> None:
        kind = "tensorclass" if about else "tensordict"
        super().__init__(kind, items, batch=list(batch), **about)

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """Returns the entries of the data by key."""
        # The private dict takes 6 ns, and items() takes 120 ns. A test checks that the private dict
        # exists.
        kind = type(data)
        if kind is TensorDict:
            return data._tensordict  # type: ignore[no-any-return]
        return data if kind is dict else super().opened(unwrap(data))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Builds a TensorDict from its leaves."""
        return self.wrap(self.children(leaves, lead, device), lead, device)

    def wrap(self, source: dict[Any, Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Wraps valid tensors in a TensorDict without checks, in 0.5 µs instead of 5 µs."""
        size = (
            lead
            if type(lead) is torch.Size and not self.batch
            else torch.Size((*lead, *self.batch))
        )
        return TensorDict._new_unsafe(source, size, device, nested=False)

    def batch_of(
        self, tensors: list[Any], others: dict[str, Any], lead: torch.Size, device: torch.device
    ) -> TensorDict:
        """Creates a TensorDict of batch size ``lead`` for items that have no batch size.

        Args:
            tensors: leaves of the node in order.
            others: further entries.
            lead: batch size.
            device: device of the TensorDict.
        """
        source = (
            self.children(iter(tensors), lead, device)
            if self.flat is None
            else dict(zip(self.flat, tensors, strict=True))
        )
        source.update(others)
        return TensorDict._new_unsafe(source, lead, device, nested=False)


class TensorClassNode(TensorDictNode):
    """Node for a tensorclass, which is stored as the TensorDict that it wraps."""

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Builds a tensorclass, or a TensorDict if its class has not been imported."""
        data = super().build(leaves, lead, device)
        cls = class_of(self.about["class"])
        return data if cls is None else cls.from_tensordict(data)  # type: ignore[attr-defined]


class LazyStackNode(BranchNode):
    """Node for a lazy stack within an item, whose TensorDicts differ in keys or shapes."""

    def __init__(self, items: dict[Any, Node], dim: int, batch_dims: int) -> None:
        super().__init__("lazy_stack", items, dim=dim, batch_dims=batch_dims)
        self.dim = dim
        self.batch_dims = batch_dims

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """Returns the TensorDicts of a stack by their position.

        Raises:
            FormDiffersError: ``data`` is not a lazy stack along the dimension of this node.
        """
        if (
            not isinstance(data, LazyStackedTensorDict)
            or data.stack_dim != data.batch_dims - self.batch_dims + self.dim
        ):
            raise FormDiffersError
        return dict(enumerate(data.tensordicts))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Builds a lazy stack from its leaves."""
        parts = [*self.children(leaves, lead, device).values()]
        return lazy_stack(parts, len(lead) + self.dim)


class PyTreeNode(BranchNode):
    """Node for a dict, list, tuple or namedtuple."""

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """Returns the entries of the data by key."""
        return super().opened(unwrap(data))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """Builds a container. A namedtuple is a tuple if its class has not been imported."""
        found = super().build(leaves, lead, device)
        cls: Any = class_of(self.about["class"]) if "class" in self.about else None
        return found if cls is None else cls(*found)


@contextmanager
def unlocked(data: Any) -> Iterator[None]:
    """Unlocks a TensorDict within a ``with`` block and locks it again afterwards.

    ``with data.unlock_()`` would replace exceptions raised in the block, including
    KeyboardInterrupt, with a RuntimeError.
    """
    locked = data.is_locked
    data.unlock_()
    try:
        yield
    finally:
        if locked:
            data.lock_()


def is_collection(data: Any) -> bool:
    """True for tensorclasses and for TensorDicts of any class. Cost: 0.1 µs."""
    kind: Any = type(data)
    return _is_collection(kind)


@lru_cache(maxsize=1024)
def _is_collection(kind: Any) -> bool:
    return issubclass(kind, TensorDictBase) or bool(is_tensorclass(kind))


def entry_at(data: Any, key: Key) -> Any:
    """Returns the entry of a TensorDict or of nested dicts at a key, or None if it is missing."""
    if is_collection(data):
        return data.get(key, None)
    return entry_of(data, key) if isinstance(data, Mapping) else None


def unwrap(data: Any) -> Any:
    """Returns the entries of a TensorDict or tensorclass as a dict.

    Returns None for NonTensorData, and any other data unchanged.
    """
    if not is_collection(data):
        return data
    return None if is_non_tensor(data) else fields(data)


def fields(data: Any) -> dict[str, Any]:
    """Returns the entries of a TensorDict, or the fields of a tensorclass that are not None."""
    if is_tensorclass(data):
        return {key: value for key, value in data._tensordict.items() if value is not None}
    return dict(data.items())
