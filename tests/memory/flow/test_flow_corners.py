"""Limits in one ring: counts, the effect of clients that give up or die, and mutual waits."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, RateLimitError, RateLimitTimeout
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.flow import waiting
from shmbuffer.memory.flow.waiting import PASSES_ONCE
from shmbuffer.memory.format.layout import Side, Why
from shmbuffer.memory.system import deadline
from tests.crash.harness import (
    CAPACITY,
    dies,
    ended,
    fork,
    goes,
    place,
    schema,
    settings,
    stopped_at,
    take,
    write,
)
from tests.kit.rings import path_of, ring_of
from tests.memory.rows import Parent, child

QUEUE = RateLimiter(max_times_sampled=1)
RATIO = RateLimiter(samples_per_insert=1, error_buffer=4)
TWO = RateLimiter(2, error_buffer=8, when_no_peer="wait")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(tmp_path / "buffer", Settings(capacity=CAPACITY)) as engine:
        engine.define(schema())
        yield engine


def test_a_claim_that_ended_in_a_repair_is_settled_once(engine: Engine) -> None:
    """A reaper found the claim still counted and subtracted it twice, so pending fell below 0."""
    ring = ring_of(engine)
    engine.set_limiter(RATIO)
    assert dies(
        path_of(engine), "write.mark", lambda victim: write(ring_of(victim), [1, 2]) and None
    )
    engine.seat.reap_dead()
    assert ring.admission.rate_status().pending == 0
    write(ring, [3])
    assert not goes(lambda: write(ring, range(5)))
    assert goes(lambda: write(ring, range(4)))


@pytest.mark.parametrize("end", ["abort", "die", "empty"])
def test_a_queue_full_of_what_nobody_will_commit_has_room(engine: Engine, end: str) -> None:
    """Writers waited for samplers to take the items, and samplers waited for writers."""
    ring = ring_of(engine)
    if end == "empty":
        write(ring, range(5))
        ring.empty()
    engine.set_limiter(QUEUE)
    if end == "abort":
        ring.claims.claim(CAPACITY)
        ring.claims.abort()
    if end == "die":
        assert dies(
            path_of(engine), "write.copy", lambda victim: write(ring_of(victim), range(8)) and None
        )
        engine.seat.reap_dead()
    assert goes(lambda: write(ring, range(20, 28)))
    assert ring.admission.rate_status().queued == 8
    assert not goes(lambda: write(ring, [28]))
    assert take(ring, 8) == list(range(20, 28))


def test_a_gap_in_the_middle_of_a_queue_is_passed(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(max_times_sampled=2))
    write(ring, [1, 2])
    ring.claims.claim(3)
    ring.claims.abort()
    write(ring, [3, 4, 5])
    assert take(ring, 7) == [1, 1, 2, 2, 3, 3, 4]
    assert goes(lambda: write(ring, range(10, 16)))
    assert take(ring, 3) == [4, 5, 5]


def writes_step_by_step(path: Path, numbers: list[int]) -> Callable[[Parent], None]:
    """Runs a process that writes these items and pauses after it has claimed their slots."""

    def work(parent: Parent) -> None:
        with Engine.open(path, None) as writer:
            parent.pause_at("write.claimed")
            write(ring_of(writer), numbers)

    return work


@pytest.mark.parametrize("before", [3, 6])
def test_items_written_while_a_queue_is_emptied_are_handed_out(engine: Engine, before: int) -> None:
    """The items may also lie around the end of the ring."""
    ring = ring_of(engine)
    engine.set_limiter(QUEUE)
    write(ring, range(before))
    take(ring, before)
    with child(writes_step_by_step(path_of(engine), [100, 101, 102, 103])) as writer:
        writer.reached()
        ring.empty()
        writer.go()
        assert writer.end() == 0
    assert take(ring, 4) == [100, 101, 102, 103]
    assert goes(lambda: write(ring, [104]))
    assert take(ring, 1) == [104]


def test_a_claim_that_is_open_when_a_queue_is_set_comes_out_in_its_turn(engine: Engine) -> None:
    """Each item comes out once, also if it was claimed laps before and the buffer is emptied."""
    ring = ring_of(engine)
    write(ring, range(6))
    with child(writes_step_by_step(path_of(engine), [100, 101, 102])) as writer:
        writer.reached()
        for number in (21, 22):
            place(ring, [3], [number], in_place=False)
        engine.set_limiter(QUEUE)
        assert take(ring, 5) == [1, 2, 22, 4, 5]  # the claim has replaced 0
        assert not goes(lambda: take(ring, 1))
        ring.empty()
        writer.go()
        assert writer.end() == 0
    assert take(ring, 3) == [100, 101, 102]
    assert not goes(lambda: take(ring, 1))
    write(ring, range(200, 208))
    assert take(ring, 8) == list(range(200, 208))


def test_a_queue_of_records_evicts_nothing_that_it_has_not_handed_out(tmp_path: Path) -> None:
    """The byte ring was full before the slots were, and the oldest items were not read."""
    kind, large = "short records", LARGE
    with Engine.open(tmp_path / "buffer", replace(settings(kind), alpha=None)) as engine:
        ring = engine.define(schema(kind))
        engine.set_limiter(QUEUE)
        written = 0
        while goes(partial(write, ring, [large[written]])):
            written += 1
        assert written == 5
        assert engine.stats()["evicted"] == 0
        assert take(ring, 2) == large[:2]
        assert goes(lambda: write(ring, large[5:7]))
        assert not goes(lambda: write(ring, large[7:]))
        assert take(ring, 5) == large[2:7]
        assert goes(lambda: write(ring, large[7:]))


@pytest.mark.parametrize("end", ["abort", "die"])
def test_below_min_size_inserts_do_not_wait_for_samples(engine: Engine, end: str) -> None:
    """A full ring whose writer gave up had too few items, and the ratio held writers back."""
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(samples_per_insert=1, min_size=8, error_buffer=4))
    write(ring, range(12))
    assert not goes(lambda: write(ring, [12]))
    ring.admission.admit(2)
    if end == "abort":
        ring.claims.claim(2)
        ring.claims.abort()
    else:
        assert dies(
            path_of(engine), "write.copy", lambda victim: write(ring_of(victim), [1, 2]) and None
        )
        engine.seat.reap_dead()
    assert goes(lambda: write(ring, [20, 21]))
    assert not goes(lambda: ring.admission.admit(1))
    while ring.length < 8:
        assert goes(lambda: write(ring, [22, 23, 24]))
    ahead = int(ring.admission.rate_status().ahead)
    assert ahead > 4
    assert not goes(lambda: write(ring, [25]))
    assert goes(lambda: ring.admission.admit(ahead + 4))
    assert not goes(lambda: ring.admission.admit(1))


def test_a_first_fill_that_misses_min_size_by_little_goes_on(engine: Engine) -> None:
    """Batches of 4 up to 7: one item is missing, the next batch is 3 too many, 2 are allowed."""
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(samples_per_insert=1, min_size=5, error_buffer=2.5))
    assert goes(lambda: write(ring, range(4)))
    assert not goes(lambda: ring.admission.admit(1))
    assert goes(lambda: write(ring, range(4, 8)))
    assert goes(lambda: ring.admission.admit(1))


def test_an_item_in_its_first_write_does_not_count(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(min_size=8))
    write(ring, range(5))
    with stopped_at(
        path_of(engine), "write.claimed", lambda writer: write(ring_of(writer), range(4)) and None
    ):
        assert (ring.length, ring.admission.rate_status().size) == (4, 4)
        assert not goes(lambda: ring.admission.admit(1))
    engine.seat.reap_dead()
    write(ring, range(8))
    with stopped_at(
        path_of(engine), "write.claimed", lambda writer: write(ring_of(writer), range(4)) and None
    ):
        assert (ring.length, ring.admission.rate_status().size) == (4, 8)
        assert goes(lambda: ring.admission.admit(1))


def test_a_draw_is_taken_back_from_the_ratio_that_counted_it(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(RATIO)
    write(ring, range(4))
    ring.admission.admit(3)
    ring.admission.cancel(3)
    assert ring.admission.rate_status().ahead == 3
    ring.admission.admit(3)
    engine.set_limiter(RATIO)
    ring.admission.cancel(3)
    assert ring.admission.rate_status().ahead == 0
    engine.set_limiter(None)
    ring.admission.admit(3)
    engine.set_limiter(RATIO)
    ring.admission.cancel(3)
    assert ring.admission.rate_status().ahead == 0
    ring.admission.admit(3)
    ring.empty()
    ring.admission.cancel(3)
    write(ring, range(4))
    assert ring.admission.rate_status().ahead == 3
    assert int(ring.seat.control.runtime["drawn"][0]) == 6


def test_a_sample_that_passes_counts_for_nothing_also_if_it_fails(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(TWO)
    write(ring, range(1))
    assert ring.admission.admit(8) == 8
    assert ring.admission.rate_status().ahead == -8
    ring.admission.cancel(8)
    assert ring.admission.rate_status().ahead == 0
    assert ring.admission.admit(8) == 8
    ring.seat.native.bypass(PASSES_ONCE)
    assert ring.admission.admit(8) == 0
    ring.admission.cancel(0)
    ring.admission.cancel(8)  # of the earlier draw: this thread's last draw was not counted
    assert ring.admission.rate_status().ahead == -8


def test_taking_nothing_from_a_queue_releases_no_other_take(engine: Engine) -> None:
    ring, none = ring_of(engine), np.empty(0, np.int64)
    engine.set_limiter(QUEUE)
    write(ring, range(8))
    index = np.empty(4, np.int64)
    assert ring.admission.take(index, np.empty_like(index))
    assert ring.admission.take(none, none)
    ring.admission.release()
    assert not goes(lambda: write(ring, [8]))
    ring.admission.release()
    assert goes(lambda: write(ring, [8]))


def test_a_waiter_learns_that_its_queue_was_removed(engine: Engine) -> None:
    """The waiter tried again for 5 s and was told that the buffer is empty."""
    ring, found = ring_of(engine), list[bool]()
    engine.set_limiter(QUEUE)
    write(ring, range(3))
    index = np.empty(4, np.int64)
    waiter = threading.Thread(target=lambda: found.append(ring.admission.take(index, index.copy())))
    waiter.start()
    while not ring.seat.control.runtime["limited"][0]:
        assert waiter.is_alive()
    engine.set_limiter(None)
    waiter.join()
    assert found == [False]


def test_the_child_of_a_fork_is_limited_through_its_own_handle(engine: Engine) -> None:
    """The child attached again, asked through the old handle, and repeated this forever."""
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(samples_per_insert=1, error_buffer=4, max_times_sampled=1))
    write(ring, range(4))

    def draws() -> None:
        ring.admission.admit(2)
        index = np.empty(2, np.int64)
        assert ring.admission.take(index, index.copy())
        ring.admission.release()
        ring.admission.admit(2)
        ring.admission.cancel(2)

    assert ended(fork(draws)) == 0
    assert ring.admission.rate_status().ahead == 1
    assert take(ring, 2) == [2, 3]


@contextmanager
def a_stopped_client_waits(path: Path, ring: Ring, call: Callable[[Ring], object]) -> Iterator[int]:
    """Runs another process that waits in the call and is stopped before it is woken."""

    def says_that_it_waits(engine: Engine, parent: Parent) -> None:
        while not engine.seat.control.entries["waits_for"][engine.seat.entry]:
            pass
        parent.tell_him()

    def waits(parent: Parent) -> None:
        with Engine.open(path, None) as engine:
            threading.Thread(target=says_that_it_waits, args=(engine, parent)).start()
            call(ring_of(engine))

    with child(waits) as client:
        client.reached()
        stop(client.pid, ring)
        yield client.pid


def stop(pid: int, ring: Ring) -> None:
    """Stops a waiting client while it does not hold the mutex."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        if isinstance(ring.seat.native.snapshot(10**8), bytes):
            return
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("told", ["writer", "sampler"])
@pytest.mark.parametrize(
    ("limiter", "before", "writes", "draws", "says"),
    [
        (
            RateLimiter(samples_per_insert=1, error_buffer=4),
            *(4, 3, 8),
            "with 1 samples per insert, the error buffer must be at least 5.5, but is 4",
        ),
        (QUEUE, 6, 3, 7, "the queue needs space for at least 9 items, but has 8"),
        (
            RateLimiter(max_times_sampled=1, min_size=7),
            *(6, 3, 2),
            "the queue needs space for at least 9 items, but has 8",
        ),
    ],
    ids=["ratio", "queue", "min_size of a queue"],
)
def test_the_side_that_looks_is_told_that_both_sides_wait_for_each_other(
    engine: Engine,
    limiter: RateLimiter,
    before: int,
    writes: int,
    draws: int,
    says: str,
    told: str,
) -> None:
    """With a queue, neither side was told: both waited forever."""
    ring = ring_of(engine)
    engine.set_limiter(limiter)
    write(ring, range(before))

    def writer(ring: Ring) -> None:
        write(ring, range(writes))

    def sampler(ring: Ring) -> None:
        index = np.empty(draws, np.int64)
        ring.admission.admit(draws)
        ring.admission.take(index, index.copy())

    looks, other = (writer, sampler) if told == "writer" else (sampler, writer)
    path = path_of(engine)
    with (
        a_stopped_client_waits(path, ring, other),
        pytest.raises(RateLimitError) as raised,
        deadline.limit_waits(20),
    ):
        looks(ring)
    assert not isinstance(raised.value, RateLimitTimeout)
    assert str(raised.value) == (
        f"{path}: writes of {writes} items and samples of {max(draws, limiter.min_size)} wait for "
        f"each other: {says}"
    )


def test_two_threads_of_one_handle_are_told_that_they_wait_for_each_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides wait under a single registry entry; the first thread to check gets the error."""
    monkeypatch.setattr(waiting, "CHECK_INTERVAL_S", 0.0)
    ring = ring_of(engine)
    engine.set_limiter(TWO)
    write(ring, range(4))  # 6 ahead: 2 more would make 8 + 2, and a draw of 15 would make -9
    errors: list[str] = []

    def draw() -> None:
        try:
            ring.admission.admit(15)
        except RateLimitError as error:
            errors.append(str(error))
            ring.admission.admit(4)  # lets the other thread continue

    sampler = threading.Thread(target=draw)
    sampler.start()
    try:
        write(ring, range(2))
    except RateLimitError as error:
        errors.append(str(error))
        write(ring, range(1))
    sampler.join()
    assert "writes of 2 items and samples of 15 wait for each other" in errors[0]


def test_a_stopped_client_that_could_go_on_is_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client still shows as waiting, but a larger buffer would not help."""
    monkeypatch.setattr(waiting, "CHECK_INTERVAL_S", 0.0)
    ring = ring_of(engine)
    engine.set_limiter(TWO)

    def writes(ring: Ring) -> None:
        write(ring, range(5))
        write(ring, range(1))

    with a_stopped_client_waits(path_of(engine), ring, writes) as pid:
        ring.admission.admit(12)
        says = rf"pid {pid} \(stopped\), last inserted"
        with pytest.raises(RateLimitTimeout, match=says), deadline.limit_waits(0.2):
            ring.admission.admit(6)
        status = ring.admission.rate_status()
        assert (status.why(Side.SAMPLES, 1), status.ahead) == (None, -4)


def test_the_registry_says_what_a_client_waits_for(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(TWO)
    write(ring, range(5))
    mine = engine.seat.control.entries[engine.seat.entry]
    with pytest.raises(RateLimitTimeout), deadline.limit_waits(0):
        write(ring, np.arange(3))
    assert (mine["waits_for"], mine["inserts_wanted"], mine["waits_why"]) == (0, 3, Why.AHEAD)
    says = "the buffer has 5 items, but 7 are needed"
    with pytest.raises(RateLimitTimeout, match=says), deadline.limit_waits(0):
        ring.admission.admit(1, 7)
    assert (mine["waits_for"], mine["samples_wanted"], mine["waits_why"]) == (0, 7, Why.FEW)
    runtime = engine.seat.control.runtime[0]
    assert (int(runtime["pending"]), int(runtime["limited"])) == (0, 0)


def test_a_write_that_waited_for_samples_has_its_full_time_for_a_slot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write waits up to 5 s for a slot, without the time that it waits for the other side."""
    ring = ring_of(engine)
    engine.set_limiter(TWO)
    late = [0.0]

    class Clock:
        def __getattr__(self, name: str) -> object:
            return getattr(time, name)

        def monotonic(self) -> float:
            return time.monotonic() + late[0]

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()
        parent.pause_at("write.claimed")
        write(ring_of(engine), range(8))

    for module in (deadline, waiting):
        monkeypatch.setattr(module, "time", Clock())
    write(ring, range(5))
    with child(work) as other:
        other.reached()

        def lifted(*_: object) -> None:
            late[0] += 100  # by now it has waited
            engine.set_limiter(None)
            other.go()
            other.reached()

        blocked = waiting.Calls._wait_for_blocker

        def goes_on(*args: object) -> object:
            seen = blocked(*args)  # type: ignore[arg-type]
            other.go()
            other.end()
            return seen

        monkeypatch.setattr(waiting.Waiting, "wait", lifted)
        monkeypatch.setattr(waiting.Calls, "_wait_for_blocker", goes_on)
        write(ring, range(8))
    assert ring.write_count == 5 + 8 + 8


@pytest.mark.parametrize("placed", [False, True])
def test_a_claim_that_is_open_when_the_first_limiter_is_set_counts(
    engine: Engine, placed: bool
) -> None:
    """The claim was not counted, and other writers exceeded the error buffer by that amount."""
    ring = ring_of(engine)
    write(ring, [0])

    def writes(writer: Engine) -> None:
        if placed:
            place(ring_of(writer), [4, 5, 6], [1, 2, 3], in_place=False)
        else:
            write(ring_of(writer), [1, 2, 3])

    with stopped_at(path_of(engine), "write.claimed", writes):
        engine.set_limiter(RATIO)
        assert ring.admission.rate_status().pending == 3
        assert not goes(lambda: write(ring, [4, 5]))
        assert goes(lambda: write(ring, [4]))
    engine.seat.reap_dead()
    assert ring.admission.rate_status().pending == 0
    assert goes(lambda: write(ring, [5, 6, 7]))
    assert not goes(lambda: write(ring, [8]))


def test_a_change_in_place_counts_for_no_limiter(engine: Engine) -> None:
    ring = ring_of(engine)
    write(ring, range(8))
    with stopped_at(
        path_of(engine),
        "write.claimed",
        lambda writer: place(ring_of(writer), [4, 5], [1, 2], in_place=True),
    ):
        engine.set_limiter(RATIO)
        assert ring.admission.rate_status().pending == 0


LARGE = [9, 28, 47, 18, 37, 56, 65, 75]
"""Numbers of records of at least 650 bytes; the ring has space for five."""


@contextmanager
def full_of_records(path: Path) -> Iterator[Ring]:
    """Makes a queue whose bytes are full, and a stopped process that waits to write one more."""
    kind = "short records"
    with Engine.open(path, replace(settings(kind), alpha=None)) as engine:
        ring = engine.define(schema(kind))
        engine.set_limiter(QUEUE)
        write(ring, LARGE[:5])
        with a_stopped_client_waits(path, ring, lambda other: write(other, LARGE[5:6])):
            yield ring


def test_both_sides_are_told_that_a_queue_has_too_few_bytes_for_them(tmp_path: Path) -> None:
    """Both sides waited forever, because the slots were not full."""
    with full_of_records(tmp_path / "buffer") as ring:
        index = np.empty(6, np.int64)
        with pytest.raises(RateLimitError) as raised, deadline.limit_waits(20):
            ring.admission.take(index, index.copy())
        assert not isinstance(raised.value, RateLimitTimeout)
        text = str(raised.value)
        found = re.fullmatch(
            r".*: writes of 1 items and samples of 6 wait for each other: the queue still has 5 "
            r"items to return in ([\d,]+) of its 4,096 bytes, and the next write needs (\d+); set "
            r"max_bytes to about ([\d,]+), or write or sample fewer items at once",
            text,
        )
        assert found, text
        used, needed, least = (int(number.replace(",", "")) for number in found.groups())
        assert used + needed > 4096
        assert least == used + needed
        assert take(ring, 5) == LARGE[:5]


def test_a_stopped_writer_whose_bytes_are_free_again_is_no_deadlock(tmp_path: Path) -> None:
    with full_of_records(tmp_path / "buffer") as ring:
        assert take(ring, 2) == LARGE[:2]
        index = np.empty(4, np.int64)
        with pytest.raises(RateLimitTimeout), deadline.limit_waits(0.35):
            ring.admission.take(index, index.copy())


def test_a_full_queue_of_records_says_that_it_has_no_bytes(tmp_path: Path) -> None:
    with (
        full_of_records(tmp_path / "buffer") as ring,
        pytest.raises(RateLimitTimeout) as raised,
        deadline.limit_waits(0),
    ):
        write(ring, LARGE[6:7])
    assert re.fullmatch(
        r".*: extend waits: the queue is full: 5 items are not sampled yet, and another \d+ "
        r"bytes do not fit; there is no learner; timed out after 0 s, and nothing was changed",
        str(raised.value),
    ), str(raised.value)


def test_an_abort_gives_back_what_it_was_counted_for(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(RATIO)
    write(ring, range(2))
    ring.claims.claim(3)
    assert ring.admission.rate_status().pending == 3
    assert not goes(lambda: ring.admission.admit(6))
    other = Engine.open(path_of(engine), None)
    assert not goes(lambda: write(ring_of(other), range(2)))
    ring.claims.abort()
    assert ring.admission.rate_status().pending == 0
    assert goes(lambda: write(ring_of(other), range(2)))
    other.close()


def test_a_waiter_for_the_other_side_is_woken_by_any_change_it_needs(engine: Engine) -> None:
    """The waiter does not depend on its polling interval of a few milliseconds."""
    ring, runtime = ring_of(engine), engine.seat.control.runtime
    engine.set_limiter(QUEUE)
    runtime["limited"] = 1  # looks like another waiter

    def wakes(act: Callable[[], object]) -> None:
        before = int(runtime["progress"][0])
        act()
        assert int(runtime["progress"][0]) > before

    wakes(lambda: write(ring, [1, 2]))
    index = np.empty(1, np.int64)
    ring.admission.take(index, index.copy())
    wakes(ring.admission.release)
    wakes(lambda: engine.set_limiter(RATIO))
    wakes(lambda: ring.admission.admit(1))
    wakes(lambda: ring.admission.cancel(1))
    wakes(ring.empty)
    ring.claims.claim(1)
    wakes(ring.claims.abort)
    wakes(lambda: engine.set_limiter(None))
    runtime["limited"] = 0


@pytest.mark.parametrize("field", ["inserts_base", "samples_base"])
@pytest.mark.parametrize("wrong", [-(2**40), 2**40])
def test_sides_that_damage_has_set_apart_start_again(
    tmp_path: Path, field: str, wrong: int
) -> None:
    """Either side could wait forever, also after a recovery."""
    path = tmp_path / "buffer"
    with Engine.open(path, Settings(capacity=CAPACITY)) as engine:
        ring = engine.define(schema())
        engine.set_limiter(RateLimiter(samples_per_insert=1, min_size=2, error_buffer=4))
        write(ring, range(5))
        ring.admission.admit(1)
        block = engine.seat.control.limiter_block(
            int(engine.seat.control.runtime["limiter_version"][0])
        )
        block[field] = (int(block[field][0]) + wrong) % 2**64
    with Engine.open(path, None) as engine:
        ring = ring_of(engine)
        assert ring.admission.rate_status().ahead == 0
        assert goes(lambda: ring.admission.admit(4))
        assert goes(lambda: write(ring, range(8)))
        assert not goes(lambda: write(ring, [1]))
        assert goes(lambda: ring.admission.admit(8))
        assert not goes(lambda: ring.admission.admit(1))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("samples_per_insert", 0.0), ("error_buffer", 0.5), ("limits", 2), ("limits", 9)],
)
def test_an_impossible_limiter_is_ignored(engine: Engine, field: str, wrong: float) -> None:
    """A caller got a ValueError about numbers that it had not passed."""
    engine.set_limiter(RateLimiter(samples_per_insert=1, error_buffer=4))
    block = engine.seat.control.limiter_block(
        int(engine.seat.control.runtime["limiter_version"][0])
    )
    block[field] = wrong
    assert engine.limiter is None
    assert ring_of(engine).admission.limits == 0
    for _ in range(4):
        assert goes(lambda: write(ring_of(engine), range(8)))
    assert goes(lambda: ring_of(engine).admission.admit(40))


def test_a_queue_that_begins_behind_the_head_is_named_and_mended(tmp_path: Path) -> None:
    """Its items would never be delivered."""
    queue = RateLimiter(max_times_sampled=1)
    with Engine.open(tmp_path / "buffer", Settings(CAPACITY)) as engine:
        ring = engine.define(schema("rows"))
        write(ring, range(5))
        engine.set_limiter(queue)
        engine.seat.control.runtime["queue_since"] = 2**40
        assert engine.check().problems[0] == (
            f"the queue begins at ticket {2**40}, but the next ticket is 5"
        )
    with Engine.open(tmp_path / "buffer", None) as engine:
        assert engine.check().ok
        assert take(ring_of(engine), 5) == list(range(5))
