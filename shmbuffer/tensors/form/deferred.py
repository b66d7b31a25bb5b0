"""A lazy stack whose items are made at the first look at them; then it becomes an ordinary one.

A learner that pads, or reads a few entries, need not wait for hundreds of TensorDicts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch.utils import _pytree


def deferred(
    make: Callable[[], list[Any]], count: int, batch_size: torch.Size, dim: int = 0
) -> LazyStackedTensorDict:
    """The lazy stack of what ``make`` gives; of a subclass until the first look at entries.

    What ``make`` raises comes out at that look, and the next one tries again. Cost: 4 µs.
    """
    if count < 1 or not 0 <= dim <= len(batch_size):
        raise ValueError(
            f"{count} items of batch size {list(batch_size)} cannot be stacked along dim {dim}"
        )
    made = _Deferred.__new__(_Deferred)
    attributes = made.__dict__
    attributes.update(_ATTRIBUTES)
    attributes["stack_dim"] = dim
    attributes["_batch_size"] = torch.Size((*batch_size[:dim], count, *batch_size[dim:]))
    attributes["_make"] = make
    return made


def amended(
    stack: LazyStackedTensorDict, amend: Callable[[list[Any]], None], entries: dict[Any, Any]
) -> bool:
    """Have the items of a stack changed when they are made; false if they are made already.

    ``entries`` are those that they get, a row each; `to_come` has them until then.
    """
    make = stack.__dict__.get("_make") if type(stack) is _Deferred else None
    if make is None:
        return False

    def made() -> list[Any]:
        items: list[Any] = make()
        amend(items)
        return items

    stack.__dict__["_make"] = made
    stack.__dict__["_entries"] = entries
    return True


def to_come(stack: LazyStackedTensorDict) -> dict[Any, Any]:
    """The entries that a stack gets when its items are made; none where they are made already."""
    found: dict[Any, Any] = stack.__dict__.get("_entries") or {}
    return found if type(stack) is _Deferred else {}


def is_as_made(stack: LazyStackedTensorDict) -> bool:
    """True if the stack has all items that the first look has made, in their order."""
    made, items = stack.__dict__.get("_made", ()), stack.tensordicts
    return len(made) == len(items) and all(map(operator.is_, made, items))


class _Deferred(LazyStackedTensorDict):
    """A lazy stack before the first look: ``tensordicts`` is not there yet."""

    def __getattr__(self, name: str) -> Any:  # asked for what is not there
        attributes = self.__dict__
        if name == "tensordicts":
            make = attributes.get("_make")
            if make is not None:
                items = attributes.setdefault(name, make())  # one step: other threads may be here
                if attributes.pop("_entries", None):
                    attributes["_made"] = tuple(items)
                self.__class__ = LazyStackedTensorDict
                attributes.pop("_make", None)
            if name in attributes:
                return attributes[name]
        raise AttributeError(f"a {LazyStackedTensorDict.__name__} has no attribute {name!r}")

    def __init__(self, *tensordicts: Any, **options: Any) -> None:
        """Make an ordinary stack, if others construct this class."""
        self.__class__ = LazyStackedTensorDict
        LazyStackedTensorDict.__init__(self, *tensordicts, **options)

    @classmethod
    def _new_lazy_unsafe(cls, *tensordicts: Any, **options: Any) -> Any:
        return LazyStackedTensorDict._new_lazy_unsafe(*tensordicts, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _looked_at(self).__reduce_ex__(protocol)


def _looked_at(stack: LazyStackedTensorDict) -> LazyStackedTensorDict:
    """The stack, after a look at its items, which makes it an ordinary one."""
    assert stack.tensordicts is not None
    return stack


_ATTRIBUTES = {
    name: value
    for name, value in LazyStackedTensorDict(TensorDict()).__dict__.items()
    if name not in ("tensordicts", "_batch_size", "stack_dim")
}
_node = _pytree.SUPPORTED_NODES[LazyStackedTensorDict]
_pytree.register_pytree_node(
    _Deferred, lambda stack: _node.flatten_fn(_looked_at(stack)), _node.unflatten_fn
)
