"""Several storages, a directory each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shmbuffer.replay.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.replay.checkpoints import (
    apply_part,
    dump_part,
    load_plainly,
    read_json,
    read_part,
    write_json,
)
from shmbuffer.replay.values import reading

_METADATA = "metadata.json"


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """The members of a `StorageEnsemble`, each with its own checkpointer.

        <path>/metadata.json        which members have nothing in them: they are not saved
        <path>/<number>/            a member
        <path>/<number>_transform.pt   the state of its transform, if it has one

    Each member is of one moment; the members are saved one after the other.

    Source: ``torchrl.data.StorageEnsembleCheckpointer``.
    """

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Write each member into a directory that is called by its number.

        Returns:
            What each member's checkpointer returned; None for those that are empty.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        members = storage._storages
        empty = [at for at, member in enumerate(members) if not len(member)]
        write_json(path / _METADATA, {"empty_members": empty})
        moments = [
            None if at in empty else dump_part(member, path / str(at))
            for at, member in enumerate(members)
        ]
        for at, transform in enumerate(storage._transforms or ()):
            if (state := _state_of(transform)) is not None:
                torch.save(state, path / f"{at}_transform.pt")
        return moments

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Load each member; those that were empty are emptied.

        Returns:
            What became of each.

        Raises:
            ValueError: the checkpoint has another number of members; nothing was changed.
        """
        return self.loads_beside(storage, Path(path), None)

    def loads_beside(self, storage: Any, path: Path, written: list[Any] | None) -> list[Any]:
        """See `StorageCheckpointerBase.loads_beside`."""
        members = storage._storages
        file = path / _METADATA
        with reading(file):
            found = read_json(file)["empty_members"] if file.exists() else []
            empty = {int(member) for member in found}
        saved = {int(each.name) for each in path.iterdir() if each.name.isdigit()} | empty
        if saved != set(range(len(members))):
            raise ValueError(
                f"{path}: has the storages {sorted(saved)} of an ensemble, this one has "
                f"{len(members)}; nothing was changed"
            )
        if written is None or len(written) != len(members):
            written = [None] * len(members)
        states = {
            at: load_plainly(path / f"{at}_transform.pt")
            for at, transform in enumerate(storage._transforms or ())
            if hasattr(transform, "load_state_dict") and (path / f"{at}_transform.pt").exists()
        }
        loaded: list[Any] = []
        for at, (member, beside) in enumerate(zip(members, written, strict=True)):
            if at in empty:
                member.forget(keep_write_count=False)
                member.notify_emptied()
                loaded.append(None)
            else:
                loaded.append(apply_part(member, read_part(member, path / str(at)), beside))
        for at, state in states.items():
            with reading(path / f"{at}_transform.pt"):
                storage._transforms[at].load_state_dict(state)
        return loaded


def _state_of(transform: Any) -> Any:
    """The state of a transform that has some; None of a plain function."""
    return transform.state_dict() if hasattr(transform, "state_dict") else None
