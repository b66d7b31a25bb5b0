"""Saves Python objects of a storage to files, exactly and without pickle.

<folder>/.shmbuffer/items.jsonl, items.data   the objects of each item, in the format of `values`
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Flags
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.saves.values import ValueRefusedError, damaged, read_values, write_values
from shmbuffer.tensors.form.objects import Objects

ITEMS = f"{layout.PRIVATE}/items"
"""The name of the files, without the suffix."""


def write_items(folder: Path, items: Iterable[Any], *, allow_pickle: bool, remedy: str) -> None:
    """Writes objects of any kind."""
    how: dict[str, Any] = {"allow_pickle": allow_pickle, "what": "item", "remedy": remedy}
    write_values(folder / layout.PRIVATE, "items", items, **how)


def write_objects(
    folder: Path,
    leaves: Leaves,
    columns: list[Any],
    present: Flags,
    *,
    allow_pickle: bool,
    remedy: str,
) -> None:
    """Writes the entries of all items that are not tensors, if there are any."""
    if leaves.objects:
        mine = [columns[at] for at in sorted(leaves.objects)]
        held = np.nonzero(present)[0].tolist()
        items = ([column[slot].tolist() for column in mine] for slot in held)
        write_items(folder, items, allow_pickle=allow_pickle, remedy=remedy)


def read_objects(
    folder: Path,
    shapes: dict[KeyPath, tuple[int, ...]],
    present: Flags,
    lanes: tuple[int, ...],
    *,
    allow_pickle: bool,
) -> dict[KeyPath, Objects]:
    """Reads the result of `write_objects`; None for a slot without an item."""
    if not shapes:
        return {}
    columns = {key: Objects.of((), (len(present), *lanes, *shape)) for key, shape in shapes.items()}
    slots = np.nonzero(present)[0].tolist()
    file = folder / ITEMS
    items = read_values(file.parent, file.name, allow_pickle=allow_pickle)
    try:
        for slot, found in zip(slots, items, strict=True):
            for column, values in zip(columns.values(), found, strict=True):
                place = column[slot]
                place.copy_(Objects.of(values, place.shape))
    except ValueRefusedError:
        raise
    except (TypeError, ValueError) as error:
        why = f"does not contain the objects of {len(slots)} items ({error})"
        raise damaged(f"{file}.jsonl", why) from error
    return columns
