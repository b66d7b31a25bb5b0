"""Opens, lists and removes the consumers of a ring.

A consumer is identified by its name, and remains when its processes exit. With ``holds``, writers
wait before they overwrite an item that the consumer has not acknowledged.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import ConsumerError
from shmbuffer.memory.flow import consumer_status
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format import ledger

Start = Literal["oldest", "newest"]

_SEED_BITS = 40  # random bits in a consumer's first lease number, so that it differs per directory


class Consumers:
    """The consumers of one handle's ring. Available as `Ring.consumers`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seat = calls.seat

    def __bool__(self) -> bool:
        return bool(self._seat.control.runtime["consumers"][0])

    def status(self) -> list[ConsumerStatus]:
        """Returns the status of every consumer."""
        assert self._seat.mapped is not None
        return consumer_status.read_consumers(self._seat.mapped, self._seat.control)

    def open(
        self,
        name: str,
        *,
        times: int = 1,
        holds: bool = True,
        start: Start = "oldest",
        timeout: float = 60.0,
    ) -> Consumer:
        """Opens the consumer with a name. Creates it if it does not exist.

        Args:
            name: Up to 48 bytes of UTF-8.
            times: Number of times that each item must be acknowledged.
            holds: If True, writers wait for the consumer.
            start: Where a new consumer starts: ``"oldest"``, at the oldest existing item, or
                ``"newest"``, at the next item that is written.
            timeout: Seconds to wait for another process that opens a consumer, or that creates or
                recovers the buffer.

        Raises:
            ConsumerError: The consumer exists with different ``times`` or ``holds``, or the buffer
                already has eight consumers.
            ValueError: An argument is invalid, or the storage has several dimensions.
            SpaceError: There is not enough space for the data of the consumer.
        """
        encoded = self._encode_name(name, times, start)
        found = self._find(encoded)
        if found is None:
            with self._seat.backing.lock(timeout):
                self._seat.require_there()
                found = self._find(encoded)
                if found is None:
                    found = self._create(encoded, times, holds, newest=start == "newest")
        which, record = found
        recorded = int(record["times"]), bool(record["holds"])
        if recorded != (times, holds):
            raise ConsumerError(
                f"{self._seat.where}: consumer {name!r} already exists with "
                f"{_describe(*recorded)}, got {_describe(times, holds)}; use the same values, or "
                "another name",
                name=name,
            )
        return Consumer(self._calls, name, which, int(record["number"]))

    def known(self, name: str) -> Consumer | None:
        """Returns the existing consumer with a name, or None if there is no such consumer."""
        found = self._find(name.encode())
        return found and Consumer(self._calls, name, found[0], int(found[1]["number"]))

    def remove(self, name: str) -> bool:
        """Removes the consumer with a name, so that writers no longer wait for it.

        Returns False if there is no such consumer.
        """
        found = self._find(name.encode())
        if found is None:
            return False
        try:
            self._calls.ask("remove_consumer", found[0], int(found[1]["number"]))
        except ConsumerError:  # another process has removed the consumer
            return False
        return True

    def _encode_name(self, name: str, times: int, start: str) -> bytes:
        """Checks the arguments of `open`, and returns the name in UTF-8."""
        where, encoded = self._seat.where, name.encode()
        if not 0 < len(encoded) <= ledger.NAME_BYTES or "\0" in name:
            raise ValueError(
                f"{where}: the name of a consumer must have from 1 to {ledger.NAME_BYTES} bytes "
                f"and no NUL, got {name!r}"
            )
        if start not in ("oldest", "newest"):
            raise ValueError(f"{where}: start must be 'oldest' or 'newest', got {start!r}")
        if not 1 <= times <= ledger.MOST_ACKS:
            raise ValueError(
                f"{where}: max_sample_count must be from 1 to {ledger.MOST_ACKS}, got {times}"
            )
        if self._calls.schema.lanes:
            raise ValueError(
                f"{where}: a consumer needs a storage with one dimension, but this storage has "
                f"{1 + len(self._calls.schema.lanes)}; create it with ndim=1"
            )
        return encoded

    def _map(self) -> Any:
        assert self._seat.mapped is not None
        return self._seat.mapped.ledger

    def _find(self, encoded: bytes) -> tuple[int, Any] | None:
        """Returns the index and a copy of a consumer's record; None if it does not exist."""
        for which, record in enumerate(ledger.consumers(self._map())):
            # another process may reuse the record for a new consumer during the copy
            number, known = int(record["number"]), record.copy()
            if (known["state"], known["name"]) == (ledger.CONSUMES, encoded):
                return (which, known) if known["number"] == number else None
        return None

    def _create(self, encoded: bytes, times: int, holds: bool, *, newest: bool) -> tuple[int, Any]:
        """Creates a consumer, and returns the index and a copy of its record.

        The caller holds init.lock. Raises ConsumerError if all records are in use.
        """
        seat, records = self._seat, ledger.consumers(self._map())
        free = [at for at, record in enumerate(records) if record["state"] != ledger.CONSUMES]
        if not free:
            names = ", ".join(repr(status.name) for status in self.status())
            raise ConsumerError(
                f"{seat.where}: there are already {len(records)} consumers ({names}), which is the "
                "limit; remove one (shmbuffer consumers DIRECTORY --remove NAME)",
                name=encoded.decode(),
            )
        parts = _core.parts(self._calls.schema.capacity)
        start = parts["consumers"] + free[0] * parts["each"]
        seat.backing.extend_ledger(start, parts["each"])
        ledger.store_length(self._map(), start + parts["each"])
        padded = np.frombuffer(encoded.ljust(ledger.NAME_BYTES, b"\0"), np.uint8)
        seed = 1 + secrets.randbits(_SEED_BITS)
        arguments = free[0], padded.ctypes.data, times, holds, newest, seed
        self._calls.ask("open_consumer", *arguments)
        return free[0], records[free[0]].copy()


def _describe(times: int, holds: bool) -> str:
    """Describes the settings of a consumer for an error message."""
    return f"max_sample_count={times}" + ("" if holds else " and without blocking writers")
