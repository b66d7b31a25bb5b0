"""Proves from the items, without the engine's counters, that no item was lost or torn.

    collector   sign(rows) ──▶ extend(rows) ──it has returned──▶ acknowledge()
                stamp = hash of the row's bytes       8 bytes, to a file that no buffer knows of
    any process examine()   every acknowledged item exists, and every item matches its stamp

An item contains its writer (``source``: one process of one collector), its number in that writer's
``sequence``, and its ``stamp``. A writer that is killed between ``extend`` and ``acknowledge``
leaves committed items that are not acknowledged. This is not a fault.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from shmbuffer import ReplayBuffer
from shmbuffer.saves.safe_files import create_file, make_folders, read_file

SIGNED = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "terminated"),
    "gamma",
    "source",
    "sequence",
)
"""Leaves from which a stamp is computed, in this order."""

LIVES = 1_000
"""Largest number of processes of one collector: source = index * LIVES + life."""

ACKNOWLEDGEMENT = struct.Struct("<q")
"""Number of acknowledged items of a writer; the last number in a file is valid."""

MULTIPLIER = np.uint64(
    0x9E3779B97F4A7C15
)  # 2 ** 64 / golden ratio, an odd number without a pattern
SHIFT = np.uint64(32)

CHUNK = 8_192  # number of items that are read at a time


class Ledger:
    """The items of one process of collector ``index``, and the number that it acknowledged."""

    def __init__(self, directory: Path, index: int) -> None:
        make_folders(directory)
        self.source, self._file = _first_free(directory, index)
        self._signed = 0

    def sign(self, rows: TensorDictBase) -> TensorDictBase:
        """Adds ``source``, ``sequence`` and ``stamp`` to a batch ``[n]``, and returns it."""
        n = len(rows)
        rows["source"] = torch.full((n,), self.source)
        rows["sequence"] = torch.arange(self._signed, self._signed + n)
        rows["stamp"] = stamps(rows)
        self._signed += n
        return rows

    def acknowledge(self) -> None:
        """Records after ``extend`` that all signed items are in the buffer."""
        os.write(self._file.fileno(), ACKNOWLEDGEMENT.pack(self._signed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def stamps(rows: TensorDictBase) -> torch.Tensor:
    """Returns a hash of the `SIGNED` leaves of each row of a batch, int64 ``[n]``."""
    n = len(rows)
    parts = [rows[key].reshape(n, -1).numpy().view(np.uint8) for key in SIGNED]
    padding = np.zeros((n, -sum(part.shape[1] for part in parts) % 8), np.uint8)
    words = np.concatenate([*parts, padding], axis=1).view(np.uint64)
    mixed = np.zeros(n, np.uint64)
    for column in words.T:
        mixed = (mixed ^ column) * MULTIPLIER
        mixed ^= mixed >> SHIFT
    return torch.from_numpy(mixed.view(np.int64))


def torn(rows: TensorDictBase) -> int:
    """Returns the number of rows of a batch that do not match their stamp."""
    return int((stamps(rows) != rows["stamp"]).sum())


@dataclass(frozen=True)
class Evidence:
    """Result of examining the items of a buffer."""

    items: int  # number of items in the buffer
    acknowledged: int  # number of items that their writers acknowledged
    lost: int  # number of acknowledged items that are missing and were not overwritten
    torn: int  # number of items whose bytes do not match their stamp
    repeated: int  # number of items that occur more than once
    unacknowledged: int  # number of items whose writer was killed before it acknowledged them


def examine(replay: ReplayBuffer, ledgers: Path) -> Evidence:
    """Compares all items of a buffer with their stamps and with the ledgers of their writers."""
    # A ring overwrites the oldest items of each writer first. Once the buffer has been full, a
    # missing item therefore counts as lost only if an older item of the same writer exists.
    return total(examine_each([replay], ledgers).values())


def total(found: Iterable[Evidence]) -> Evidence:
    """Returns the sum of the results of several writers."""
    each, names = list(found), [field.name for field in fields(Evidence)]
    return Evidence(**{name: sum(getattr(one, name) for one in each) for name in names})


def examine_each(replays: Sequence[ReplayBuffer], ledgers: Path) -> dict[int, Evidence]:
    """Examines the items of several buffers, and returns a result for each ``source``."""
    known_of = acknowledged(
        ledgers
    )  # read before the items, so that each acknowledged item must exist
    ring_was_full = any(replay.write_count > len(replay) for replay in replays)
    chunks: list[NDArray[np.int64]] = [np.zeros((3, 0), np.int64)]
    for replay in replays:
        for rows in replay.iter_in_order(CHUNK) if len(replay) else ():
            is_torn = (stamps(rows) != rows["stamp"]).numpy()
            chunks.append(np.stack([rows["source"].numpy(), rows["sequence"].numpy(), is_torn]))
    source, sequence, is_torn = np.concatenate(chunks, axis=1)

    found = {}
    for writer in sorted({*known_of, *source.tolist()}):
        known = known_of.get(writer, 0)
        mine = source == writer
        there, copies = np.unique(sequence[mine], return_counts=True)
        oldest = 0
        if ring_was_full:
            oldest = int(there[0]) if len(there) else known
        found[writer] = Evidence(
            items=int(mine.sum()),
            acknowledged=known,
            lost=max(0, known - oldest) - int((there < known).sum()),
            torn=int(is_torn[mine].sum()),
            repeated=int((copies - 1).sum()),
            unacknowledged=int((there >= known).sum()),
        )
    return found


def _first_free(directory: Path, index: int) -> tuple[int, BinaryIO]:
    """Returns the number and the open file of an unused ledger."""
    for source in range(index * LIVES, (index + 1) * LIVES):
        try:
            return source, create_file(directory / f"{source}.ledger")
        except FileExistsError:
            continue
    raise RuntimeError(f"{directory}: collector {index} has been started {LIVES} times")


def acknowledged(directory: Path) -> dict[int, int]:
    """Returns the number of items that each writer has acknowledged."""
    counts = {}
    for path in directory.glob("*.ledger"):
        written = read_file(path)
        end = len(written) // ACKNOWLEDGEMENT.size * ACKNOWLEDGEMENT.size
        last = written[max(0, end - ACKNOWLEDGEMENT.size) : end]
        counts[int(path.stem)] = ACKNOWLEDGEMENT.unpack(last)[0] if last else 0
    return counts
