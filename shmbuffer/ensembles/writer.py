"""Several writers as one; only its members write."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shmbuffer.ensembles.members import Ensemble
from shmbuffer.ensembles.stacked_rows import BUFFER_IDS, routes
from shmbuffer.ensembles.storage import StorageEnsemble
from shmbuffer.tensors.form import cpu
from shmbuffer.writers import ImmutableDatasetWriter, Writer
from shmbuffer.writers.writer import write_count_of


class WriterEnsemble(Ensemble, Writer):
    """The writers of the buffers of a `ReplayBufferEnsemble`.

    Args:
        *writers: one for each buffer.

    ``writers[i]`` is the i-th, any other index gives an ensemble.

    Source: ``torchrl.data.WriterEnsemble``.
    """

    _what = "writer"

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self._members = list(writers)

    def register_storage(self, storage: Any) -> None:
        """Register each writer with its member of a `StorageEnsemble` of the same length."""
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
        """True if all of them track generations."""
        return all(writer.tracks_generations for writer in self._members)

    def generations_of(self, index: Any) -> torch.Tensor:
        """`Writer.generations_of` for an index of a write or a sample; flat."""
        found = cpu.full(index.get(BUFFER_IDS).shape, -1, dtype=torch.int64).reshape(-1)
        for part in routes(index, self._storage, {}):
            found[part.rows] = self._members[part.at].generations_of(part.where)
        return found

    @property
    def write_count(self) -> int:
        """Elements written so far into all buffers."""
        return sum(map(write_count_of, self._members))

    _write_count = write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        self.require_no_data_set()
        for writer in self._members:
            writer._empty(empty_write_count)

    def require_no_data_set(self) -> None:
        """RuntimeError if one of them cannot be emptied."""
        for writer in self._members:
            if isinstance(writer, ImmutableDatasetWriter):
                writer._empty()

    def _some(self, found: list[int]) -> WriterEnsemble:
        return WriterEnsemble(*(self._members[at] for at in found))


def refusal(what: str) -> str:
    """The message for a write into an ensemble."""
    return (
        f"{what}, which cannot choose the buffer for it: write into one of them, "
        "ensemble[i].extend(data)"
    )
