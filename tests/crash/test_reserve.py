"""Processes that hold reservations are killed at every step.

The space of a dead holder is free again, and the reservations of other clients stay. Pieces in a
file are known to be committed if, and only if, their items are present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.flow.holders import table_of
from shmbuffer.memory.format.layout import Phase
from shmbuffer.memory.format.ledger import RESERVATIONS, ReservationState
from tests.crash.harness import (
    CAPACITY,
    dies,
    dies_after,
    each_death,
    each_recovery,
    goes,
    mends,
    native_points,
    read_all,
    require_sound,
    schema,
    settings,
    take_all,
    waits_for_the_mutex_of,
    write,
)
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

QUEUE = RateLimiter(max_times_sampled=1)
RATIO = RateLimiter(samples_per_insert=1, error_buffer=CAPACITY)
LONG_NS = 5 * 10**9
PASSINGS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
WRITTEN = 2
"""Number of items in the buffer before the victim starts, with the numbers 0 and 1."""
OURS = 2
"""Number of slots that the survivor has reserved."""
BATCH = {2: 100, 3: 101}
#: Number that identifies the victim's pieces.
NUMBER = 77


def reserve(engine: Engine, rows: int, **options: float) -> int:
    return ring_of(engine).reservations.reserve(rows, **options)  # type: ignore[arg-type]


# Operations of the victims


def reserves(engine: Engine) -> None:
    reserve(engine, 4)


def reserves_for_a_while(engine: Engine) -> None:
    reserve(engine, 2, seconds=3600.0)
    reserve(engine, 2, seconds=60.0)


def reserves_and_gives_back(engine: Engine) -> None:
    assert ring_of(engine).reservations.give_back(reserve(engine, 4))


def reserves_and_leaves(engine: Engine) -> None:
    reserve(engine, 4)
    engine.close()


def commits(engine: Engine) -> None:
    """Commits fewer items than were reserved."""
    with ring_of(engine).reservations.hold(reserve(engine, 4)):
        write(ring_of(engine), BATCH.values())


def commits_pieces(engine: Engine) -> None:
    name = reserve(engine, 4, number=NUMBER)
    with ring_of(engine).reservations.hold(name):
        write(ring_of(engine), BATCH.values())


def commits_pieces_and_forgets_them(engine: Engine) -> None:
    commits_pieces(engine)
    assert ring_of(engine).reservations.is_done(NUMBER, forget=True)


def notes_pieces(engine: Engine) -> None:
    ring_of(engine).reservations.note_partial(reserve(engine, 4))


def aborts_the_claim(engine: Engine) -> None:
    ring = ring_of(engine)
    with ring.reservations.hold(reserve(engine, 4)):
        ring.claims.claim(2)
        ring.claims.abort()


def expires(engine: Engine) -> None:
    name = reserve(engine, 4, seconds=0.0)
    assert not ring_of(engine).reservations.give_back(name) or True
    reserve(engine, 1)


# Dead processes that others find


def claims(engine: Engine) -> None:
    name = reserve(engine, 4)
    ring_of(engine).seat.native.select_reservation(name, 0, 0, 0)
    assert ring_of(engine).seat.native.claim(2, 0, LONG_NS) >= 0


@dataclass(frozen=True)
class Deed:
    """The operation of a victim in a buffer with two items and a reservation of the survivor."""

    work: Callable[[Engine], None]
    points: tuple[str, ...]
    limiter: RateLimiter = QUEUE


TAKE = ("reserve.numbered", "reserve.noted", "reserve.open", "reserve.counted", "reserve.expiry")
CLAIM = (*TAKE, "reserve.claimed", "reserve.spent")
DEEDS = {
    "reserve": Deed(reserves, TAKE),
    "reserve beside a ratio": Deed(reserves, TAKE, RATIO),
    "reserve for a while": Deed(reserves_for_a_while, TAKE),
    "give back": Deed(reserves_and_gives_back, (*TAKE, "reserve.ended")),
    "leave": Deed(reserves_and_leaves, (*TAKE, "reserve.ended")),
    "commit": Deed(commits, CLAIM),
    "commit beside a ratio": Deed(commits, CLAIM, RATIO),
    "commit pieces": Deed(commits_pieces, CLAIM),
    "forget pieces": Deed(commits_pieces_and_forgets_them, (*CLAIM, "reserve.forgotten")),
    "note pieces": Deed(notes_pieces, (*TAKE, "reserve.partial")),
    "abort the claim": Deed(aborts_the_claim, (*TAKE, "reserve.claimed", "reserve.returned")),
    "expire": Deed(expires, (*TAKE, "reserve.ended")),
}
#: Points of a commit from a reservation, with any source of the items.
COMMITS = (
    *("write.marking", "write.payload", "write.committing", "write.commit", "write.count"),
    *("write.idle", "write.done"),
)
DEAD: dict[str, tuple[Deed, Callable[[Path], object], tuple[str, ...]]] = {
    "reap a holder": (
        DEEDS["reserve"],
        lambda path: dies_after(path, reserves),
        ("reserve.ended", "reserve.counted"),
    ),
    "reap a claim of a holder": (
        Deed(claims, ()),
        lambda path: dies_after(path, claims),
        ("reserve.ended",),
    ),
    "repair a reservation": (
        DEEDS["reserve"],
        lambda path: dies(path, "reserve.open", reserves),
        ("reserve.repaired", "reserve.counted", "reserve.expiry", "reserve.ended"),
    ),
    "repair a claim": (
        DEEDS["commit pieces"],
        lambda path: dies(path, "reserve.claimed", commits_pieces),
        ("reserve.repaired", "reserve.counted", "reserve.expiry"),
    ),
    "repair a commit": (
        DEEDS["commit pieces"],
        lambda path: dies(path, "write.committing", commits_pieces),
        ("reserve.spent", "reserve.repaired", "reserve.counted"),
    ),
}
PAIRS = [(name, point) for name, deed in DEEDS.items() for point in deed.points]
PAIRS += [
    (name, point)
    for name in ("commit", "commit pieces", "commit beside a ratio")
    for point in COMMITS
]
MENDING = [(name, point) for name, (*_, points) in DEAD.items() for point in points]


@contextmanager
def buffer(path: Path, deed: Deed) -> Iterator[tuple[Engine, int]]:
    """Opens a limited buffer with items; yields it with the name of the survivor's reservation."""
    with Engine.open(path, replace(settings("rows"), alpha=None)) as engine:
        ring = engine.define(schema())
        engine.set_limiter(deed.limiter)
        write(ring, range(WRITTEN))
        yield engine, reserve(engine, OURS)


def require_consistent(engine: Engine) -> None:
    """Checks that the counters in the runtime page match the reservations."""
    engine.stats()  # takes the mutex, which repairs what a dead owner left
    table, runtime = table_of(engine.seat), engine.seat.control.runtime[0]
    held = table["state"] == ReservationState.OPEN
    assert int(runtime["reserved"]) == int(table["rows"][held].sum())
    assert int(runtime["reserved_bytes"]) == int(table["bytes"][held].sum())
    claimed = table[table["state"] == ReservationState.CLAIMED]
    entries = engine.seat.control.entries
    assert (entries["phase"][claimed["entry"]] == Phase.PAYLOAD).all()


def require_mended(engine: Engine, name: int | None, deed: Deed) -> None:
    """Checks all invariants after a death, and then uses the buffer."""
    ring = ring_of(engine)
    require_consistent(engine)
    engine.seat.reap_dead()
    require_consistent(engine)
    table, runtime = table_of(engine.seat), engine.seat.control.runtime[0]
    states = table["state"].tolist()
    ours = 0 if name is None else 1
    assert states.count(ReservationState.OPEN) == ours
    assert int(runtime["reserved"]) == ours * OURS
    assert states.count(ReservationState.CLAIMED) == int(runtime["pending"]) == 0
    require_sound(engine)
    there = read_all(ring)
    batch = {slot: number for slot, number in there.items() if number >= 100}
    assert batch in ({}, BATCH), "a batch is there in part"
    assert there.items() - batch.items() == {(0, 0), (1, 1)}
    done = states.count(ReservationState.DONE)
    assert done <= bool(batch)
    if deed.work is commits_pieces:
        assert done == bool(batch), "pieces are known to be committed if their items are there"
    if done:
        assert ring.reservations.is_done(NUMBER)
        assert ring.reservations.is_done(NUMBER, forget=True)
    assert not ring.reservations.is_done(NUMBER)
    require_room(ring, name, len(batch))


def require_room(ring: Ring, name: int | None, batch: int) -> None:
    """Checks that others can use the space that is not reserved, and the survivor its own."""
    if ring.admission.is_queue:
        take_all(ring)
        room = CAPACITY
    else:
        room = CAPACITY - WRITTEN - batch + 1  # the limiter does not count the first item
    others = room - (0 if name is None else OURS)
    for number in range(others):
        assert goes(lambda number=number: write(ring, [10 + number])), "room of the dead is held"
    assert not goes(lambda: write(ring, [30]))
    if name is not None:
        with ring.reservations.hold(name):
            assert goes(lambda: write(ring, [31, 32])), "our room was given away"
        assert not goes(lambda: write(ring, [33]))
        assert int(ring.seat.control.runtime["reserved"][0]) == 0


@pytest.mark.parametrize(("name", "point"), PAIRS)
def test_what_a_victim_has_reserved_is_free_and_ours_stays_ours(
    tmp_path: Path, name: str, point: str
) -> None:
    deed = DEEDS[name]
    for survivor, ours in each_death(
        tmp_path,
        lambda path: buffer(path, deed),
        lambda path, passing: dies(path, point, deed.work, after=passing),
        PASSINGS,
    ):
        require_mended(survivor, ours, deed)


@pytest.mark.product(few=6)
@pytest.mark.parametrize(("name", "point"), PAIRS)
def test_recovery_ends_all_reservations(tmp_path: Path, name: str, point: str) -> None:
    deed = DEEDS[name]
    for found in each_recovery(
        tmp_path,
        lambda path: buffer(path, deed),
        lambda path, passing: dies(path, point, deed.work, after=passing),
        (0, 1, 4),
    ):
        require_mended(found, None, deed)


@pytest.mark.product(few=6)
@pytest.mark.parametrize(("name", "point"), [pair for pair in PAIRS if pair[0] != "leave"])
def test_a_waiter_gets_the_mutex_of_a_victim_that_reserves(
    tmp_path: Path, name: str, point: str
) -> None:
    deed, path = DEEDS[name], tmp_path / "buffer"
    with buffer(path, deed) as (survivor, ours):
        waits_for_the_mutex_of(path, point, deed.work, require_consistent)
        require_mended(survivor, ours, deed)


@pytest.mark.parametrize(("name", "point"), MENDING)
def test_a_process_that_dies_mending_reservations_is_followed_by_another(
    tmp_path: Path, name: str, point: str
) -> None:
    deed, dead, _ = DEAD[name]

    def kill(path: Path, passing: int) -> bool:
        dead(path)
        return mends(path, point, passing)

    for survivor, ours in each_death(tmp_path, lambda path: buffer(path, deed), kill, range(5)):
        require_mended(survivor, ours, deed)


def test_a_table_that_is_full_is_free_again_when_its_holder_is_dead(tmp_path: Path) -> None:
    def fills(engine: Engine) -> None:
        engine.set_limiter(None)
        for _ in range(RESERVATIONS - 1):
            reserve(engine, 1)

    deed = Deed(fills, ())
    with buffer(tmp_path / "buffer", deed) as (survivor, ours):
        dies_after(tmp_path / "buffer", fills)
        survivor.set_limiter(QUEUE)
        assert int(np.count_nonzero(table_of(survivor.seat)["state"])) == RESERVATIONS
        require_mended(survivor, ours, deed)


def test_every_point_of_reservations_is_died_at() -> None:
    died_at = {point for _, point in (*PAIRS, *MENDING)}
    assert died_at >= set(native_points("reserve"))
