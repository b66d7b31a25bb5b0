"""The members of an ensemble: a list, or the present parts of its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from shmbuffer.saves.checkpoints import apply_part, dump_part, read_part, save_part, saved_part
from shmbuffer.saves.safe_files import make_folders


class Ensemble:
    """Several storages, samplers or writers as one, each saved under its number."""

    _what: ClassVar[str]  # the name of a member in messages
    _members: Sequence[Any]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            if len(index) != 1:
                raise IndexError(f"a {self._what} has no items, so {index!r} selects nothing")
            index = index[0]
        if is_everything(index):
            return self
        found = named(index, len(self._members), self._what)
        return self._members[found] if isinstance(found, int) else self._some(found)

    def _some(self, found: list[int]) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        """How many members it has."""
        return len(self._members)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._members))})"

    def state_dict(self) -> dict[str, Any]:
        """Each member's state, under its number."""
        return {str(at): member.state_dict() for at, member in enumerate(self._members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        for at, member in enumerate(self._members):
            member.load_state_dict(state_dict[str(at)])

    def _dump(self, directory: Path, moment: Any) -> Any:
        make_folders(directory)
        for at, member in enumerate(self._members):
            dump_part(member, directory / str(at), None if moment is None else moment[at])

    def _saved(self, moment: Any, folder: Path) -> Any:
        of_each = [None] * len(self._members) if moment is None else moment
        return [
            save_part(member, folder.with_name(f"{folder.name}-{at}"), one)
            for at, (member, one) in enumerate(zip(self._members, of_each, strict=True))
        ]

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        return [
            saved_part(member, one, folder.with_name(f"{folder.name}-{at}"))
            for at, (member, one) in enumerate(zip(self._members, saved, strict=True))
        ]

    def _read(self, directory: Path) -> Any:
        return [read_part(member, directory / str(at)) for at, member in enumerate(self._members)]

    def _apply(self, saved: Any, loaded: Any) -> Any:
        for at, (member, one) in enumerate(zip(self._members, saved, strict=True)):
            apply_part(member, one, None if loaded is None else loaded[at])


class PartsOf(Sequence[Any]):
    """The present storage, sampler or writer of each buffer."""

    def __init__(self, buffers: Sequence[Any], name: str) -> None:
        self._buffers, self._name = buffers, name

    def __getitem__(self, at: Any) -> Any:
        return getattr(self._buffers[at], self._name)

    def __len__(self) -> int:
        return len(self._buffers)

    def __reduce__(self) -> Any:
        return list, (list(self),)  # the parts without the buffers


def named(index: Any, count: int, what: str) -> int | list[int]:
    """The member at an int, the members of anything else."""
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    if not isinstance(index, (int, np.integer, list, range, np.ndarray)):
        raise IndexError(
            f"{index!r} names no {what}: an int, a slice, Ellipsis, or a list, range, array or "
            "tensor of ints does"
        )
    numbers = np.asarray(index)
    if numbers.ndim > 1:
        raise RuntimeError(
            f"an index of the {what}s of an ensemble has one dimension; this one has {numbers.ndim}"
        )
    if numbers.dtype == np.bool_ and numbers.shape == (count,):
        numbers = np.nonzero(numbers)[0]
    if not np.issubdtype(numbers.dtype, np.integer) and numbers.size:
        raise TypeError(f"{what}s are named by integers, got {numbers.dtype} in {index!r}")
    beyond = numbers[(numbers < -count) | (numbers >= count)]
    if beyond.size:
        raise IndexError(f"there is no {what} {int(beyond.flat[0])}; this ensemble has {count}")
    return (numbers.astype(np.int64) % count).tolist()  # type: ignore[no-any-return]


def is_everything(index: Any) -> bool:
    """True if an index selects all members in order."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))
