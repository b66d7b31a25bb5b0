"""The nodes of a structure: how each kind of data is taken apart into leaves, and put together.

Nothing is unpickled, and nothing is imported for a file: a tensorclass or namedtuple comes back as
its class if this process has it already, else as a TensorDict or a tuple.
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

from shmbuffer.items.nodes import BranchNode, FormDiffersError, LeafNode, Node, entry_of
from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.form.containers import class_of
from shmbuffer.tensors.form.objects import non_tensor


class ObjectNode(LeafNode):
    """Text or other objects (NonTensorData), ``shape`` of them for each element."""

    kind = "object"

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `LeafNode.build`."""
        return non_tensor(next(leaves))

    def to_json(self) -> dict[str, Any]:
        """See `LeafNode.to_json`."""
        return {"kind": self.kind, "shape": list(self.shape)}

    def private(self) -> str | None:
        """See `LeafNode.private`."""
        return "holds text or other Python objects"


class TensorDictNode(BranchNode):
    """A TensorDict; ``batch`` is the batch size of one element."""

    def __init__(self, items: dict[Any, Node], batch: Iterable[int] = (), **about: Any) -> None:
        kind = "tensorclass" if about else "tensordict"
        super().__init__(kind, items, batch=list(batch), **about)

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """See `BranchNode.opened`."""
        # The private dict of the plain class costs 6 ns where items() costs 120; a test pins it.
        kind = type(data)
        if kind is TensorDict:
            return data._tensordict  # type: ignore[no-any-return]
        return data if kind is dict else super().opened(held(data))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `LeafNode.build`."""
        return self.wrap(self.children(leaves, lead, device), lead, device)

    def wrap(self, source: dict[Any, Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """A TensorDict over tensors that are known to fit: 0.5 µs where the checked one costs 5."""
        size = (
            lead
            if type(lead) is torch.Size and not self.batch
            else torch.Size((*lead, *self.batch))
        )
        return TensorDict._new_unsafe(source, size, device, nested=False)


class TensorClassNode(TensorDictNode):
    """A tensorclass: stored as its TensorDict, given back as its class where it is known."""

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `LeafNode.build`."""
        data = super().build(leaves, lead, device)
        cls = class_of(self.about["class"])
        return data if cls is None else cls.from_tensordict(data)  # type: ignore[attr-defined]


class LazyStackNode(BranchNode):
    """A lazy stack of TensorDicts that differ in keys or shapes, within an item."""

    def __init__(self, items: dict[Any, Node], dim: int, batch_dims: int) -> None:
        super().__init__("lazy_stack", items, dim=dim, batch_dims=batch_dims)
        self.dim = dim
        self.batch_dims = batch_dims

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """See `BranchNode.opened`."""
        if (
            not isinstance(data, LazyStackedTensorDict)
            or data.stack_dim != data.batch_dims - self.batch_dims + self.dim
        ):
            raise FormDiffersError
        return dict(enumerate(data.tensordicts))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `LeafNode.build`."""
        parts = [*self.children(leaves, lead, device).values()]
        return lazy_stack(parts, len(lead) + self.dim)


class PyTreeNode(BranchNode):
    """A dict, list, tuple or namedtuple of a PyTree."""

    def opened(self, data: Any) -> Mapping[Any, Any]:
        """See `BranchNode.opened`."""
        return super().opened(held(data))

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `LeafNode.build`."""
        found = super().build(leaves, lead, device)
        cls: Any = class_of(self.about["class"]) if "class" in self.about else None
        return found if cls is None else cls(*found)


@contextmanager
def unlocked(data: Any) -> Iterator[None]:
    """Has a TensorDict take entries for the length of a block.

    ``with data.unlock_()`` has a RuntimeError in place of what is raised in it, Ctrl-C included.
    """
    locked = data.is_locked
    data.unlock_()
    try:
        yield
    finally:
        if locked:
            data.lock_()


def is_collection(data: Any) -> bool:
    """A TensorDict of any kind, or a tensorclass. Cost: 0.1 µs."""
    kind: Any = type(data)
    return _is_collection(kind)


@lru_cache(maxsize=1024)
def _is_collection(kind: Any) -> bool:
    return issubclass(kind, TensorDictBase) or bool(is_tensorclass(kind))


def entry_at(data: Any, key: Key) -> Any:
    """An entry of a TensorDict or of nested dicts; None if it is missing, or data are neither."""
    if is_collection(data):
        return data.get(key, None)
    return entry_of(data, key) if isinstance(data, Mapping) else None


def held(data: Any) -> Any:
    """The entries of a TensorDict or tensorclass, None of text and objects; other data as is."""
    if not is_collection(data):
        return data
    return None if is_non_tensor(data) else fields(data)


def fields(data: Any) -> dict[str, Any]:
    """The entries of any TensorDict or tensorclass as a dict."""
    if is_tensorclass(data):
        return {key: value for key, value in data._tensordict.items() if value is not None}
    return dict(data.items())
