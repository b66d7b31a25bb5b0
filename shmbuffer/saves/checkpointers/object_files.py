"""Saves the Python objects in a storage, without pickle unless pickle is allowed.

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
"""Path of the files in a save, without the suffix."""


def write_items(folder: Path, items: Iterable[Any], *, allow_pickle: bool, remedy: str) -> None:
    """Writes the items of a list storage, which can be any objects.

    ``allow_pickle`` and ``remedy`` are as for `write_values`.
    """
    options: dict[str, Any] = {"allow_pickle": allow_pickle, "what": "item", "remedy": remedy}
    write_values(folder / layout.PRIVATE, "items", items, **options)


def write_objects(
    folder: Path,
    leaves: Leaves,
    columns: list[Any],
    present: Flags,
    *,
    allow_pickle: bool,
    remedy: str,
) -> None:
    """Writes the objects in the rows of a storage that are not tensors, if there are any.

    Args:
        folder: The directory of the save.
        leaves: The leaves of the storage.
        columns: One column per leaf.
        present: Mask of the slots that contain items.
        allow_pickle: As for `write_values`.
        remedy: As for `write_values`.
    """
    if leaves.objects:
        objects = [columns[at] for at in sorted(leaves.objects)]
        slots = np.nonzero(present)[0].tolist()
        items = ([column[slot].tolist() for column in objects] for slot in slots)
        write_items(folder, items, allow_pickle=allow_pickle, remedy=remedy)


def read_objects(
    folder: Path,
    shapes: dict[KeyPath, tuple[int, ...]],
    present: Flags,
    lanes: tuple[int, ...],
    *,
    allow_pickle: bool,
) -> dict[KeyPath, Objects]:
    """Reads the objects that `write_objects` wrote, as one column per leaf.

    Args:
        folder: The directory of the save.
        shapes: The shape of the objects in a row, by leaf.
        present: Mask of the slots that contain items. The other slots get None.
        lanes: The lanes of the storage.
        allow_pickle: True if pickled objects may be loaded.
    """
    if not shapes:
        return {}
    columns = {key: Objects.of((), (len(present), *lanes, *shape)) for key, shape in shapes.items()}
    slots = np.nonzero(present)[0].tolist()
    file = folder / ITEMS
    items = read_values(file.parent, file.name, allow_pickle=allow_pickle)
    try:
        for slot, found in zip(slots, items, strict=True):
            for column, values in zip(columns.values(), found, strict=True):
                row = column[slot]
                row.copy_(Objects.of(values, row.shape))
    except ValueRefusedError:
        raise
    except (TypeError, ValueError) as error:
        why = f"does not contain the objects of {len(slots)} items ({error})"
        raise damaged(f"{file}.jsonl", why) from error
    return columns
