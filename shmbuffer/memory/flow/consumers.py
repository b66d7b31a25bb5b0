"""Opens, lists and removes the consumers of a ring.

A consumer is identified by its name, and remains when its processes end. With ``holds``, writers do
not overwrite items that the consumer has not acknowledged, but wait.
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

_SEED_BITS = 40  # random bits of the first lease's number, so that leases of directories differ


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
        """Returns the consumer with a name, which is created if it does not exist.

        Args:
            name: Up to 48 bytes of UTF-8.
            times: Number of times that each item must be acknowledged.
            holds: If True, writers wait for the consumer.
            start: First item of a new consumer: the oldest existing item, or the next new one.
            timeout: Seconds to wait for another process that opens a consumer, or that creates or
                recovers the buffer.

        Raises:
            ConsumerError: The consumer exists with different ``times`` or ``holds``, or there are
                already eight consumers.
            ValueError: The start or the name is invalid, or the storage has several dimensions.
            SpaceError: There is not enough space for the data of the consumer.
        """
        encoded = self._encode_name(name, times, start)
        found = self._find(encoded)
        if found is None:
            with self._seat.backing.lock(timeout):
                self._seat.require_there()
                found = self._find(encoded)
                if found is None:
                    found = self._make(encoded, times, holds, newest=start == "newest")
        which, record = found
        if (int(record["times"]), bool(record["holds"])) != (times, holds):
            raise ConsumerError(
                f"{self._seat.where}: consumer {name!r} exists with max_sample_count "
                f"{int(record['times'])}{'' if record['holds'] else ' and without holding writers'}"
                f", not {times}{'' if holds else ' and without holding them'}; use the same, or "
                "another name",
                name=name,
            )
        return Consumer(self._calls, name, which, int(record["number"]))

    def known(self, name: str) -> Consumer | None:
        """Returns the consumer with a name, or None if there is no such consumer."""
        found = self._find(name.encode())
        return found and Consumer(self._calls, name, found[0], int(found[1]["number"]))

    def remove(self, name: str) -> bool:
        """Removes a consumer, so that no writer waits for it; False if there was no consumer."""
        found = self._find(name.encode())
        if found is None:
            return False
        try:
            self._calls.ask("remove_consumer", found[0], int(found[1]["number"]))
        except ConsumerError:  # another process has removed it
            return False
        return True

    def _encode_name(self, name: str, times: int, start: str) -> bytes:
        """Checks the arguments, and encodes the name of a consumer."""
        where, encoded = self._seat.where, name.encode()
        if not 0 < len(encoded) <= ledger.NAME_BYTES or "\0" in name:
            raise ValueError(
                f"{where}: the name of a consumer must have from 1 to {ledger.NAME_BYTES} bytes, "
                f"but is {name!r}"
            )
        if start not in ("oldest", "newest"):
            raise ValueError(f"{where}: start must be 'oldest' or 'newest', but is {start!r}")
        if not 1 <= times <= ledger.MOST_ACKS:
            raise ValueError(
                f"{where}: max_sample_count must be from 1 to {ledger.MOST_ACKS}, but is {times}"
            )
        if self._calls.schema.lanes:
            raise ValueError(
                f"{where}: a consumer needs a storage of one dimension, but this one has "
                f"{1 + len(self._calls.schema.lanes)}; create it with ndim=1"
            )
        return encoded

    def _map(self) -> Any:
        assert self._seat.mapped is not None
        return self._seat.mapped.ledger

    def _find(self, encoded: bytes) -> tuple[int, Any] | None:
        """Returns the place and a copy of a consumer's record; None if there is none."""
        for which, record in enumerate(ledger.consumers(self._map())):
            # another consumer may have reused the place
            number, known = int(record["number"]), record.copy()
            if (known["state"], known["name"]) == (ledger.CONSUMES, encoded):
                return (which, known) if known["number"] == number else None
        return None

    def _make(self, encoded: bytes, times: int, holds: bool, *, newest: bool) -> tuple[int, Any]:
        """Creates a consumer; the caller holds init.lock."""
        seat, records = self._seat, ledger.consumers(self._map())
        free = [at for at, one in enumerate(records) if one["state"] != ledger.CONSUMES]
        if not free:
            names = ", ".join(repr(one.name) for one in self.status())
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
        given = free[0], padded.ctypes.data, times, holds, newest, seed
        self._calls.ask("open_consumer", *given)
        return free[0], records[free[0]].copy()
