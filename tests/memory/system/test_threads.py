"""Large batches give the same bytes with one thread and with several, under kills and forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import set_threads
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from tests.kit.rings import ring_of
from tests.memory.rows import Rows, child, require_sound, sample, succeeds, write

#: A row that bypasses the cache, one that does not, and one whose checksum is batched.
LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("frame",), "uint8", (4096,)),
    Leaf(("odd",), "uint8", (4097,)),
)
SMALL = (Leaf(("number",), "int64", ()), Leaf(("x",), "uint8", (61,)))
LARGE = 700
"""Items in a batch of 6 MB."""


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Iterator[None]:
    yield
    set_threads(None)


def made(path: Path, leaves: tuple[Leaf, ...], capacity: int) -> Engine:
    engine = Engine.open(path, Settings(capacity=capacity, alpha=0.6, eps=1e-6))
    engine.define(Schema(leaves, capacity))
    return engine


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def history(ring: Ring, count: int) -> list[bytes]:
    """Returns the bytes that writes, updates and draws leave and return."""
    rng = np.random.default_rng(3)
    found = []
    for first in (0, count):  # the second batch goes past the end of the ring
        write(ring, range(first, first + count), rng.random(count))
    index = rng.integers(ring.capacity, size=2 * count)
    ring.update(index, rng.random(2 * count))
    found += [ring.tree.mass().tobytes(), ring.tree.priorities().tobytes()]
    for prioritized in (False, True):
        drawn = sample(ring, count, key=5, beta=0.4, prioritized=prioritized)
        found += [drawn.index.tobytes(), drawn.weights.tobytes(), drawn.numbers.tobytes()]
    return found


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    ("leaves", "capacity", "count"),
    [(LEAVES, 1000, LARGE), (LEAVES, 18_000, LARGE), (SMALL, 70_000, 50_000)],
    ids=["large items", "past the cache", "small items"],
)
def test_four_threads_leave_and_return_the_bytes_that_one_does(
    fast_path: Path, leaves: tuple[Leaf, ...], capacity: int, count: int
) -> None:
    found = []
    for number in (1, 4):
        set_threads(number)
        with made(fast_path / str(number), leaves, capacity) as engine:
            found.append(history(ring_of(engine), count))
            require_sound(engine)
    assert found[0] == found[1]


def test_threads_start_with_the_first_large_batch_and_stay(fast_path: Path) -> None:
    with made(fast_path / "buffer", LEAVES, 1000) as engine:
        ring = ring_of(engine)

        def work() -> None:
            set_threads(4)
            engine.seat.rejoin()
            before = threads()
            write(ring, range(100))
            sample(ring, 100)
            assert threads() == before
            for _ in range(3):
                write(ring, range(LARGE))
                assert threads() == before + 3

        succeeds(work)


def test_one_thread_starts_none(fast_path: Path) -> None:
    with made(fast_path / "buffer", LEAVES, 1000) as engine:

        def work() -> None:
            set_threads(1)
            engine.seat.rejoin()
            before = threads()
            write(ring_of(engine), range(LARGE))
            assert threads() == before

        succeeds(work)


def test_the_child_of_a_fork_draws_with_threads_of_its_own(fast_path: Path) -> None:
    set_threads(3)
    with made(fast_path / "buffer", LEAVES, 1000) as engine:
        ring = ring_of(engine)
        write(ring, range(LARGE))
        expected = sample(ring, LARGE, key=9).index.tolist()

        def work() -> None:
            engine.seat.rejoin()
            assert threads() == 1
            assert sample(ring, LARGE, key=9).index.tolist() == expected
            assert threads() == 3

        for _ in range(3):
            succeeds(work)


@pytest.mark.full
def test_forks_while_threads_are_at_work_leave_usable_children(fast_path: Path) -> None:
    set_threads(3)
    with made(fast_path / "buffer", LEAVES, 1000) as engine:
        ring = ring_of(engine)
        write(ring, range(LARGE))
        done = threading.Event()

        def draw_on() -> None:
            while not done.is_set():
                sample(ring, LARGE)

        drawing = threading.Thread(target=draw_on)
        drawing.start()
        try:
            for _ in range(10):
                pid = os.fork()
                if pid == 0:
                    signal.alarm(60)
                    engine.seat.rejoin()
                    sample(ring, LARGE)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            done.set()
            drawing.join()


@pytest.mark.full
def test_two_threads_of_python_draw_large_batches_at_a_time(fast_path: Path) -> None:
    set_threads(4)
    with made(fast_path / "buffer", LEAVES, 1000) as engine:
        ring = ring_of(engine)
        write(ring, range(LARGE))
        expected = [sample(ring, LARGE, key=key).index.tolist() for key in (1, 2)]
        found: dict[int, list[list[int]]] = {1: [], 2: []}

        def draw_on(key: int) -> None:
            for _ in range(20):
                found[key].append(sample(ring, LARGE, key=key).index.tolist())

        drawing = [threading.Thread(target=draw_on, args=(key,)) for key in found]
        for one in drawing:
            one.start()
        for one in drawing:
            one.join()
        assert found == {1: 20 * [expected[0]], 2: 20 * [expected[1]]}


@pytest.mark.product(few=3)
@pytest.mark.crash
@pytest.mark.parametrize("point", ["write.copy", "write.checksum", "write.priority"])
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("capacity", [1000, 18_000], ids=["large items", "past the cache"])
def test_nothing_of_a_fill_by_threads_is_there_after_a_kill(
    fast_path: Path, point: str, after: int, capacity: int
) -> None:
    with made(fast_path / "buffer", LEAVES, capacity) as engine:
        ring = ring_of(engine)
        write(ring, range(200))

        def work(parent: object) -> None:
            set_threads(4)
            other = Engine.open(fast_path / "buffer", None)
            _core.arm(point, after=after)
            write(ring_of(other), range(1000, 1000 + LARGE), np.ones(LARGE))

        with child(work) as victim:
            assert victim.end() == -signal.SIGKILL
        engine.seat.reap_dead()
        require_sound(engine)
        assert ring.length == 200
        assert sorted({*sample(ring, 4000).numbers.tolist()}) == list(range(200))
        write(ring, range(2000, 2000 + LARGE))
        require_sound(engine)
        around = capacity < 200 + 2 * LARGE  # the aborted tickets are used
        assert ring.length == LARGE + (0 if around else 200)


@pytest.mark.crash
@pytest.mark.parametrize("pieces", [1, 40])
def test_a_learner_killed_in_a_long_update_has_done_its_first_pieces(
    fast_path: Path, pieces: int
) -> None:
    """The update releases the mutex after each piece, so that other clients can draw."""
    count, piece = 20_000, 128
    with made(fast_path / "buffer", SMALL, count) as engine:
        ring = ring_of(engine)
        write(ring, range(count), np.ones(count))

        def work(parent: object) -> None:
            set_threads(4)
            other = Engine.open(fast_path / "buffer", None)
            _core.arm("update.unlocked", after=pieces - 1)
            ring_of(other).update(np.arange(count), np.full(count, 5.0))

        with child(work) as victim:
            assert victim.end() == -signal.SIGKILL
        engine.seat.reap_dead()
        require_sound(engine)
        expected = np.where(np.arange(count) < pieces * piece, 5.0, 1.0)
        assert ring.tree.priorities().tolist() == expected.tolist()


@pytest.mark.parametrize("number", [0, -1, 17])
def test_threads_that_cannot_be_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 16, or None .*, but is {number}"):
        set_threads(number)


def test_no_more_threads_than_processors_unless_asked_for() -> None:
    set_threads(None)
    assert _core.threads() == min(4, len(os.sched_getaffinity(0)))

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert _core.threads() == 1

    succeeds(work)


def test_rows_of_a_large_batch_are_told_from_torn_ones(fast_path: Path) -> None:
    """The other tests compare numbers; this one finds rows with a single byte of another row."""
    rows = Rows.of(LEAVES, np.arange(10))
    rows.bytes[1][3, 4000] += 1
    with pytest.raises(AssertionError, match=r"rows \[3\] are torn"):
        rows.numbers()
