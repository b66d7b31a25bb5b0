"""Dead buffers whose ledger contains consumers, leases and a reservation, to be damaged."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np

from shmbuffer import EmptyBufferError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format import layout, ledger
from tests.crash import harness
from tests.damage.cells import Cell, fields
from tests.damage.specimen import Specimen

CONSUMERS = ("waits", "beside")


class ConsumedSpecimen(Specimen):
    """A buffer whose last client died with two leases and a reservation."""

    def _live(self) -> None:
        super()._live()
        assert harness.ended(harness.fork(lambda: _consume(self.path))) != 0


def _consume(path: Path) -> None:
    ring = Engine.open(path, None).ring()
    assert ring is not None
    ring.reservations.reserve(1)
    for name in CONSUMERS:
        consumer = ring.consumers.open(name, holds=name == "waits")
        taken = consumer.take(3)
        consumer.ack(taken.lease, taken.slots[:2], taken.tickets[:2])
        consumer.take(1, 60.0)
    os.kill(os.getpid(), signal.SIGKILL)


def ledger_cells(specimen: Specimen) -> list[Cell]:
    """Returns the head, the used parts of the ledger, and one unused part of each kind."""
    content, parts = specimen.files[layout.LEDGER], _core.parts(harness.CAPACITY)
    found = [
        *(
            Cell(f"ledger.{name}", layout.LEDGER, int(ledger.HEAD.fields[name][1]), 8)  # type: ignore[index]
            for name in ("next_lease", "bytes")
        ),
    ]
    for which in range(len(CONSUMERS) + 1):
        at = which * ledger.CONSUMER.itemsize
        found += fields(ledger.CONSUMER, f"consumer[{which}]", at, layout.LEDGER)
    for which in range(len(CONSUMERS)):
        start = parts["consumers"] + which * parts["each"]
        leases = np.frombuffer(content, ledger.LEASE, ledger.LEASES, start)
        used = leases["id"].nonzero()[0].tolist()
        assert len(used) == 2
        for place in (*used, (used[0] + 5) % ledger.LEASES):
            at = start + place * ledger.LEASE.itemsize
            found += fields(ledger.LEASE, f"lease[{which}][{place}]", at, layout.LEDGER)
        for slot in range(harness.CAPACITY):
            at = start + parts["deliveries"] + slot * ledger.DELIVERY.itemsize
            found += fields(ledger.DELIVERY, f"delivery[{which}][{slot}]", at, layout.LEDGER)
    for place in (0, 1):
        at = parts["reservations"] + place * ledger.RESERVATION.itemsize
        found += fields(ledger.RESERVATION, f"reservation[{place}]", at, layout.LEDGER)
    return found


def acknowledge_all(ring: Ring) -> int:
    """Takes and acknowledges all items of each consumer, none twice, so that a writer can go on."""
    found = 0
    for one in ring.consumers.status():
        consumer = ring.consumers.open(one.name, times=one.max_sample_count, holds=one.holds)
        seen: Counter[int] = Counter()
        for _ in range(2 + one.max_sample_count * ring.capacity):
            try:
                taken = consumer.take(3)
            except EmptyBufferError:
                break
            seen.update(taken.tickets.tolist())
            assert consumer.ack(taken.lease, taken.slots, taken.tickets).refused == 0
        else:
            raise AssertionError(f"consumer {one.name!r} never comes to an end: {seen}")
        assert max(seen.values(), default=0) <= one.max_sample_count, "an item comes twice"
        found += seen.total()
    return found
