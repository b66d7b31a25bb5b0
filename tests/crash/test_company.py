"""The victim is not alone: other processes write and learn while it dies, or wait for its mutex."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from shmbuffer import EmptyBufferError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Schema, Settings
from tests.crash.deeds import DEEDS, PAIRS, begins, is_done, prepare
from tests.crash.harness import (
    LEAVES,
    dies,
    ended,
    fork,
    native_points,
    read_all,
    require_sound,
    require_usable,
    sample,
    stopped_at,
    waits_for_the_mutex_of,
    write,
)
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

SLOTS = 512
ROUNDS = 12
"""Number of items that the second writer writes while one victim dies."""


def sample_some(ring: Ring, key: int) -> None:
    with suppress(EmptyBufferError):  # another process has emptied the buffer in the meantime
        sample(ring, 8, key=key)


def update_some(ring: Ring) -> None:
    index = np.arange(0, SLOTS, 7, dtype=np.int64)
    tickets = (ring.live.words[index] >> np.uint64(2)).astype(np.int64)
    ring.update(index, np.full(len(index), 2.0), tickets)


class Companion:
    """A process that works whenever it is told to, and reports when it is done."""

    #: Our ends of all pipes. A copy in another process would keep the reader of a pipe waiting.
    open: ClassVar[list[int]] = []

    def __init__(self, path: Path, writes: bool) -> None:
        hear, self._tell = os.pipe()
        self._told, say = os.pipe()
        Companion.open += [self._tell, self._told]

        def body() -> None:
            for fd in Companion.open:
                os.close(fd)
            with Engine.open(path, None) as engine:
                ring = ring_of(engine)
                os.write(say, b"ready")
                while told := os.read(hear, 8):
                    first = int.from_bytes(told, "little")
                    for number in range(first, first + ROUNDS):
                        if writes:
                            write(ring, [number])
                        elif ring.length:
                            sample_some(ring, number)
                            update_some(ring)
                    os.write(say, b"done")

        self.pid = fork(body)
        os.close(hear)
        os.close(say)
        assert os.read(self._told, 8) == b"ready"

    def begin(self, first: int) -> None:
        os.write(self._tell, first.to_bytes(8, "little"))

    def wait(self) -> None:
        assert os.read(self._told, 8) == b"done", "a companion failed; its traceback is above"

    def leave(self) -> int:
        """Ends the process by closing its pipe; returns its exit status."""
        os.close(self._tell)
        status = ended(self.pid)
        os.close(self._told)
        Companion.open = [fd for fd in Companion.open if fd not in (self._tell, self._told)]
        return status


@contextmanager
def company(path: Path) -> Iterator[tuple[Engine, Companion, Companion]]:
    """A buffer with items, its owner, a second writer and a learner."""
    with Engine.open(path, Settings(capacity=SLOTS, alpha=0.5, eps=0.0)) as engine:
        write(engine.define(Schema(LEAVES, SLOTS)), range(20))
        companions = Companion(path, writes=True), Companion(path, writes=False)
        try:
            yield engine, *companions
        finally:
            ends = [companion.leave() for companion in companions]
        assert ends == [0, 0]
        assert len(engine.clients()) == 1


def dies_in_company(path: Path, points: list[tuple[str, str, int]]) -> None:
    """Kills one victim after the other; a victim is a deed, a point and a number of passings."""
    with company(path) as (engine, writer, learner):
        ring, kept = ring_of(engine), set(range(20))
        for number, (deed, point, passing) in enumerate(points, 1):
            first = 1000 * number
            batch = range(first + 500, first + 505)

            def work(victim: Engine, deed: str = deed, batch: range = batch) -> None:
                if deed == "write":
                    write(ring_of(victim), batch)
                else:
                    DEEDS[deed][0](victim)

            writer.begin(first)
            learner.begin(first)
            killed = dies(path, point, work, after=passing)
            writer.wait()
            learner.wait()
            engine.seat.reap_dead()
            assert killed or passing > 0, f"{point} was never reached"
            there = set(read_all(ring).values())
            kept |= set(range(first, first + ROUNDS))
            if deed == "write" and (is_done(deed, point) or not killed):
                kept |= set(batch)
            assert there <= kept, f"parts of a dead writer's batch are there after {point}"
            assert deed == "empty" or there == kept, f"items are lost after {deed} at {point}"
            kept = there
            require_sound(engine)


WRITE_POINTS = [
    point
    for point in DEEDS["write"][1]
    if point.startswith("write.") and point != "write.mass"  # no item is overwritten
]
GROUPS = {
    "the first half of a write": [("write", point, 0) for point in WRITE_POINTS[::2]],
    "the second half of a write": [("write", point, 0) for point in WRITE_POINTS[1::2]],
    "later in a write": [("write", point, 3) for point in WRITE_POINTS[::2]],
    "updates": [("update", point, 1) for point in DEEDS["update"][1]],
    "emptying": [("empty", point, 0) for point in DEEDS["empty"][1]],
}


@pytest.mark.product(few=1)
@pytest.mark.parametrize("name", GROUPS)
def test_others_write_and_learn_on_while_a_process_dies(tmp_path: Path, name: str) -> None:
    dies_in_company(tmp_path / "buffer", GROUPS[name])


WAITED_FOR = [
    (deed, point)
    for deed, point in PAIRS
    if deed not in ("write", "update", "reap")
    and point not in ("count.added", "empty.unlocked", "mutex.unlocked")
]


@pytest.mark.parametrize(("deed", "point"), WAITED_FOR)
def test_a_waiter_gets_the_mutex_of_a_dead_process(tmp_path: Path, deed: str, point: str) -> None:
    path = tmp_path / "buffer"
    with prepare(path) as survivor:
        waits_for_the_mutex_of(
            path, point, begins(path, deed), lambda waiter: write(ring_of(waiter), [500]) and None
        )
        survivor.seat.reap_dead()
        assert 500 in read_all(ring_of(survivor)).values()
        require_sound(survivor)
        assert survivor.stats()["repairs"] == 1


@pytest.mark.parametrize("point", [*native_points("turn"), "wake.progress"])
def test_a_death_in_the_queue_stops_nobody_behind_it(tmp_path: Path, point: str) -> None:
    """A writer stands still with its claim; another one waits for its slots and dies."""
    path = tmp_path / "buffer"

    def waits(engine: Engine) -> None:
        _core.arm(point)
        write(ring_of(engine), range(8), timeout=0.05)

    with prepare(path) as survivor:
        with stopped_at(path, "write.claimed", DEEDS["write"][0]):
            status = ended(fork(lambda: waits(Engine.open(path, None))))
        assert status == -9 or point == "wake.progress", f"ended with {status}"
        survivor.seat.reap_dead()
        assert survivor.stats()["waiters"] == 0
        require_sound(survivor)
        require_usable(ring_of(survivor), 999)
