"""Part of some items: which of their columns change, and to what."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.replay.form.mismatch import leaves_of, refuse_form, refuse_leaf
from shmbuffer.replay.form.nodes import Path, TensorDictNode, is_collection
from shmbuffer.replay.form.objects import as_objects
from shmbuffer.replay.form.tensors import as_tensor

if TYPE_CHECKING:
    from shmbuffer.replay.form.leaves import Leaves


def columns_of(
    leaves: Leaves, lead: tuple[int, ...], data: Any, key: Path | None
) -> dict[int, torch.Tensor]:
    """What is to change in some items.

    Args:
        leaves: of the items.
        lead: the shape in which they were selected.
        data: what belongs there, ``[*lead, ...]``, or what can be expanded to it: a tensor or
            number for the leaf ``key``, a TensorDict or dict of those that are to change below it.
        key: where in an item; None: ``data`` has every leaf.

    Returns:
        By number of the leaf, ``[n, *shape]``.

    Raises:
        KeyError: no leaf of that name.
        SchemaMismatchError: another dtype or shape; with ``key`` None also other leaves.
    """
    number = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}
    columns: dict[int, Any] = {}
    nested = isinstance(leaves.node, TensorDictNode)
    for path, value in _changes(data, key, number, nested).items():
        at = number.get(path)
        if at is None:
            if key is None:
                refuse_form(leaves.where, leaves.node.kind, leaves.leaves, (), data)
            raise KeyError(
                f"{'.'.join(path)!r} is not a leaf of {leaves.where}, which has "
                f"{sorted('.'.join(known) for known in number)}"
            )
        leaf, dtype = leaves.leaves[at], leaves.dtypes[at]
        shape = (*lead, *leaf.shape)
        if at in leaves.objects:
            try:
                columns[at] = as_objects(value, shape).reshape(-1, *leaf.shape)
            except RuntimeError as error:
                refuse_leaf(leaves.where, leaf, shape, str(error))
            continue
        plain = isinstance(value, (bool, int, float, complex))
        tensor = torch.as_tensor(value, dtype=dtype) if plain else as_tensor(value).detach()
        try:
            wide = tensor.expand(shape)
        except RuntimeError:
            wide = tensor
        if wide.dtype is not dtype or wide.shape != shape:
            found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            refuse_leaf(leaves.where, leaf, shape, found)
        columns[at] = wide.reshape(-1, *leaf.shape)
    if key is None and len(columns) < len(number):
        refuse_form(leaves.where, leaves.node.kind, leaves.leaves, (), data)
    return columns


def _changes(data: Any, key: Path | None, known: Collection[Path], nested: bool) -> dict[Path, Any]:
    """What is to change, by the path of the leaf."""
    if key is None:
        return leaves_of(data, nested)
    if key in known or not (is_collection(data) or isinstance(data, (dict, tuple, list))):
        return {key: data}
    return {(*key, *path): value for path, value in leaves_of(data, nested).items()}
