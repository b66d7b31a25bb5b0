"""Scripts that are recorded. They run the protocols that store to a buffer's files.

Each script runs in its own process, and creates or opens `path`. It reports by marks what it
begins, what has returned, and what a flush covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.directory import growth
from shmbuffer.memory.mapped.settings import Reserve
from tests.kit.rings import ring_of
from tests.memory import rows
from tests.memory.numbered import records
from tests.power.contents import CAPACITY, DICTIONARY, RECORD_BYTES, schema
from tests.power.recorder import Reporter

SETTINGS = Settings(capacity=CAPACITY, alpha=0.5, eps=0.0)


def settings(kind: str) -> Settings:
    return replace(SETTINGS, record_bytes=RECORD_BYTES[kind])


class Client:
    """A handle whose calls are marked."""

    def __init__(
        self,
        reporter: Reporter,
        path: Path,
        kind: str,
        *,
        defines: bool = True,
        reserve: Reserve = "all",
    ) -> None:
        self.reporter = reporter
        self.kind = kind
        self.engine = Engine.open(path, replace(settings(kind), reserve=reserve))
        if defines:
            self.engine.define(schema(kind))

    @property
    def ring(self) -> Ring:
        return ring_of(self.engine)

    def write(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self.reporter.mark("invoke", numbers=numbers)
        write(self.ring, numbers)
        self.reporter.mark("ok")

    def place(self, where: list[int], numbers: list[int], *, in_place: bool) -> None:
        self.reporter.mark("invoke", numbers=numbers)
        if self.ring.records is not None:
            batch = records(numbers)
            self.ring.records.place(np.array(where), batch, in_place=in_place)
        else:
            rows.place(self.ring, where, numbers, in_place=in_place)
        self.reporter.mark("ok")

    def update(self, priorities: list[float]) -> None:
        index = self.ring.live.committed()[: len(priorities)]
        self.ring.update(index, np.array(priorities[: len(index)]))

    def flush(self) -> None:
        self.reporter.mark("flush")
        self.engine.flush()
        self.reporter.mark("flushed")

    def empty(self) -> None:
        self.reporter.mark("empty")
        self.ring.empty()


def write(ring: Ring, numbers: list[int]) -> None:
    priorities = np.array(numbers) + 1.0
    if ring.records is not None:
        ring.records.write(records(numbers), priorities)
    else:
        rows.write(ring, numbers, priorities)


Script = Callable[[Reporter, Path, str], None]


def writes(reporter: Reporter, path: Path, kind: str) -> None:
    """Creates, defines, writes, flushes, and overwrites."""
    client = Client(reporter, path, kind)
    client.write([1, 2, 3])
    client.flush()
    client.write([4, 5])
    client.write(range(6, 9))
    client.flush()
    client.write([9, 10, 11])
    client.engine.close()


def changes(reporter: Reporter, path: Path, kind: str) -> None:
    """Changes priorities, alpha and settings, places items, empties, and writes again."""
    client = Client(reporter, path, kind)
    client.write(range(20, 23))
    client.write(range(23, 26))
    client.update([7.0, 8.0, 9.0])
    client.flush()
    client.update([70.0, 80.0])
    client.place([1, 4], [30, 31], in_place=True)
    client.flush()
    client.place([0, 2], [32, 33], in_place=False)
    client.ring.tree.set_alpha(0.7)
    client.engine.update_settings(extra={"a": 1})
    client.engine.update_settings(extra={"b": 2})
    client.flush()
    client.empty()
    client.write([40, 41])
    client.flush()
    client.write([42])
    client.engine.close()


def consumed(reporter: Reporter, path: Path, kind: str) -> None:
    """Gives items to a consumer, acknowledges some, and flushes."""
    client = Client(reporter, path, kind)
    client.write([130, 131, 132])
    consumer = client.ring.consumers.open("a")
    for number, count, most in ((133, 2, 2), (134, 1, 0), (135, 2, 1)):
        taken = consumer.take(count)
        reporter.mark("acks", tickets=taken.tickets[:most].tolist())
        consumer.ack(taken.lease, taken.slots[:most], taken.tickets[:most])
        client.flush()
        client.write([number])
    client.engine.close()


def writers(reporter: Reporter, path: Path, kind: str) -> None:
    """Runs two writers. One writes during the other's flush, and is killed at the end."""
    one = Client(reporter, path, kind)
    one.write([50, 51, 52])
    other = Client(reporter, path, kind)
    other.write([53, 54])
    numbers = iter(range(60, 80))
    passed, busy = _core.reached, []

    def reached(name: str) -> None:
        passed(name)
        if name.startswith("flush.") and not busy:
            busy.append(name)
            other.write([next(numbers)])
            busy.clear()

    _core.reached = reached
    one.flush()
    one.write([55])
    one.flush()
    _core.reached = passed
    if kind == "rows":
        other.ring.claims.claim(2)  # this claim is open when the machine stops
        one.flush()
    one.write([56])
    one.engine.close()


def grows(reporter: Reporter, path: Path, kind: str) -> None:
    """Writes rows to a ring that grows in steps, at the head and in the middle."""
    growth.STEP_BYTES = 2 * sum(schema(kind).bytes_of_slots(1))
    client = Client(reporter, path, kind, reserve="steps")
    client.write([90, 91])
    client.flush()
    client.write([92])
    client.place([5], [93], in_place=False)
    client.flush()
    client.write([94, 95, 96, 97, 98])
    client.engine.close()


def restarts(reporter: Reporter, path: Path, kind: str) -> None:
    """Kills a writer during a write; the next process of the same boot recovers and continues."""
    client = Client(reporter, path, kind)
    client.write([80, 81, 82])
    client.flush()
    client.write([83, 84])
    _forget(client)
    client = Client(reporter, path, kind)
    client.write([85, 86])
    client.flush()
    client.write([87])
    client.engine.close()


def goes_on(reporter: Reporter, path: Path, kind: str) -> None:
    """Recovers after a power cut, writes and flushes."""
    client = Client(reporter, path, kind)
    client.write([100, 101])
    client.flush()
    client.write([102, 103])
    client.engine.close()


def removed(reporter: Reporter, path: Path, kind: str) -> None:
    """Creates a buffer beside a file of the user, fills it, removes it, and creates it again."""
    path.mkdir()
    (path / "mine").write_text("of the user")
    client = Client(reporter, path, kind)
    client.write([110, 111])
    client.flush()
    reporter.mark("remove")
    client.engine.cleanup()
    client.engine.close()
    Client(reporter, path, kind, defines=False).engine.close()


def trained(reporter: Reporter, path: Path, kind: str) -> None:
    """Publishes a dictionary and writes records that need it."""
    client = Client(reporter, path, kind)
    client.engine.seat.publish_dictionary(DICTIONARY)
    reporter.mark("published")
    client.write([120, 121])
    client.flush()
    client.engine.close()


def _forget(client: Client) -> None:
    """Drops a client as if its process had been killed: it returns nothing, and holds no lock."""
    membership = client.engine.seat.membership
    client.engine.seat._finalizer.detach()
    client.engine.seat.closed = True
    assert membership.liveness is not None
    membership.liveness.close()
