"""Compares the learners' accounts of deliveries and reports what must not happen.

The rules are::

    D1  each written item is acknowledged as often as each consumer requires
    D2  no item is acknowledged more often, and each acknowledgement has a lease of its own
    D3  an item that is done is not delivered
    D4  no learner is given an item that a living learner holds under a lease that has not ended
    D5  an item under a lease is the item that was written, and it stays in its slot

An account is written in the same way as a history (history.py), with one row per item. An
acknowledgement without an outcome may have been applied or not.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmbuffer.memory.format.ledger import LeasedItems
from tests.torture.command import Figures
from tests.torture.history import append

ROW = np.dtype(
    [("kind", "<u2"), ("consumer", "<u2"), ("who", "<u4"), ("lease", "<u8"), ("key", "<u8")]
    + [(name, "<i8") for name in ("ticket", "until", "began", "ended", "unused")]
)
assert 4096 % ROW.itemsize == 0
NEVER = 2**63 - 1


class Kind(IntEnum):
    """The kind of a row in an account."""

    TOOK = 1
    """The item was delivered between ``began`` and ``ended``; its lease ends at ``until``."""
    ACKING = 2
    ACKED = 3
    """The acknowledgement was applied."""
    LATE = 4
    """The acknowledgement was refused."""
    RETURNED = 5
    """The learner is about to return the item."""
    KEY = 6
    """The learner has read the item and found ``key``."""


class Account:
    """The account of one learner. A ``with`` block, or the end of the process, closes it."""

    def __init__(self, folder: Path, chair: int, who: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"{chair}.taken", flags, 0o600)
        self._who = who

    def __enter__(self) -> Account:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    @staticmethod
    def read(folder: Path) -> NDArray[Any]:
        """Reads all accounts in a folder."""
        parts = [np.fromfile(path, ROW) for path in sorted(folder.glob("*.taken"))]
        return np.concatenate([*parts, np.empty(0, ROW)])

    def took(self, consumer: int, taken: LeasedItems, began: int, lease_s: float) -> None:
        until = min(began + lease_s * 1e9, float(NEVER - 1024))
        self._note(consumer, taken, Kind.TOOK, began=began, until=int(until))

    def acknowledging(self, consumer: int, taken: LeasedItems) -> None:
        self._note(consumer, taken, Kind.ACKING)

    def acknowledged(self, consumer: int, taken: LeasedItems, applied: NDArray[np.bool_]) -> None:
        self._note(consumer, taken, np.where(applied, Kind.ACKED, Kind.LATE))

    def gave_back(self, consumer: int, taken: LeasedItems) -> None:
        self._note(consumer, taken, Kind.RETURNED)

    def keys(self, consumer: int, taken: LeasedItems, keys: ArrayLike) -> None:
        self._note(consumer, taken, Kind.KEY, key=keys)

    def _note(self, consumer: int, taken: LeasedItems, kind: ArrayLike, **more: ArrayLike) -> None:
        rows = np.zeros(len(taken.tickets), ROW)
        now = time.monotonic_ns()
        told = {"kind": kind, "consumer": consumer, "who": self._who, "lease": taken.lease}
        told |= {"ticket": taken.tickets, "began": now, "ended": now, **more}
        for name, value in told.items():
            rows[name] = value
        append(self._file, rows)


class Deliveries:
    """Compares all accounts after all processes have ended.

    Args:
        rows: the result of `Account.read`.
        batches: the batches of the writers, as in `History.batches`.
        times: how often each consumer has to acknowledge each item.
    """

    def __init__(self, rows: NDArray[Any], batches: Any, times: tuple[int, ...]) -> None:
        self.rows, self.times = rows, times
        self.written = {
            int(one["ticket"]) + i: int(one["key"]) + i
            for one in batches
            if one["ticket"] >= 0
            for i in range(int(one["count"]))
        }
        self.lived: dict[int, int] = defaultdict(int)  # time of the last entry
        for who, ended in zip(rows["who"].tolist(), rows["ended"].tolist(), strict=True):
            self.lived[who] = max(self.lived[who], ended)
        self.each: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for row in rows:
            self.each[int(row["consumer"]), int(row["ticket"])].append(row)

    def violations(self) -> list[str]:
        """Describes each violation in words; the list is empty if there is none."""
        found = [
            f"D1: consumer {consumer} was never given {ticket}"
            for consumer in range(len(self.times))
            for ticket in sorted(
                self.written.keys() - {at for of, at in self.each if of == consumer}
            )
        ]
        for (consumer, ticket), rows in sorted(self.each.items()):
            of = f"consumer {consumer}, ticket {ticket}"
            found += [f"{what} ({of})" for what in self._of_item(consumer, ticket, rows)]
        return found

    def _of_item(self, consumer: int, ticket: int, rows: list[Any]) -> list[str]:
        times, found = self.times[consumer], []
        done = sorted(
            {int(one["lease"]): int(one["ended"]) for one in _of(rows, Kind.ACKED)}.values()
        )
        settled = {int(one["lease"]) for one in rows if one["kind"] in (Kind.ACKED, Kind.LATE)}
        begun = {int(one["lease"]) for one in _of(rows, Kind.ACKING)}
        if len(done) + len(begun - settled) < times:
            found.append(f"D1: it was acknowledged {len(done)} times, not {times}")
        if len(done) > times:
            found.append(f"D2: it was acknowledged {len(done)} times, not {times}")
        took = _of(rows, Kind.TOOK)
        if len(done) >= times and any(one["began"] > done[times - 1] for one in took):
            found.append("D3: it was done, and given again")
        holds = sorted((int(one["ended"]), self._held_until(one, rows)) for one in took)
        until = 0
        for since, to in holds:
            if since < min(until, to):
                found.append(f"D4: two had it at {since}")
            until = max(until, to)
        keys = {int(one["key"]) for one in _of(rows, Kind.KEY)}
        if not keys <= {self.written.get(ticket, *keys)} or len(keys) > 1:
            found.append(f"D5: it was read as {keys}, and is {self.written.get(ticket)}")
        return found

    def _held_until(self, took: Any, rows: list[Any]) -> int:
        """Returns the time until which a learner held an item, at least.

        The learner held it until the lease ended, until the last entry of the learner, or until
        it acknowledged or returned the item.
        """
        ends = [
            int(one["began"])
            for one in rows
            if one["kind"] in (Kind.ACKING, Kind.RETURNED) and one["lease"] == took["lease"]
        ]
        return min([int(took["until"]), self.lived[int(took["who"])], *ends])

    def figures(self) -> Figures:
        """Counts what was compared."""
        kinds = self.rows["kind"]
        takes = int(np.count_nonzero(kinds == Kind.TOOK))
        return {
            "items_checked": len(self.each),
            "deliveries": takes,
            "redeliveries": takes
            - len(np.unique(self.rows[kinds == Kind.TOOK][["consumer", "ticket"]])),
            "late_acks": int(np.count_nonzero(kinds == Kind.LATE)),
            "keys_read": int(np.count_nonzero(kinds == Kind.KEY)),
        }


def _of(rows: list[Any], kind: Kind) -> list[Any]:
    return [one for one in rows if one["kind"] == kind]
