"""The parts of a save other than items: sampler, writer, generators, transforms and user data.

    <path>/storage/.shmbuffer/parts/<name>.jsonl, <name>.data   plain values; see `values`
    <path>/storage/.shmbuffer/parts/<name>/                     a part with its own `dumps`

No part is pickled. All parts are read and checked before the buffer changes.
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
    """Returns the names of the optional parts that a save contains.

    ``folder`` is the directory of the parts.
    """
    return [name for name in ("extra", "consumers", "ahead") if exists(folder / f"{name}.jsonl")]


@dataclass(frozen=True)
class SavedBuffer:
    """The contents of a save, which are read before the buffer changes.

    ``storage``, ``sampler`` and ``writer`` are the arguments of `apply_part` for these parts.
    """

    where: Path
    """The file that contains the state of the transforms, for messages."""
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
    """The batches that were prefetched and not returned yet."""
    written: Any = None
    """The cursor and the write count of TorchRL's writer, which the storage restores."""


def missing_part(kind: str) -> str:
    """Returns the end of the message for a save that has no state for the sampler or the writer.

    ``kind`` is ``"sampler"`` or ``"writer"``.
    """
    then = ", and then call set_sampler()" if kind == "sampler" else ""
    return (
        f"the save has no state for a {kind} of this class; load the save into a buffer with the "
        f"{kind} with which it was saved{then}"
    )


def checked_batch_size(size: Any) -> int | None:
    """Returns a batch size that was read from a file. Raises ValueError if it is invalid."""
    if size is None or (type(size) is int and 0 < size < 2**63):
        return size
    raise ValueError(f"batch_size must be a positive int or None, got {size!r:.40}")


def checked_generator(state: Any, device: Any) -> tuple[torch.Tensor, torch.device]:
    """Returns the state and the device of a generator that were read from a file.

    Raises RuntimeError or TypeError if a state for the CPU is invalid.
    """
    where = torch.device(str(device))
    if where.type == "cpu":
        torch.Generator().set_state(state)  # raises for an invalid state
    return state, where


def require_states(file: Path, states: dict[str, Any], chain: Any) -> None:
    """Raises ValueError if a save has the state of a transform that the buffer does not have.

    Args:
        file: The file of the states, for the message.
        states: The state of each transform, by its index in the chain.
        chain: The buffer's transforms.
    """
    for at in states:
        known = is_number(at) and int(at) < len(chain.transforms)
        if not known or not hasattr(chain.transforms[int(at)], "load_state_dict"):
            raise ValueError(
                f"{file}: contains the state of transform {at!r:.80}, but the buffer's transforms "
                f"are {[type(transform).__name__ for transform in chain.transforms]}; use the "
                "transforms with which the buffer was saved. Nothing was changed"
            )
