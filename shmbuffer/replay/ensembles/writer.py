"""Several writers as one, which does not write: each of its members does."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shmbuffer.replay.ensembles.members import Ensemble
from shmbuffer.replay.ensembles.rows import BUFFER_IDS, routes
from shmbuffer.replay.ensembles.storage import StorageEnsemble
from shmbuffer.replay.writers import ImmutableDatasetWriter, Writer


class WriterEnsemble(Ensemble, Writer):
    """The writers of the buffers of a `ReplayBufferEnsemble`.

    Args:
        *writers: one for each buffer.

    ``writers[i]`` is the i-th, any other index gives an ensemble of those that it names.

    Source: ``torchrl.data.WriterEnsemble``.
    """

    _what = "writer"

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self._members = list(writers)

    def register_storage(self, storage: Any) -> None:
        """Write into the members of ``storage``, each writer into one.

        Raises:
            TypeError: ``storage`` is no `StorageEnsemble`.
            ValueError: it has another number of members.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(
                f"a WriterEnsemble writes into a StorageEnsemble, got {type(storage).__name__}"
            )
        if len(storage) != len(self):
            raise ValueError(f"{len(self)} writers cannot serve {len(storage)} storages")
        super().register_storage(storage)
        for writer, member in zip(self._members, storage._members, strict=True):
            writer.register_storage(member)

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: say which buffer."""
        raise RuntimeError(refusal("an item was given to the ensemble"))

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError: say which buffer."""
        raise RuntimeError(refusal("a batch was given to the ensemble"))

    @property
    def tracks_generations(self) -> bool:
        """Whether all of them do."""
        return all(writer.tracks_generations for writer in self._members)

    def generations_of(self, index: Any) -> torch.Tensor:
        """See `Writer.generations_of`.

        Args:
            index: a TensorDict ``[...]`` with ``"buffer_ids"`` and ``"index"``, as a write or a
                sample has it.

        Returns:
            Tickets, int64 ``[n]``, in the order of the flat index.
        """
        found = torch.full(index.get(BUFFER_IDS).shape, -1).reshape(-1)
        for part in routes(index, self._storage, {}):
            found[part.rows] = self._members[part.at].generations_of(part.where)
        return found

    @property
    def write_count(self) -> int:
        """Elements written so far into all buffers."""
        return sum(
            int(getattr(writer, "write_count", getattr(writer, "_write_count", 0)))
            for writer in self._members
        )

    _write_count = write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        self.require_no_data_set()
        for writer in self._members:
            writer._empty(empty_write_count)

    def require_no_data_set(self) -> None:
        """RuntimeError where one of them cannot be emptied; nothing was."""
        for writer in self._members:
            if isinstance(writer, ImmutableDatasetWriter):
                writer._empty()

    def _some(self, found: list[int]) -> WriterEnsemble:
        return WriterEnsemble(*(self._members[at] for at in found))


def refusal(what: str) -> str:
    """Why an ensemble is not written to."""
    return (
        f"{what}, which does not know for which of its buffers it is: write into one of them, "
        "ensemble[i].extend(data)"
    )
