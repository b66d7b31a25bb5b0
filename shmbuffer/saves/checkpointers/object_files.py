"""Text and other objects of a tensor storage, in files: exact, and without pickle.

shmbuffer.objects.*   of each item its objects, as `values` has them
<key>/meta.json       the same for TorchRL, where JSON can hold it; see `compat.folders`
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer.items.leaves import Leaves
from shmbuffer.memory.format.array_types import Flags
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.saves.values import ValueRefusedError, damaged, read_values, write_values
from shmbuffer.tensors.form.nodes import TensorDictNode
from shmbuffer.tensors.form.objects import Objects
from shmbuffer.torchrl.compat import folders

_NAME = "shmbuffer.objects"


def write_objects(
    folder: Path,
    leaves: Leaves,
    columns: list[Any],
    present: Flags,
    *,
    allow_pickle: bool,
    remedy: str,
) -> None:
    """Write everything but the tensors of every item."""
    if not leaves.objects:
        return
    mine = {leaves.leaves[at].path: columns[at] for at in sorted(leaves.objects)}

    def items() -> Iterator[list[list[Any]]]:
        for slot in np.nonzero(present)[0].tolist():
            yield [column[slot].tolist() for column in mine.values()]

    write_values(folder, _NAME, items(), allow_pickle=allow_pickle, what="item", remedy=remedy)
    if isinstance(leaves.node, TensorDictNode):
        for path, column in mine.items():
            folders.write_objects(folder, path, column, present)


def read_objects(
    folder: Path,
    shapes: dict[KeyPath, tuple[int, ...]],
    present: Flags,
    lanes: tuple[int, ...],
    *,
    allow_pickle: bool,
) -> dict[KeyPath, Objects]:
    """What `write_objects` wrote; None where there is no item."""
    if not shapes:
        return {}
    columns = {key: Objects.of((), (len(present), *lanes, *shape)) for key, shape in shapes.items()}
    slots = np.nonzero(present)[0].tolist()
    items = read_values(folder, _NAME, allow_pickle=allow_pickle)
    try:
        for slot, found in zip(slots, items, strict=True):
            for column, values in zip(columns.values(), found, strict=True):
                place = column[slot]
                place.copy_(Objects.of(values, place.shape))
    except ValueRefusedError:
        raise
    except (TypeError, ValueError) as error:
        why = f"does not have the objects of {len(slots)} items ({error})"
        raise damaged(folder / f"{_NAME}.jsonl", why) from error
    return columns
