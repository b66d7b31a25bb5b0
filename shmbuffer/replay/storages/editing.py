"""Entries of an item that is a TensorDict, changed; the rest of it stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import is_non_tensor

from shmbuffer.replay.form.nodes import Path, is_collection

_ALIKE = (bool, int, float, complex, str, bytes, type(None))  # one for all items


def edited(item: Any, changes: Mapping[Path, Any], row: int | None) -> Any:
    """Change entries of an item.

    Args:
        item: a TensorDict or tensorclass; it is changed itself.
        changes: by path. Several items at once: a value has a row for each, or is one number or
            text for all.
        row: which row is this item's; None: it is the only one.

    Returns:
        The item.

    Raises:
        TypeError: it has no entries.
        KeyError: it has no such entry.
        RuntimeError: the value has another shape.
    """
    if not is_collection(item):
        raise TypeError(
            f"an item that is a {type(item).__name__} has no entries that can be changed where "
            "they are; put another item in its place with rb[index] = item"
        )
    for path, value in changes.items():
        item.set_(path, value if row is None else row_of(value, row))
    return item


def changes_of(patch: Any, above: Path = ()) -> dict[Path, Any]:
    """The entries of a TensorDict or dict of them, nested ones by their whole path.

    Raises:
        TypeError: it has no entries.
    """
    if not is_collection(patch) and not isinstance(patch, Mapping):
        raise TypeError(f"a patch is a TensorDict or a dict of entries, got {type(patch).__name__}")
    changes: dict[Path, Any] = {}
    for key, value in patch.items():
        path = (*above, *(key if isinstance(key, tuple) else (key,)))
        if isinstance(value, Mapping) or (is_collection(value) and not is_non_tensor(value)):
            changes |= changes_of(value, path)
        else:
            changes[path] = value
    return changes


def row_of(value: Any, row: int) -> Any:
    """The part of a value that belongs to one of several items."""
    if isinstance(value, _ALIKE) or (isinstance(value, torch.Tensor) and not value.dim()):
        return value
    return value[row]
