"""Several writers as one, which does not write: each of its members does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from shmbuffer.replay.checkpoints import apply_members, dump_members, read_members
from shmbuffer.replay.members import is_everything, members
from shmbuffer.replay.writers.immutable import ImmutableDatasetWriter
from shmbuffer.replay.writers.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path


class WriterEnsemble(Writer):
    """The writers of the buffers of a `ReplayBufferEnsemble`.

    Args:
        *writers: one for each buffer.

    ``writers[i]`` is the i-th, any other index gives an ensemble of those that it names.

    Source: ``torchrl.data.WriterEnsemble``.
    """

    def __init__(self, *writers: Writer) -> None:
        self._writers = list(writers)

    def register_storage(self, storage: Any) -> None:
        """Write into the members of ``storage``, each writer into one.

        Raises:
            TypeError: ``storage`` is no `StorageEnsemble`.
            ValueError: it has another number of members.
        """
        inner = getattr(storage, "_storages", None)
        if inner is None:
            raise TypeError(
                f"a WriterEnsemble writes into a StorageEnsemble, got {type(storage).__name__}"
            )
        if len(inner) != len(self._writers):
            raise ValueError(f"{len(self._writers)} writers cannot serve {len(inner)} storages")
        super().register_storage(storage)
        for writer, member in zip(self._writers, inner, strict=True):
            writer.register_storage(member)

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: say which buffer."""
        raise RuntimeError(refusal("an item was given to the ensemble"))

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError: say which buffer."""
        raise RuntimeError(refusal("a batch was given to the ensemble"))

    @property
    def write_count(self) -> int:
        """Elements written so far into all buffers."""
        return sum(
            int(getattr(writer, "write_count", getattr(writer, "_write_count", 0)))
            for writer in self._writers
        )

    _write_count = write_count

    def state_dict(self) -> dict[str, Any]:
        """Each writer's state, under its number."""
        return {str(at): writer.state_dict() for at, writer in enumerate(self._writers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        for at, writer in enumerate(self._writers):
            writer.load_state_dict(state_dict[str(at)])

    def _dump(self, directory: Path, moment: Any) -> None:
        dump_members(self._writers, directory, moment)

    def _read(self, directory: Path) -> list[Any]:
        return read_members(self._writers, directory)

    def _apply(self, saved: list[Any], loaded: Any) -> None:
        apply_members(self._writers, saved, loaded)

    def _empty(self, empty_write_count: bool = True) -> None:
        for writer in self._writers:
            if isinstance(writer, ImmutableDatasetWriter):
                writer._empty()  # refuses, before another one is emptied
        for writer in self._writers:
            writer._empty(empty_write_count)

    def __getitem__(self, index: Any) -> Writer:
        if isinstance(index, tuple):
            if len(index) != 1:
                raise IndexError(f"a writer has no items, so {index!r} names nothing in there")
            index = index[0]
        if is_everything(index):
            return self
        found = members(index, len(self._writers), "writer")
        if isinstance(found, int):
            return self._writers[found]
        return WriterEnsemble(*(self._writers[at] for at in found))

    def __len__(self) -> int:
        """How many writers there are."""
        return len(self._writers)

    def __repr__(self) -> str:
        return f"WriterEnsemble({', '.join(map(repr, self._writers))})"


def refusal(what: str) -> str:
    """Why an ensemble is not written to."""
    return (
        f"{what}, which does not know for which of its buffers it is: write into one of them, "
        "ensemble[i].extend(data)"
    )
