"""Writers with shared observations are killed at every step, and no next observation is lost.

Item k has the observation k and the next observation k + 1. An item and its successor therefore
have one observation in common. Every fifth item ends an episode. A survivor or a new process reads
the items, runs the check, and writes for some laps. The ring has few rows for separate next
observations, so a lost row would be noticed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from shmbuffer.memory.upkeep.check import check
from tests.crash.harness import (
    arm_and_open,
    called,
    dies,
    ended,
    fork,
    native_points,
    stopped_at,
    succeeds,
)
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

CAPACITY, ROOM = 8, 14
LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("obs",), "int64", (2,)),
    Leaf(("next", "obs"), "int64", (2,)),
)
SETTINGS = Settings(
    capacity=CAPACITY, alpha=0.5, eps=0.0, extra={"share_next": {"keys": [], "room": ROOM}}
)
POINTS = native_points("share")
WHOLE = np.uint64(2**63)


def batch(numbers: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    number = np.array(list(numbers), np.int64)
    following = np.where(number % 5 == 4, -number, number + 1)
    return number, np.stack([number, 7 * number], 1), np.stack([following, 7 * following], 1)


def write(ring: Ring, numbers: Iterable[int], streams: list[int] | None = None) -> None:
    arrays = batch(numbers)
    whose = None if streams is None else np.array(streams, np.uint32)
    ring.write([one.ctypes.data for one in arrays], len(arrays[0]), streams=whose)


def read_all(ring: Ring) -> dict[int, int]:
    """Returns the number of the item in each slot; fails if an item is not as it was written."""
    out, tickets = batch(range(CAPACITY)), np.empty(CAPACITY, np.int64)
    index = np.arange(CAPACITY)
    addresses = [one.ctypes.data for one in out]
    ring.read(index.ctypes.data, CAPACITY, addresses, tickets.ctypes.data)
    held = (tickets >= 0).nonzero()[0]
    numbers = out[0][held].tolist()
    for found, expected in zip(out, batch(numbers), strict=True):
        torn = (found[held] != expected).any(tuple(range(1, found.ndim)))
        assert not torn.any(), f"slots {held[torn]} are torn"
    return dict(zip(held.tolist(), numbers, strict=True))


def prepare(path: Path) -> Engine:
    """Creates a ring with the items 3 to 10, each linked to the next one."""
    engine = Engine.open(path, SETTINGS)
    ring = engine.define(Schema(LEAVES, CAPACITY))
    for number in range(11):
        write(ring, [number])
    assert whole(ring) == [4, 9, 10]
    return engine


def prepare_and_die(path: Path) -> None:
    _ = prepare(path)
    os.kill(os.getpid(), signal.SIGKILL)


def whole(ring: Ring) -> list[int]:
    """Returns the items whose next observation is stored in a row of its own."""
    own = ring.live.nexts >= WHOLE
    return sorted(number for slot, number in read_all(ring).items() if own[slot])


def require_sound(engine: Engine) -> None:
    ring = ring_of(engine)
    assert engine.check().ok, engine.check().problems
    assert ring.length == len(read_all(ring))
    assert ring.live.count_own_rows() == len(whole(ring)), "a row is in use, and no item has it"


def require_usable(engine: Engine) -> None:
    ring = ring_of(engine)
    for number in range(500, 500 + 4 * CAPACITY):
        write(ring, [number])
        require_sound(engine)
    assert sorted(read_all(ring).values()) == list(range(524, 532))
    assert whole(ring) == [524, 529, 531]


# Operations of the victim, and the steps of sharing that they pass


def follows(engine: Engine) -> None:
    for numbers in ([20], [21], [22, 23, 24], [25], [26], [27, 28]):
        write(ring_of(engine), numbers)


def follows_in_streams(engine: Engine) -> None:
    for first in range(3):
        write(ring_of(engine), [20 + first, 120 + first, 40 + first], [0, 5, 2])


def writes_more_than_fits(engine: Engine) -> None:
    write(ring_of(engine), range(20, 31))


def writes_four(engine: Engine) -> None:
    write(ring_of(engine), range(20, 24))


def _place(engine: Engine, where: list[int], *, in_place: bool) -> None:
    arrays = batch(range(200, 200 + len(where)))
    at = np.array(where, np.int64)
    ring_of(engine).place(at, [one.ctypes.data for one in arrays], in_place=in_place)


def places(engine: Engine) -> None:
    _place(engine, [5, 0, 7], in_place=False)


def writes_in_place(engine: Engine) -> None:
    _place(engine, [1, 4, 5], in_place=True)


def places_everywhere(engine: Engine) -> None:
    _place(engine, list(range(CAPACITY)), in_place=False)


def moves_the_head(engine: Engine) -> None:
    ring_of(engine).restore(ring_of(engine).head + 3, 11, None)


WRITE = ("share.holder", "share.next", "share.source", "share.filled")
MADE = ("share.copied", "share.assigned", "share.own_row")
DEEDS: dict[Callable[[Engine], None], tuple[str, ...]] = {
    follows: (*WRITE, "share.back", "share.link", "write.commit", "write.count", "abort.word"),
    follows_in_streams: (*WRITE, "share.back", "share.link", "write.mark", "write.commit"),
    writes_more_than_fits: (*WRITE, "write.mark", "write.claimed", "write.commit"),
    places: (*MADE, *WRITE, "write.mark", "write.claimed", "write.commit"),
    writes_in_place: (*MADE, *WRITE, "write.mark", "write.claimed", "write.commit"),
    places_everywhere: (*WRITE, "write.mark", "write.claimed", "write.commit"),
    moves_the_head: (*MADE, "restore.head"),
}
CASES = [
    (deed, point) for deed, points in DEEDS.items() for point in points if point[:5] != "abort"
]
#: Passings of a point at which the victim is killed.
PASSINGS = (0, 1, 2, 3, 5, 8)


def test_every_step_of_sharing_is_in_a_case() -> None:
    beside = set(OF_RECOVERY)
    assert {point for _, point in CASES if point in POINTS} == {*POINTS} - beside


def kills(folder: Path, deed: Callable[[Engine], None], point: str, *, alone: bool) -> list[Path]:
    """Kills writers at several passings of a point; returns the paths of their buffers.

    The buffers are open unless ``alone``.
    """
    paths = []
    for passing in PASSINGS:
        path = folder / str(passing)
        engine = prepare(path)
        if alone:
            engine.close()
        if not dies(path, point, deed, after=passing):
            engine.close()
            break
        paths.append(path)
        if not alone:
            engine.seat.reap_dead()
            look(engine, deed)
            engine.close()
    assert paths, f"{point} was never reached"
    return paths


def look(engine: Engine, deed: Callable[[Engine], None]) -> None:
    there = read_all(ring_of(engine))
    require_sound(engine)
    if deed in (places, writes_in_place, places_everywhere):
        new = {slot: number for slot, number in there.items() if number >= 200}
        assert len(new) in (0, 3 if deed is not places_everywhere else CAPACITY)
    if deed in (places, writes_in_place):
        untouched = {k % CAPACITY: k for k in range(3, 11)}
        for slot in (5, 0, 7) if deed is places else (1, 4, 5):
            del untouched[slot]
        assert untouched.items() <= there.items()
    if deed is moves_the_head:
        assert len(there) == CAPACITY
    require_usable(engine)


@pytest.mark.parametrize(("deed", "point"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_survivor_finds_every_next_observation(
    tmp_path: Path, deed: Callable[[Engine], None], point: str
) -> None:
    kills(tmp_path, deed, point, alone=False)


@pytest.mark.product(few=4)
@pytest.mark.parametrize(("deed", "point"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_fresh_process_finds_every_next_observation(
    tmp_path: Path, deed: Callable[[Engine], None], point: str
) -> None:
    for number, path in enumerate(kills(tmp_path, deed, point, alone=True)):
        report = check(path)
        assert report.ok, "what the next recovery mends is no problem"

        def recovers(path: Path = path) -> None:
            with Engine.open(path, None) as engine:
                look(engine, deed)

        (called if number else succeeds)(recovers)


@pytest.mark.parametrize("point", ["share.back", "share.link", "share.own_row", "write.commit"])
def test_a_reader_beside_a_writer_that_stands_still_sees_whole_items(
    tmp_path: Path, point: str
) -> None:
    """Reading needs no lock: the present or former word of the slot leads to the bytes."""
    engine = prepare(tmp_path / "buffer")
    with stopped_at(tmp_path / "buffer", point, places if point == "share.own_row" else follows):
        assert len(read_all(ring_of(engine))) >= CAPACITY - 3
    engine.seat.reap_dead()
    require_usable(engine)
    engine.close()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_items_go_in_order_though_their_writer_died_before_it_had_marked_them(
    tmp_path: Path, after: int
) -> None:
    """The head has passed them, so a remaining item would outlive its next observation."""
    engine = prepare(tmp_path / "buffer")
    assert dies(tmp_path / "buffer", "write.mark", writes_four, after=1)
    status = ended(fork(lambda: arm_and_open(tmp_path / "buffer", "reap.word", after)))
    assert status == (-signal.SIGKILL if after < 4 else 0)  # a client that joins repairs
    engine.seat.reap_dead()
    there = read_all(ring_of(engine))
    assert {number for number in there.values() if number < 100} == {7, 8, 9, 10}
    require_sound(engine)
    require_usable(engine)
    engine.close()


OF_RECOVERY = ("share.restored", "share.dropped")


def section(path: Path, name: str) -> np.ndarray:
    """Maps a section in the slots file of a buffer that is not open."""
    at = Schema(LEAVES, CAPACITY).sections  # the section lies where it would without sharing
    start = _core.sections(CAPACITY, 1, False, ROOM)[name]
    assert start >= at["mass"]
    kind, count = (np.uint64, CAPACITY) if name == "nexts" else (np.uint32, ROOM)
    return np.memmap(path / ".shmbuffer/slots", kind, "r+", start, (count,))


def older_holders(path: Path) -> None:
    section(path, "holders")[:] = 3


def leads_nowhere(path: Path) -> None:
    section(path, "nexts")[3] = np.uint64(2**63 + ROOM)


def leads_elsewhere(path: Path) -> None:
    section(path, "nexts")[3] += np.uint64(1)


def has_the_row_of_another(path: Path) -> None:
    nexts = section(path, "nexts")
    own = np.flatnonzero(nexts >= WHOLE)
    assert len(own) == 3
    nexts[own[0]] = nexts[own[1]]


@pytest.mark.parametrize(
    ("damage", "lost", "points"),
    [
        (older_holders, 0, ("share.restored",)),
        (leads_nowhere, 1, ("share.dropped",)),
        (leads_elsewhere, 1, ()),
        (has_the_row_of_another, 1, ()),
    ],
)
def test_a_recovery_is_killed_where_pages_are_older_than_others(
    tmp_path: Path, damage: Callable[[Path], None], lost: int, points: tuple[str, ...]
) -> None:
    """Items are compared with their checksums, and an item without its bytes is dropped."""
    for point in points or ("recover.tree",):
        path = tmp_path / point
        assert ended(fork(partial(prepare_and_die, path))) == -signal.SIGKILL
        damage(path)
        assert not check(path).ok
        if points:
            assert ended(fork(partial(arm_and_open, path, point, 0))) == -signal.SIGKILL
        with Engine.open(path, None, existing="verify") as engine:
            assert engine.report is not None
            assert len(read_all(ring_of(engine))) == CAPACITY - lost
            require_sound(engine)
            require_usable(engine)
