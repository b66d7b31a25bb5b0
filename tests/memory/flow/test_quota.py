"""The quota of one of several rings limits how much may be written, also after deaths."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimitTimeout
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.format.layout import Why
from shmbuffer.memory.format.limiter import Quota, quota_of
from shmbuffer.memory.system import deadline
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, schema, write


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    """Makes an empty buffer of eight slots whose quota is 0."""
    with Engine.open(fast_path / "buffer", Settings(capacity=8)) as engine:
        engine.define(schema())
        engine.set_limiter(Quota(0))
        yield engine


def quota(engine: Engine) -> tuple[int, int] | None:
    return quota_of(engine.seat.control.runtime[0])


def refused(ring: Ring, numbers: range) -> str:
    with pytest.raises(RateLimitTimeout) as error, deadline.limit_waits(0.01):
        write(ring, numbers)
    return str(error.value)


def test_so_much_is_written_as_was_leased_and_no_item_more(engine: Engine, ring: Ring) -> None:
    assert "1 items are to be written, but the quota of this shard is 0" in refused(ring, range(1))
    engine.set_limiter(Quota(3))
    assert "the quota grows when the learners of the sharded buffer sample" in refused(
        ring, range(4)
    )
    write(ring, range(3))
    refused(ring, range(1))
    assert (quota(engine), ring.write_count) == ((3, 3), 3)


def test_a_quota_that_is_given_twice_is_given_once(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(Quota(4))
    write(ring, range(2))
    engine.set_limiter(Quota(4))
    write(ring, range(2))
    refused(ring, range(1))
    engine.set_limiter(Quota(1))  # written items stay, and the next write has to wait
    refused(ring, range(1))
    engine.set_limiter(Quota(5))
    write(ring, range(1))
    refused(ring, range(1))


def test_draws_and_priorities_do_not_wait_for_a_quota(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(Quota(4))
    write(ring, range(4))
    assert ring.admission.admit_now(1_000)
    assert ring.admission.admit(1_000) == 0
    assert ring.update(np.arange(4), np.ones(4)) == (4, 0)
    assert quota(engine) == (4, 4)


def test_what_goes_past_the_limiter_is_not_part_of_a_quota(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(Quota(2))
    with ring.admission.uncounted():
        write(ring, range(5))
    assert quota(engine) == (2, 0)
    write(ring, range(2))
    refused(ring, range(1))


def test_emptying_and_loading_end_a_quota(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(Quota(6))
    write(ring, range(4))
    ring.empty()
    assert quota(engine) == (0, 0)
    refused(ring, range(1))
    engine.set_limiter(Quota(2))
    ring.restore(5, 100, 1.0)
    assert quota(engine) == (0, 0)
    refused(ring, range(1))


def test_a_writer_that_waits_goes_on_with_the_next_quota(engine: Engine, ring: Ring) -> None:
    writer = threading.Thread(target=write, args=(ring, range(5)))
    writer.start()
    runtime, mine = engine.seat.control.runtime[0], engine.seat.control.entries[engine.seat.entry]
    while not int(runtime["limited"]):
        pass
    assert (mine["inserts_wanted"], mine["waits_why"]) == (5, Why.QUOTA)
    engine.set_limiter(Quota(4))
    writer.join(0.05)
    assert writer.is_alive()
    engine.set_limiter(Quota(5))
    writer.join()
    assert (ring.write_count, int(runtime["limited"])) == (5, 0)


def test_a_quota_can_be_set_before_the_first_write(fast_path: Path) -> None:
    with Engine.open(fast_path / "buffer", Settings(capacity=8)) as engine:
        engine.set_limiter(Quota(2))
        assert quota(engine) == (2, 0)
        engine.define(schema())
        ring = ring_of(engine)
        write(ring, range(2))
        refused(ring, range(1))
        engine.set_limiter(None)
        write(ring, range(8))
        assert quota(engine) is None


@pytest.mark.crash
@pytest.mark.parametrize(
    ("point", "used"), [("write.marking", 0), ("write.claimed", 0), ("write.commit", 3)]
)
def test_what_a_dead_writer_had_claimed_is_settled(
    engine: Engine, ring: Ring, point: str, used: int
) -> None:
    engine.set_limiter(Quota(3))

    def work(_: Parent) -> None:
        engine.seat.rejoin()
        _core.arm(point, "kill")
        write(ring_of(engine), range(3))

    with child(work) as other:
        assert other.end() == -9
    engine.seat.reap_dead()
    assert quota(engine) == (3, used)
    write(ring, range(3 - used))
    refused(ring, range(1))
