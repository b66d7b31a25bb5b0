"""Processes that use flow control are killed at every step.

The deeds are limited writes and samples, waiting for the other side, queues, changes of the
limiter, repair and recovery. Afterwards no client waits for a dead one, the limiter is completely
the old or the new one, and a queue delivers its items in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.flow.waiting import PASSES_ONCE
from shmbuffer.memory.format.layout import EntryState, Phase
from tests.crash.harness import (
    CAPACITY,
    called,
    dies,
    dies_after,
    each_death,
    each_recovery,
    goes,
    mends,
    native_points,
    place,
    python_points,
    read_all,
    require_sound,
    schema,
    settings,
    take,
    take_all,
    waits_for_the_mutex_of,
    write,
)
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

RATIO = RateLimiter(samples_per_insert=1, min_size=2, error_buffer=6)
OTHER = RateLimiter(samples_per_insert=2, min_size=3, error_buffer=9, when_no_peer="error")
QUEUE = RateLimiter(max_times_sampled=2)
THRICE = RateLimiter(max_times_sampled=3, min_size=2)
ONCE = RateLimiter(max_times_sampled=1)
BOTH = RateLimiter(samples_per_insert=2, error_buffer=20, max_times_sampled=2)
LONG_NS = 5 * 10**9
#: Numbers of passings for points that are passed once per registry entry.
PASSINGS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 255)
WRITTEN, DRAWN = 6, 3
"""Number of items in the buffer, and number of elements drawn, before the victim starts."""


# Operations of the victims


def writes(engine: Engine) -> None:
    write(ring_of(engine), [100, 101])


def places(engine: Engine) -> None:
    place(ring_of(engine), [7, 6], [100, 101], in_place=False)


def writes_past_the_limit(engine: Engine) -> None:
    assert not goes(lambda: write(ring_of(engine), range(100, 108)))
    ring_of(engine).seat.native.bypass(PASSES_ONCE)
    write(ring_of(engine), range(100, 108))


def samples(engine: Engine) -> None:
    ring_of(engine).admission.admit(4)


def samples_past_the_limit(engine: Engine) -> None:
    waits_to_sample(engine)
    ring_of(engine).seat.native.bypass(PASSES_ONCE)
    ring_of(engine).admission.admit(8)


def samples_and_takes_it_back(engine: Engine) -> None:
    ring_of(engine).admission.admit(4)
    ring_of(engine).admission.cancel(4)


def takes(engine: Engine) -> None:
    take(ring_of(engine), 4)


def waits_to_write(engine: Engine) -> None:
    assert not goes(lambda: write(ring_of(engine), range(100, 108)))


def waits_to_sample(engine: Engine) -> None:
    assert not goes(lambda: ring_of(engine).admission.admit(8))


def waits_to_take(engine: Engine) -> None:
    assert not goes(lambda: take(ring_of(engine), 10))


def registers(engine: Engine) -> None:
    """Registers as waiting to write, and stays registered."""
    assert ring_of(engine).seat.native.claim(8, 0, LONG_NS) == -_core.LIMITED


def registers_and_writes(engine: Engine) -> None:
    registers(engine)
    ring_of(engine).admission.admit(2)
    writes(engine)


def registers_and_leaves(engine: Engine) -> None:
    registers(engine)
    engine.close()


def aborts(engine: Engine) -> None:
    ring_of(engine).claims.claim(2)
    ring_of(engine).claims.abort()


def aborts_and_writes(engine: Engine) -> None:
    """Writes behind an aborted claim, which is then at the front of the queue."""
    take_all(ring_of(engine))
    aborts(engine)
    writes(engine)


def empties(engine: Engine) -> None:
    ring_of(engine).empty()


def restores(engine: Engine) -> None:
    ring_of(engine).restore(1, 500, None)


def sets(limiter: RateLimiter | None) -> Callable[[Engine], None]:
    return lambda engine: engine.set_limiter(limiter)


# Dead processes that others find


def claims(engine: Engine) -> None:
    assert ring_of(engine).seat.native.claim(2, 0, LONG_NS) >= 0


def reads(engine: Engine) -> None:
    take(ring_of(engine), 4, release=False)


#: Deeds only for rows. Records are claimed and filled in one call.
OF_ROWS = (aborts, aborts_and_writes, registers_and_writes, registers_and_leaves)
#: Deeds after which the balance of both sides depends only on the items that are present.
NOT_DRAWN = (writes, places, samples_past_the_limit, aborts)
WRITE = ("flow.pending", "flow.promised", "flow.settled")
COMMIT = ("flow.goal", "flow.base")
#: A write becomes visible between these steps: its items are present and count, or neither.
STEPS = ("write.claimed", "write.committing", "write.count", "write.idle", "write.done")
WAIT = ("flow.waits", "flow.limited")
SET = ("flow.stored", "flow.published")


@dataclass(frozen=True)
class Deed:
    """The operation of a victim in a buffer with items 0 to 5.

    Attributes:
        limiter: the limiter of the buffer.
        work: the operation.
        points: the crash points that it passes.
        afterwards: the limiter after the operation, if it is another one.
        batch: slots and numbers of the items that it writes.
        taken: number of elements that it takes from the queue.
    """

    limiter: RateLimiter | None
    work: Callable[[Engine], None]
    points: tuple[str, ...]
    afterwards: RateLimiter | str | None = "the same"
    batch: tuple[tuple[int, int], ...] = ()
    taken: int = 0


BATCH = ((6, 100), (7, 101))
OVER_ALL = tuple(((6 + k) % CAPACITY, 100 + k) for k in range(8))
DEEDS = {
    "write": Deed(RATIO, writes, (*COMMIT, *WRITE, *STEPS), batch=BATCH),
    "write to a queue": Deed(QUEUE, writes, (*COMMIT, *WRITE), batch=BATCH),
    "write to both": Deed(BOTH, writes, (*COMMIT, *WRITE), batch=BATCH),
    "placed write": Deed(RATIO, places, (*COMMIT, *WRITE), batch=((7, 100), (6, 101))),
    "write that passes": Deed(
        RATIO, writes_past_the_limit, (*COMMIT, *WRITE, *WAIT), batch=OVER_ALL
    ),
    "sample": Deed(RATIO, samples, ("flow.drawn",)),
    "sample of both": Deed(BOTH, samples, ("flow.drawn",)),
    "sample that passes": Deed(RATIO, samples_past_the_limit, WAIT),
    "sample taken back": Deed(RATIO, samples_and_takes_it_back, ("flow.drawn",)),
    "take": Deed(QUEUE, takes, ("flow.reading", "flow.taken"), taken=4),
    "refused write": Deed(RATIO, waits_to_write, WAIT),
    "refused write to a queue": Deed(QUEUE, waits_to_write, WAIT),
    "refused sample": Deed(RATIO, waits_to_sample, WAIT),
    "refused take": Deed(QUEUE, waits_to_take, WAIT),
    "write after a wait": Deed(RATIO, registers_and_writes, (*WAIT, *COMMIT, *WRITE), batch=BATCH),
    "leave in a wait": Deed(RATIO, registers_and_leaves, WAIT),
    "abort": Deed(RATIO, aborts, WRITE),
    "abort in a queue": Deed(QUEUE, aborts, WRITE),
    "write behind a gap": Deed(
        QUEUE, aborts_and_writes, ("flow.passed",), batch=((0, 100), (1, 101)), taken=99
    ),
    "empty": Deed(RATIO, empties, ("flow.base",)),
    "empty a queue": Deed(QUEUE, empties, ("flow.base", "flow.passed")),
    "restore": Deed(RATIO, restores, ("flow.base",)),
    "set a first ratio": Deed(None, sets(RATIO), SET, RATIO),
    "set another ratio": Deed(RATIO, sets(OTHER), SET, OTHER),
    "set a queue for a ratio": Deed(RATIO, sets(QUEUE), SET, QUEUE),
    "set a ratio for a queue": Deed(QUEUE, sets(OTHER), SET, OTHER),
    "set a queue with more": Deed(QUEUE, sets(THRICE), SET, THRICE),
    "set a queue with less": Deed(QUEUE, sets(ONCE), SET, ONCE),
    "set nothing": Deed(BOTH, sets(None), SET, None),
}
#: Operations of a process that was killed before. The victim repairs after this process.
DEAD: dict[str, tuple[Deed, Callable[[Path], object]]] = {
    "reap a claimer": (
        Deed(RATIO, called, ("flow.pending", "flow.settled")),
        lambda path: dies_after(path, claims),
    ),
    "reap who waited": (
        Deed(RATIO, called, WAIT),
        lambda path: dies_after(path, registers),
    ),
    "reap a reader": (
        Deed(QUEUE, called, (), taken=4),
        lambda path: dies_after(path, reads),
    ),
    "repair a claim": (
        Deed(RATIO, called, ("flow.pending", "flow.promised", "flow.limited")),
        lambda path: dies(path, "write.mark", writes),
    ),
    "repair a wait": (
        Deed(RATIO, called, ("flow.pending", "flow.promised", *WAIT)),
        lambda path: dies(path, "flow.waits", registers, after=1),
    ),
    "repair an emptying": (
        Deed(QUEUE, called, ("flow.base", "flow.passed", "flow.promised")),
        lambda path: dies(path, "empty.emptying", empties),
    ),
}
PAIRS = [(name, point) for name, deed in DEEDS.items() for point in deed.points]
MENDING = [
    (name, point) for name, (deed, _) in DEAD.items() for point in (*deed.points, "reap.freed")
]


@contextmanager
def buffer(path: Path, deed: Deed, kind: str = "rows") -> Iterator[Engine]:
    """Opens a limited buffer with items."""
    with Engine.open(path, replace(settings(kind), alpha=None)) as engine:
        ring = engine.define(schema(kind))
        engine.set_limiter(deed.limiter)
        write(ring, range(WRITTEN))
        ring.admission.admit(DRAWN)
        if ring.admission.is_queue:
            assert take(ring, DRAWN) == [0, 0, 1]
        yield engine


def require_consistent(engine: Engine) -> None:
    """Checks that the counters in the runtime page match the registry."""
    runtime, entries = engine.seat.control.runtime[0], engine.seat.control.entries
    engine.stats()  # takes the mutex, which repairs what a dead owner left
    claimed = entries["phase"] == Phase.PAYLOAD
    assert int(runtime["pending"]) == int(entries["pending"][claimed].sum())
    assert not entries["pending"][~claimed].any()
    assert int(runtime["limited"]) == int(np.count_nonzero(entries["waits_for"]))


def require_mended(engine: Engine, deed: Deed) -> None:
    """Checks all invariants after a death, and then uses the limited buffer."""
    require_consistent(engine)
    engine.seat.reap_dead()
    require_consistent(engine)
    runtime, entries = engine.seat.control.runtime[0], engine.seat.control.entries
    assert (int(runtime["pending"]), int(runtime["limited"])) == (0, 0)
    assert not entries["reading"][entries["state"] == EntryState.LIVE].any()
    require_sound(engine)
    limiter = engine.limiter
    either = (deed.limiter, deed.limiter if deed.afterwards == "the same" else deed.afterwards)
    assert told(limiter) in map(told, either)
    there, batch = read_all(ring_of(engine)), dict(deed.batch)
    old = {number: number for number in range(WRITTEN)}
    ours = {slot: number for slot, number in there.items() if number >= 100}
    assert ours in ({}, batch)
    if deed.work is empties or deed is DEAD["repair an emptying"][0]:
        assert there in ({}, old)
    elif deed.batch is OVER_ALL:
        assert ours or there.items() <= old.items()
    else:
        assert {slot: number for slot, number in there.items() if number < 100} == old
    if limiter is None:
        write(ring_of(engine), range(10))
    elif limiter.max_times_sampled is not None:
        require_queue(ring_of(engine), limiter, deed, ours, bool(there))
    else:
        if deed.work in NOT_DRAWN:
            assert ring_of(engine).admission.rate_status().ahead == 1 + len(ours)
        if deed.work is writes_past_the_limit:
            assert ring_of(engine).admission.rate_status().ahead == 1
        require_ratio(ring_of(engine), limiter)


def told(limiter: RateLimiter | None) -> object:
    return None if limiter is None else (*limiter.to_numbers(), limiter.alone)


def require_queue(
    ring: Ring, limiter: RateLimiter, deed: Deed, ours: dict[int, int], full: bool
) -> None:
    """Checks the order and number of the remaining items, and then uses all space."""
    times = limiter.max_times_sampled
    assert times is not None
    handed = np.zeros(200, int)
    if deed.limiter is not None and deed.limiter.max_times_sampled is not None:
        handed[[0, 1]] = times, 1  # elements that were delivered are not delivered again
    numbers = [*range(WRITTEN if full else 0), *(number for _, number in sorted(ours.items()))]
    left = [number for number in numbers for _ in range(max(0, times - handed[number]))]
    with_ratio = limiter.samples_per_insert is not None
    if with_ratio:
        ring.limit(replace(limiter, samples_per_insert=None, error_buffer=None))
    found = take_all(ring)
    kept = [number for number in left if number < 100]
    lost = kept[: deed.taken]
    assert found in (left, left[len(lost) :])
    for number in range(20, 20 + CAPACITY):
        assert goes(lambda number=number: write(ring, [number])), "a writer waits for the dead"
    assert not goes(lambda: write(ring, [19]))
    again = [number for number in range(20, 20 + CAPACITY) for _ in range(times)]
    assert take(ring, len(again)) == again


def require_ratio(ring: Ring, limiter: RateLimiter) -> None:
    """Checks that both sides stay within the error buffer, and that one can always go on."""
    buffer = limiter.tolerance
    assert abs(ring.admission.rate_status().ahead) <= buffer
    went = {"write": 0, "sample": 0}
    for step in range(40):
        first = ("write", "sample") if step % 16 < 8 else ("sample", "write")
        for what in first:
            before = ring.admission.rate_status()
            share = before.wanted if what == "write" else -1.0
            assert share is not None
            fits = abs(before.ahead + share) <= buffer or before.ahead * share < 0
            fits = fits and (what == "write" or before.size >= limiter.min_size)
            act = (
                (lambda: write(ring, [30]))
                if what == "write"
                else (lambda: ring.admission.admit(1))
            )
            assert goes(act) == fits, f"{what}: {before}"
            if fits:
                went[what] += 1
                break
        else:
            pytest.fail("neither side can go on")
        assert abs(ring.admission.rate_status().ahead) <= buffer
    assert min(went.values()) > 0


@pytest.mark.parametrize(
    ("name", "point", "kind"),
    [
        (name, point, kind)
        for kind in ("rows", "records")
        for name, point in PAIRS
        if kind == "rows" or DEEDS[name].work not in OF_ROWS
    ],
)
def test_nobody_waits_for_a_victim_of_flow_control(
    tmp_path: Path, name: str, point: str, kind: str
) -> None:
    deed = DEEDS[name]
    for survivor in each_death(
        tmp_path,
        lambda path: buffer(path, deed, kind),
        lambda path, passing: dies(path, point, deed.work, after=passing),
        PASSINGS,
    ):
        require_mended(survivor, deed)


@pytest.mark.product(few=5)
@pytest.mark.parametrize(("name", "point"), PAIRS)
def test_recovery_alone_leaves_nobody_waiting(tmp_path: Path, name: str, point: str) -> None:
    deed = DEEDS[name]
    for found in each_recovery(
        tmp_path,
        lambda path: buffer(path, deed),
        lambda path, passing: dies(path, point, deed.work, after=passing),
        (0, 1, 4),
    ):
        require_mended(found, deed)


HELD = [(name, point) for name, point in PAIRS if name != "leave in a wait" and point not in STEPS]


@pytest.mark.product(few=5)
@pytest.mark.parametrize(("name", "point"), HELD)
def test_a_waiter_gets_the_mutex_of_a_limited_victim(tmp_path: Path, name: str, point: str) -> None:
    deed, path = DEEDS[name], tmp_path / "buffer"
    with buffer(path, deed) as survivor:
        waits_for_the_mutex_of(path, point, deed.work, require_consistent)
        assert survivor.stats()["repairs"] == 1
        require_mended(survivor, deed)


@pytest.mark.product(few=3)
@pytest.mark.parametrize(("name", "point"), MENDING)
def test_a_process_that_dies_repairing_a_limited_buffer_is_followed_by_another(
    tmp_path: Path, name: str, point: str
) -> None:
    deed, dead = DEAD[name]

    def kill(path: Path, passing: int) -> bool:
        dead(path)
        return mends(path, point, passing)

    for survivor in each_death(tmp_path, lambda path: buffer(path, deed), kill, PASSINGS):
        require_mended(survivor, deed)


#: Points that are passed only without a schema, or if the bytes are not trusted.
NEVER = (
    *("recover.entries", "recover.dropped", "recover.head", "recover.count"),
    *("recover.misplaced", "recover.weights", "recover.reserved"),
)


@pytest.mark.parametrize("name", DEAD)
@pytest.mark.parametrize(
    "point", [point for point in python_points("recover") if point not in NEVER]
)
def test_a_recovery_of_a_limited_buffer_is_repeated(tmp_path: Path, name: str, point: str) -> None:
    deed, dead = DEAD[name]

    def kill(path: Path, passing: int) -> bool:
        dead(path)
        return mends(path, point, passing)

    for found in each_recovery(tmp_path, lambda path: buffer(path, deed), kill, range(6)):
        require_mended(found, deed)


@pytest.mark.parametrize("before", [None, OTHER])
@pytest.mark.parametrize("point", python_points("limit"))
def test_a_limiter_before_the_first_item_is_whole(
    tmp_path: Path, point: str, before: RateLimiter | None
) -> None:
    @contextmanager
    def undefined(path: Path) -> Iterator[Engine]:
        with Engine.open(path, replace(settings("rows"), alpha=None)) as engine:
            if before is not None:
                engine.set_limiter(before)
            yield engine

    for survivor in each_death(
        tmp_path,
        undefined,
        lambda path, passing: dies(path, point, sets(RATIO), after=passing),
        range(10),
    ):
        done = point == "limit.published"
        assert told(survivor.limiter) == told(RATIO if done else before)
        ring = survivor.define(schema())
        limiter = survivor.limiter
        assert limiter is None or limiter.min_size > 1
        if limiter is not None:
            assert not goes(lambda: ring.admission.admit(1))  # noqa: B023
            write(ring, range(limiter.min_size))
            require_ratio(ring, limiter)
        require_sound(survivor)


def test_every_point_of_flow_control_is_died_at() -> None:
    died_at = {point for _, point in (*PAIRS, *MENDING)}
    assert died_at >= set(native_points("flow"))
    assert {"recover.flow", "recover.limiter"} <= set(python_points("recover"))
    assert python_points("limit") == ["limit.stored", "limit.published"]
