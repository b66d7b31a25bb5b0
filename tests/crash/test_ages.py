"""The process that moves the base of the versions dies: the base is the old one or the new one.

comes     a learner that takes the next batch, with a version that was made without items
begins    a writer of the first item, after versions that were made without items
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter
from shmbuffer.memory import Engine, consumer_version
from tests.crash.harness import dies, goes, require_sound, schema, settings, write
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

EACH, STALENESS = 2, 1
GATE = RateLimiter(max_staleness=STALENESS, items_per_version=EACH)
QUEUE = RateLimiter(max_times_sampled=1, max_staleness=STALENESS, items_per_version=EACH)
ROOM = (STALENESS + 1) * EACH


def comes(engine: Engine) -> None:
    consumer_version.increment(engine.seat)
    take(engine)


def begins(engine: Engine) -> None:
    for _ in range(3):
        consumer_version.increment(engine.seat)
    write(ring_of(engine), [0])


def take(engine: Engine) -> list[int]:
    """Returns the tickets of the next batch."""
    ring = ring_of(engine)
    if not ring.admission.is_queue:
        return list(ring.consumers.open("learner").take(EACH).tickets)
    index, tickets = np.empty((2, EACH), np.int64)
    ring.admission.take(index, tickets)
    ring.admission.release()
    return list(tickets)


def room_in(engine: Engine) -> int:
    """Writes items until the staleness limit refuses one; returns the number of items."""
    ring = ring_of(engine)
    while goes(lambda: write(ring, [0])):
        pass
    return ring.write_count


@contextmanager
def buffer(path: Path, limiter: RateLimiter, written: int) -> Iterator[Engine]:
    with Engine.open(path, replace(settings("rows"), alpha=None)) as engine:
        ring = engine.define(schema("rows"))
        if limiter is GATE:
            ring.consumers.open("learner")
        engine.set_limiter(limiter)
        write(ring, range(written))
        yield engine


@pytest.mark.parametrize("point", ["mutex.locked", "flow.base"])
@pytest.mark.parametrize("limiter", [GATE, QUEUE], ids=["consumer", "queue"])
@pytest.mark.parametrize(
    ("work", "written", "rooms"),
    [(comes, EACH + 1, {ROOM, ROOM + EACH}), (begins, 0, {ROOM})],
    ids=["comes", "begins"],
)
def test_versions_count_from_one_place_or_the_other(
    tmp_path: Path,
    point: str,
    limiter: RateLimiter,
    work: Callable[[Engine], None],
    written: int,
    rooms: set[int],
) -> None:
    passing, found = 0, set()
    died = True
    while died:
        with buffer(tmp_path / str(passing), limiter, written) as engine:
            assert engine.path is not None
            died = dies(engine.path, point, work, after=passing)
            engine.seat.reap_dead()
            require_sound(engine)
            found.add(room_in(engine))
            assert take(engine), "the next learner goes on"
        passing += 1
    assert passing > 1
    assert found <= rooms
    assert point == "flow.base" or found == rooms
