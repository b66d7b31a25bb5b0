"""Files of writers, as TorchRL writes and reads them.

    metadata.json               cursor (a slot), write_count (of slots), and what the writer needs
    generation.memmap           int64 [slots]: how often each was written; where that is tracked
    current_top_values.memmap   [items, 2]: rank and index of each; of a top-k writer

Under our key: the count of elements, which is what `write_count` says here. A top-k writer's ranks
are also kept exactly (``shmbuffer.state``): TorchRL's tensor has indices and ranks in one dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.names import is_number
from shmbuffer.saves.parts import NO_WRITER
from shmbuffer.saves.safe_files import exists, make_folder, write_file
from shmbuffer.saves.values import (
    FORMAT,
    OURS,
    find_ours,
    read_json,
    read_state,
    reading,
    write_json,
    write_state,
)
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.folders import described, mapped

_METADATA = "metadata.json"
_GENERATION = "generation.memmap"
_RANKS = "current_top_values.memmap"


def write_cursor(
    directory: Path, cursor: int, count: int, width: int, tickets: Ints | None
) -> None:
    """Write cursor and count of a writer that goes round."""
    make_folder(directory)
    content: dict[str, Any] = {"cursor": cursor, "write_count": count // width}
    if tickets is not None:
        slots = len(tickets)
        generation = np.where(tickets < 0, 0, tickets // slots + 1)
        write_file(directory / _GENERATION, generation.astype(np.int64).tobytes())
        content |= {"generation_shape": [slots], "generation_dtype": "torch.int64"}
    write_json(directory / _METADATA, {**content, OURS: {"format": FORMAT, "write_count": count}})


class Cursor(NamedTuple):
    """Where a writer that goes round was, and how much it had written."""

    slot: int
    """The slot of the next item."""
    written: int | None
    """Elements, or slots where TorchRL wrote it; None in files of TorchRL before 0.14."""
    is_ours: bool

    def elements(self, width: int) -> int | None:
        """The count of elements, where a slot has ``width`` of them."""
        return self.written if self.is_ours or self.written is None else self.written * width


def read_cursor(directory: Path) -> Cursor:
    """Read the cursor that `write_cursor`, or TorchRL, wrote."""
    found = read_json(directory / _METADATA, missing=NO_WRITER)
    with reading(directory / _METADATA):
        ours = find_ours(found, directory / _METADATA)
        count = found.get("write_count") if ours is None else ours["write_count"]
        return Cursor(int(found["cursor"]), None if count is None else int(count), bool(ours))


def read_counts(directory: Path) -> Any:
    """Slot of the next item and count of writes; of an ensemble a list; else None."""
    if (directory / "0").is_dir():
        numbers = sorted(int(each.name) for each in directory.iterdir() if is_number(each.name))
        return [read_counts(directory / str(number)) for number in numbers]
    if not exists(directory / _METADATA):
        return None
    found = read_json(directory / _METADATA)
    try:
        count = found.get("write_count")
        return int(found["cursor"]), None if count is None else int(count)
    except (KeyError, TypeError, ValueError):
        return None  # a writer of the user's


def write_ranks(directory: Path, state: dict[str, Any], key: Any, reduction: str) -> None:
    """Write the state of a `TensorDictMaxValueWriter`."""
    make_folder(directory)
    ranks = [[float(rank), index] for rank, index in state["_current_top_values"]]
    values = cpu.tensor(ranks, dtype=torch.float64).reshape(-1, 2)
    write_file(directory / _RANKS, values.numpy().tobytes())
    write_state(directory, state, "the state of the writer")
    write_json(
        directory / _METADATA,
        {
            "cursor": state["_cursor"],
            "write_count": state["_write_count"],
            "rank_key": key,
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            OURS: {"format": FORMAT, "reduction": reduction},
        },
    )


def read_ranks(directory: Path) -> tuple[dict[str, Any], Any, str | None]:
    """The state that was written here or by TorchRL; the rank's entry; its reduction, if known."""
    found = read_json(directory / _METADATA, missing=NO_WRITER)
    with reading(directory / _METADATA):
        key = found["rank_key"]
        key = tuple(key) if isinstance(key, list) else key
        ours = find_ours(found, directory / _METADATA)
        if ours is not None:
            return _ranks(read_state(directory) or {}), key, str(ours["reduction"])
        top = mapped(directory / _RANKS, *described(found)).tolist()
        state = {
            "_current_top_values": top,
            "_cursor": found["cursor"],
            "_write_count": found.get("write_count") or len(top),
        }
        return _ranks(state), key, None


def _ranks(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a top-k writer, whose numbers are numbers."""
    top = [(rank, int(index)) for rank, index in state["_current_top_values"]]
    sorted(top)  # they have to be comparable
    cursor, count = int(state["_cursor"]), int(state["_write_count"])
    return {"_current_top_values": top, "_cursor": cursor, "_write_count": count}
