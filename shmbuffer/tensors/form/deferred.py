"""A lazy stack that creates its items on first access and is an ordinary stack afterwards.

A learner that only pads the stack or reads a few entries does not have to wait until hundreds of
TensorDicts have been created.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch.utils import _pytree


def deferred(
    make: Callable[[], list[Any]],
    count: int,
    batch_size: torch.Size,
    dim: int = 0,
    column: Callable[[str], torch.Tensor | None] = lambda key: None,
) -> LazyStackedTensorDict:
    """Returns a lazy stack of the items that ``make`` creates on first access.

    Until the first access, the stack is an instance of a subclass. If ``make`` raises an error, the
    access raises it, and the next access calls ``make`` again. ``column`` takes a key and returns
    the entries of all items under this key in a new tensor, stacked along ``dim``. It returns None
    if this is impossible without creating the items. Cost: 4 µs.
    """
    if count < 1 or not 0 <= dim <= len(batch_size):
        raise ValueError(
            f"{count} items of batch size {list(batch_size)} cannot be stacked along dim {dim}"
        )
    created = _Deferred.__new__(_Deferred)
    attributes = created.__dict__
    attributes.update(_ATTRIBUTES)
    attributes["stack_dim"] = dim
    attributes["_batch_size"] = torch.Size((*batch_size[:dim], count, *batch_size[dim:]))
    attributes["_make"] = make
    attributes["_column"] = column
    return created


def defer_change(
    stack: LazyStackedTensorDict, amend: Callable[[list[Any]], None], entries: dict[Any, Any]
) -> bool:
    """Registers a function that modifies the items of a deferred stack when they are created.

    Returns False, and registers nothing, if the items already exist.

    Args:
        stack: the stack.
        amend: function that modifies a list of new items.
        entries: entries that ``amend`` adds to the items, with one row per item. `pending_entries`
            returns them until the items are created.
    """
    make = stack.__dict__.get("_make") if type(stack) is _Deferred else None
    if make is None:
        return False

    def make_changed() -> list[Any]:
        items: list[Any] = make()
        amend(items)
        return items

    stack.__dict__["_make"] = make_changed
    stack.__dict__["_entries"] = entries
    return True


def pending_entries(stack: LazyStackedTensorDict) -> dict[Any, Any]:
    """Returns the entries that will be added to the items of a stack when they are created."""
    found: dict[Any, Any] = stack.__dict__.get("_entries") or {}
    return found if type(stack) is _Deferred else {}


def has_created_items(stack: LazyStackedTensorDict) -> bool:
    """True if the stack still has the items that the first access created, in the same order."""
    created, items = stack.__dict__.get("_created", ()), stack.tensordicts
    return len(created) == len(items) and all(map(operator.is_, created, items))


class _Deferred(LazyStackedTensorDict):
    """Lazy stack that has no ``tensordicts`` yet, because nothing has accessed them."""

    def __getattr__(self, name: str) -> Any:  # called for missing attributes
        attributes = self.__dict__
        if name == "tensordicts":
            make = attributes.get("_make")
            if make is not None:
                items = attributes.setdefault(name, make())  # atomic, because threads may race
                if attributes.pop("_entries", None):
                    attributes["_created"] = tuple(items)
                self.__class__ = LazyStackedTensorDict
                attributes.pop("_make", None)
                attributes.pop("_column", None)
            if name in attributes:
                return attributes[name]
        raise AttributeError(f"a {LazyStackedTensorDict.__name__} has no attribute {name!r}")

    def _get_str(self, key: str, *default: Any, **options: Any) -> Any:
        """Returns the entries of all items under a key, if possible without creating the items."""
        attributes = self.__dict__
        column, entries = attributes.get("_column"), attributes.get("_entries") or ()
        # vmap sets this attribute. Its name depends on the version of tensordict.
        hook = attributes.get("_hook_out", attributes.get("hook_out"))
        plain = hook is None and not any(map(options.get, _FORMS))
        if column is not None and plain and key not in entries:
            found = column(key)
            if found is not None:
                return found
        return LazyStackedTensorDict._get_str(self, key, *default, **options)

    def __init__(self, *tensordicts: Any, **options: Any) -> None:
        """Creates an ordinary stack, because tensordict constructs new stacks of this class."""
        self.__class__ = LazyStackedTensorDict
        LazyStackedTensorDict.__init__(self, *tensordicts, **options)

    @classmethod
    def _new_lazy_unsafe(cls, *tensordicts: Any, **options: Any) -> Any:
        return LazyStackedTensorDict._new_lazy_unsafe(*tensordicts, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_items(self).__reduce_ex__(protocol)


def _with_items(stack: LazyStackedTensorDict) -> LazyStackedTensorDict:
    """Creates the items of the stack, which turns it into an ordinary stack, and returns it."""
    assert stack.tensordicts is not None
    return stack


_FORMS = ("as_list", "as_padded_tensor", "as_nested_tensor")  # options of `get`
_ATTRIBUTES = {
    name: value
    for name, value in LazyStackedTensorDict(TensorDict()).__dict__.items()
    if name not in ("tensordicts", "_batch_size", "stack_dim")
}
_node = _pytree.SUPPORTED_NODES[LazyStackedTensorDict]
_pytree.register_pytree_node(
    _Deferred, lambda stack: _node.flatten_fn(_with_items(stack)), _node.unflatten_fn
)
