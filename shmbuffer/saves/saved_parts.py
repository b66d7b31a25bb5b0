"""The parts of a save other than items: sampler, writer, generators, transforms, user data.

    <path>/storage/.shmbuffer/parts/<name>.jsonl, <name>.data   plain values; see `values`
    <path>/storage/.shmbuffer/parts/<name>/                     a part with its own `dumps`

Nothing is pickled. All parts are read and checked before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shmbuffer.memory.format.key_names import is_number
from shmbuffer.memory.format.layout import PARTS
from shmbuffer.saves.safe_files import exists


def is_saved(path: Path) -> bool:
    """True if a directory contains the save of a buffer."""
    return exists(path / "storage" / PARTS)


def optional_parts(folder: Path) -> list[str]:
    """Returns the names of the optional parts in this save."""
    return [name for name in ("extra", "consumers", "ahead") if exists(folder / f"{name}.jsonl")]


@dataclass(frozen=True)
class SavedBuffer:
    """The contents of a save, read before the buffer changes."""

    where: Path
    """The file of the transforms, for messages."""
    storage: Any
    sampler: Any
    writer: Any
    generators: dict[str, tuple[torch.Tensor, torch.device]]
    """The state and the device of each generator, by its name."""
    transforms: dict[str, Any] | None
    batch_size: int | None
    extra: Any
    consumers: list[dict[str, Any]] = field(default_factory=list)
    ahead: list[Any] = field(default_factory=list)
    """The prefetched batches."""
    written: Any = None
    """The cursor and the count of TorchRL's writer, for the storage."""


def missing_part(kind: str) -> str:
    """Returns the message for a save that has no state for the sampler or the writer."""
    then = ", and then call set_sampler()" if kind == "sampler" else ""
    return (
        f"no {kind} of this kind was saved; load it into a buffer with the {kind} that it was "
        f"saved with{then}"
    )


def checked_batch_size(size: Any) -> int | None:
    """Returns a batch size; raises ValueError for anything else."""
    if size is None or (type(size) is int and 0 < size < 2**63):
        return size
    raise ValueError(f"{size!r:.40} is not a batch size")


def checked_generator(state: Any, device: Any) -> tuple[torch.Tensor, torch.device]:
    """Returns the state of a generator and its device; raises if it is not a state."""
    where = torch.device(str(device))
    if where.type == "cpu":
        torch.Generator().set_state(state)  # raises for an invalid state
    return state, where


def require_states(file: Path, states: dict[str, Any], chain: Any) -> None:
    """Raises ValueError if there is a state of a transform that the buffer does not have."""
    for at in states:
        known = is_number(at) and int(at) < len(chain.transforms)
        if not known or not hasattr(chain.transforms[int(at)], "load_state_dict"):
            raise ValueError(
                f"{file}: contains the state of transform {at!r:.80}, but the buffer's transforms "
                f"are {[type(one).__name__ for one in chain.transforms]}; use the transforms that "
                "it was saved with. Nothing was changed"
            )
