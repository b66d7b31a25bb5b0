"""Files of writers in TorchRL's layout.

    metadata.json               cursor (a slot), write_count (in slots), and the writer's own data
    generation.memmap           int64 [slots], number of writes per slot, if tracked
    current_top_values.memmap   [items, 2], rank and index of each item of a top-k writer

In this package, `write_count` counts elements. This number is saved under the key of this package.
The exact ranks of a top-k writer are in ``shmbuffer.state``, because TorchRL's tensor stores ranks
and indices with one dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.format.key_names import is_number
from shmbuffer.saves.checkpoints import OWN_FILES, PartFiles
from shmbuffer.saves.safe_files import exists, make_folder, write_file
from shmbuffer.saves.saved_parts import missing_part
from shmbuffer.saves.values import (
    FORMAT,
    OURS,
    find_ours,
    read_json,
    reading,
    write_json,
)
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.folders import described, mapped

_METADATA = "metadata.json"
_GENERATION = "generation.memmap"
_RANKS = "current_top_values.memmap"
_RANK_KEY = "rank_key"
"""Key that exists only in the metadata of a top-k writer."""


def _read_metadata(directory: Path, *, ranked: bool) -> dict[str, Any]:
    """Reads a writer's metadata. ``ranked`` is True for a top-k writer.

    Raises:
        SchemaMismatchError: the metadata were saved by another class of writer.
    """
    found: dict[str, Any] = read_json(directory / _METADATA, missing=missing_part("writer"))
    if (_RANK_KEY in found) != ranked:
        kinds = ["RoundRobinWriter", "TensorDictMaxValueWriter"]
        saved, this = kinds if ranked else kinds[::-1]
        raise SchemaMismatchError(
            f"{directory / _METADATA}: was saved by a {saved}, but this writer is a {this}; load "
            f"it into a buffer with a {saved}"
        )
    return found


def _write_cursor(directory: Path, writer: Any, state: dict[str, Any], moment: Any) -> None:
    make_folder(directory)
    ring, count = writer._ring, state["_write_count"]
    width = 1 if ring is None else ring.width
    content: dict[str, Any] = {"cursor": state["_cursor"], "write_count": count // width}
    if writer.track_generations and ring is not None:
        tickets = moment.tickets if isinstance(moment, ItemSnapshot) else ring.live.tickets()
        slots = len(tickets)
        generation = np.where(tickets < 0, 0, tickets // slots + 1)
        write_file(directory / _GENERATION, generation.astype(np.int64).tobytes())
        content |= {"generation_shape": [slots], "generation_dtype": "torch.int64"}
    write_json(directory / _METADATA, {**content, OURS: {"format": FORMAT, "write_count": count}})


def _read_cursor(directory: Path, writer: Any) -> dict[str, int]:
    found = _read_metadata(directory, ranked=False)
    with reading(directory / _METADATA):
        ours, ring = find_ours(found, directory / _METADATA), writer._ring
        width = 1 if ring is None else ring.width
        # Number of slots. TorchRL saves it since version 0.14.
        count = found.get("write_count")
        if ours is not None:
            count = ours["write_count"]
        else:
            count = writer.write_count if count is None else int(count) * width
        return {"_cursor": int(found["cursor"]), "_write_count": int(count)}


def read_counts(directory: Path) -> Any:
    """Reads the cursor and the write count, in slots, of a writer that TorchRL saved.

    The write count can be None. Returns None if no writer was saved, and a list for an ensemble.
    """
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
        return None  # saved by a writer that the user defined


def _write_ranks(directory: Path, writer: Any, state: dict[str, Any], moment: Any) -> None:
    OWN_FILES.write(directory, writer, state, moment)
    ranks = [[float(rank), index] for rank, index in state["_current_top_values"]]
    values = cpu.tensor(ranks, dtype=torch.float64).reshape(-1, 2)
    write_file(directory / _RANKS, values.numpy().tobytes())
    write_json(
        directory / _METADATA,
        {
            "cursor": state["_cursor"],
            "write_count": state["_write_count"],
            _RANK_KEY: state["_rank_key"],
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            OURS: {"format": FORMAT},
        },
    )


def _read_ranks(directory: Path, writer: Any) -> dict[str, Any]:
    found = _read_metadata(directory, ranked=True)
    with reading(directory / _METADATA):
        if find_ours(found, directory / _METADATA) is not None:
            return _ranks(OWN_FILES.read(directory, writer))
        key = found[_RANK_KEY]
        top = mapped(directory / _RANKS, *described(found)).tolist()
        state = {
            "_current_top_values": top,
            "_cursor": found["cursor"],
            "_write_count": found.get("write_count") or len(top),
            "_rank_key": tuple(key) if isinstance(key, list) else key,
        }
        return _ranks(state)


def _ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Checks and converts the numbers in the state of a top-k writer, and returns the state."""
    top = [(rank, int(index)) for rank, index in state["_current_top_values"]]
    sorted(top)  # raises TypeError if the ranks are not comparable
    numbers = {key: int(state[key]) for key in ("_cursor", "_write_count")}
    return {**state, **numbers, "_current_top_values": top}


CURSOR = PartFiles(_write_cursor, _read_cursor)
"""Reads and writes the files of a `RoundRobinWriter`."""
RANKS = PartFiles(_write_ranks, _read_ranks)
"""Reads and writes the files of a `TensorDictMaxValueWriter`."""
