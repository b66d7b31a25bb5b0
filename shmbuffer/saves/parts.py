"""The parts of a save beside its items: sampler, writer, generators, transforms, and the user's.

    <path>/storage/.shmbuffer/parts/<name>.jsonl, <name>.data   plain values; see `values`
    <path>/storage/.shmbuffer/parts/<name>/                     of a part with a `dumps` of its own

Nothing is pickled. Each part is read and checked before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shmbuffer.memory.format.layout import PARTS
from shmbuffer.memory.format.names import is_number
from shmbuffer.saves.safe_files import exists
from shmbuffer.saves.values import read_values, reading, write_values

NO_SAMPLER = (
    "no sampler of this kind was saved; load it into a buffer with the sampler that it was saved "
    "with, and call set_sampler() then"
)
NO_WRITER = (
    "no writer of this kind was saved; load it into a buffer with the writer that it was saved with"
)


def is_saved(path: Path) -> bool:
    """True if a buffer was saved into a directory."""
    return exists(path / "storage" / PARTS)


def optional_parts(folder: Path) -> list[str]:
    """The names of those parts that only some saves have, and this one."""
    return [name for name in ("extra", "consumers", "ahead") if exists(folder / f"{name}.jsonl")]


def write_value(folder: Path, name: str, value: Any, what: str) -> None:
    """Writes a plain value; TypeError names ``what`` it is of if it could only be pickled."""
    write_values(folder, name, [value], allow_pickle=False, what=what)


def read_value(folder: Path, name: str) -> Any:
    """Reads what `write_value` wrote; CorruptBufferError if it is missing or damaged."""
    with reading(folder / f"{name}.jsonl"):
        (value,) = read_values(folder, name, allow_pickle=False)
    return value


@dataclass(frozen=True)
class SavedBuffer:
    """What was read of a save; nothing of the buffer has changed yet."""

    where: Path
    """The file of the transforms, for messages."""
    storage: Any
    sampler: Any
    writer: Any
    generators: dict[str, tuple[torch.Tensor, torch.device]]
    """State and device of each, by name."""
    transforms: dict[str, Any] | None
    batch_size: int | None
    extra: Any
    consumers: list[dict[str, Any]] = field(default_factory=list)
    ahead: list[Any] = field(default_factory=list)
    """Prefetched batches."""
    written: Any = None
    """Cursor and count of TorchRL's writer, for the storage."""


def missing_sampler(where: Path) -> FileNotFoundError:
    """The error for a save whose sampler is of another kind."""
    return FileNotFoundError(f"{where}: {NO_SAMPLER}")


def missing_writer(where: Path) -> FileNotFoundError:
    """The error for a save whose writer is of another kind."""
    return FileNotFoundError(f"{where}: {NO_WRITER}")


def checked_batch_size(size: Any) -> int | None:
    """Returns a batch size; ValueError if it is none."""
    if size is None or (type(size) is int and 0 < size < 2**63):
        return size
    raise ValueError(f"{size!r:.40} is no batch size")


def checked_generator(state: Any, device: Any) -> tuple[torch.Tensor, torch.device]:
    """Returns the state of a generator, and its device; an error if it is none."""
    where = torch.device(str(device))
    if where.type == "cpu":
        torch.Generator().set_state(state)  # is it one?
    return state, where


def require_states(file: Path, states: dict[str, Any], chain: Any) -> None:
    """Raises ValueError for the state of a transform that a buffer does not have."""
    for at in states:
        known = is_number(at) and int(at) < len(chain.transforms)
        if not known or not hasattr(chain.transforms[int(at)], "load_state_dict"):
            raise ValueError(
                f"{file}: has the state of transform {at!r:.80}, and the buffer's transforms are "
                f"{[type(one).__name__ for one in chain.transforms]}; give it those that it was "
                "saved with. Nothing was changed"
            )
