"""Storage for a data set in read-only files, with priorities in a separate table.

    <path>/               the items, mapped for reading by every process that uses them
    <priorities>/         a buffer without leaves: slot, ticket and priority of each item

Without ``priorities`` the table is in anonymous memory, which spawned and forked processes share.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.items.mover import Drawn, DrawnElements, draw_from, draw_into
from shmbuffer.memory import Ring, Schema
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.checkpointers.read_only_checkpointer import ReadOnlyStorageCheckpointer
from shmbuffer.saves.checkpointers.saved import Saved
from shmbuffer.saves.safe_files import require_plain
from shmbuffer.saves.values import read_json
from shmbuffer.storages.location import Location
from shmbuffer.storages.movers.held_rows import HeldRows
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form.tensor_kit import TENSORS
from shmbuffer.tensors.form.tensors import take_rows


class ReadOnlyStorage(TensorStorage):
    """A read-only storage for a data set in files.

    Learners that open the same directory share its pages, so that a data set of 100 GB is in memory
    at most once. Writes raise RuntimeError.

    Args:
        path: directory of the data set. It was written by ``dumps`` of a buffer or storage (of
            shmbuffer or TorchRL), or it has the layout of ``TensorDict.memmap`` and TorchRL's data
            sets. The path can be a link, but the files in the directory must not be links.
        priorities: directory for the priorities. Several processes can share it, and it is kept if
            they are killed. With None, the priorities are in memory that is shared with the
            processes that receive the storage.
        device: device of the samples.
        ndim: number of leading dimensions of the data that belong to the storage.
        strict: if True, an unusable column is an error instead of a warning. A column is unusable
            if samples already have a key with its name, such as ``"index"``.

    Raises:
        FileNotFoundError: there is no data set at ``path``.
        BufferExistsError: the directory belongs to a buffer in use.
        SchemaMismatchError: ``priorities`` belongs to a data set of a different size.
        CorruptBufferError: a file is too short or cannot be read.
        UnsafePathError: the directory contains a link, a FIFO or a device.
        ValueError: an entry is stored as a pickle, which is never loaded. Also if a column is
            unusable and ``strict`` is True.

    Cost: one mapping per leaf, and a table of 50 bytes per item.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import ImmutableDatasetWriter, ReadOnlyStorage
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> folder = tempfile.TemporaryDirectory()
        >>> data = TensorDict({"obs": torch.arange(4)}, [4])
        >>> files = data.memmap(folder.name)
        >>> rb = TensorDictReplayBuffer(
        ...     storage=ReadOnlyStorage(folder.name),
        ...     writer=ImmutableDatasetWriter(),
        ...     batch_size=2,
        ... )
        >>> len(rb), rb[3]["obs"].item()
        (4, 3)
        >>> folder.cleanup()
    """

    _default_checkpointer = ReadOnlyStorageCheckpointer  # type: ignore[assignment] # no copy of items
    _is_lazy = True  # the caller passes no tensors

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        priorities: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        strict: bool = False,
    ) -> None:
        self.path = resolve_path(path)
        self._location = Location(scratch_dir=priorities, shared_init=priorities is not None)
        saved = _open_saved(self.path, ndim)
        report_losses(self.path, _unusable_columns(saved), strict=strict)
        record = saved.record
        super().__init__(None, record.slots * record.width, device=device, ndim=ndim)
        ring = self.engine().define(Schema((), record.slots, record.lanes, {"kind": "held"}))
        self._map(ring, saved)
        present = np.flatnonzero(record.present)
        with self.engine().seat.backing.lock(60.0):
            # If the ring is empty, no other process has marked the slots of the items yet.
            if not ring.length and len(present):
                ring.claims.claim_slots(present, in_place=True)
                ring.claims.commit()

    def _map(self, ring: Ring, saved: Saved) -> Rows:
        self._files = Path(os.path.realpath(saved.where))
        leaves = self._describe(saved.example(), single=False)
        return self._use_rows(_ReadOnlyRows(ring, leaves, saved.columns(leaves)))

    def _attach_ring(self, ring: Ring) -> Rows:
        return self._map(ring, _open_saved(self.path, self.ndim))

    @property
    def supports_conditional_update(self) -> bool:
        """False, because the data set never changes."""
        return False

    @property
    def where(self) -> str:
        """Name of the data set in messages."""
        return str(self.path)

    def _has_files_in(self, path: Path) -> bool:
        """Raises RuntimeError if a save to ``path`` would replace the files of the data set.

        Otherwise returns False, because the storage has no files of its own.
        """
        if self._files.is_relative_to(os.path.realpath(path)):
            raise RuntimeError(
                f"{path}: this directory contains the data set, and a save would replace the data "
                "set with a reference to itself; save to another directory. Nothing was changed"
            )
        return False

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError, because the storage is read-only."""
        raise RuntimeError(
            f"{self.path}: the data set is read-only, and nothing was changed; to change items, "
            "copy them into a buffer with prefill_replay_buffer()"
        )

    append = put = change = change_if_present = forget = _refuse

    def state_dict(self) -> dict[str, Any]:
        """Returns the path and size of the data set, but none of its items."""
        return {"initialized": True, "path": str(self.path), "max_size": self.max_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that a state belongs to a data set of this size. Loads nothing.

        Raises:
            ValueError: the state belongs to a data set of a different size or another storage.
        """
        if state_dict.get("max_size") != self.max_size:
            raise ValueError(
                f"{self.path}: this data set has {self.max_size} items, but the state belongs to a "
                f"data set of {state_dict.get('max_size')} items in {state_dict.get('path')}; load "
                "the state of the same data set"
            )

    def __getstate__(self) -> dict[str, Any]:
        return RingBacked.__getstate__(self)  # the receiving process maps the files again


def _open_saved(path: Path, ndim: int) -> Saved:
    if path.exists():
        require_plain(path)
    return Saved.of_data_set(path, ndim=ndim)


def _unusable_columns(saved: Saved) -> dict[str, str]:
    """Returns a warning for each column that has the name of a key that samples add."""
    file = Path(saved.where) / "meta.json"
    found = OWN_KEYS.intersection(read_json(file)) if file.exists() else ()
    return {
        key: f"Column {key!r} is left out because a sample has a key of its own under that name; "
        "rename the column."
        for key in sorted(found)
    }


def report_losses(
    where: str | os.PathLike[str], losses: Mapping[str, str], *, strict: bool
) -> None:
    """Warns about columns that are left out or incomplete.

    The warning shows the line that called the caller of this function.

    Raises:
        ValueError: ``strict`` is True and ``losses`` is not empty.
    """
    if losses:
        message = f"{os.fspath(where)}: {' '.join(losses.values())}"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)


class _ReadOnlyRows(HeldRows):
    """Rows in files that never change. A drawn item therefore cannot be overwritten."""

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws elements, and returns their leaves, indices, tickets and weights."""
        index, tickets, weights = draw_from(TENSORS, self.ring, count, key, beta)
        return self._take(index), index, tickets, weights

    def fill(
        self,
        tensors: Sequence[torch.Tensor],
        first: int,
        drawn: DrawnElements,
        key: int,
        beta: float | None,
    ) -> None:
        """Draws elements, and copies them to rows of ``tensors``, starting at row ``first``.

        Other rings fill the remaining rows.
        """
        draw_into(self.ring, None, drawn, key, beta)
        rows = slice(first, first + len(drawn[0]))
        for column, tensor in zip(self._flat, tensors, strict=True):
            take_rows(column, drawn[0], out=tensor[rows])
