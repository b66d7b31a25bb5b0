"""Situations: the contents of a buffer, the write of a victim, and what it may leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shmbuffer.memory import Engine
from tests.crash.harness import (
    CAPACITY,
    EVICTIONS,
    KINDS,
    dies,
    native_points,
    place,
    read_all,
    require_sound,
    schema,
    settings,
    write,
)

#: Numbers of passings after which the victim is killed: the first ones, and some later ones.
PASSINGS = (0, 1, 3, 7, 15, 31)


@dataclass(frozen=True)
class Situation:
    """The contents of a buffer and the write of a victim.

    Attributes:
        before: number of items in the buffer, which are numbered from 0.
        batch: numbers of the victim's items.
        placed: slots of a placed or in-place write.
    """

    before: int
    batch: tuple[int, ...]
    placed: tuple[int, ...] = ()
    in_place: bool = False

    def work(self, engine: Engine) -> None:
        assert engine.ring() is not None
        if self.placed:
            place(engine.ring(), list(self.placed), self.batch, in_place=self.in_place)
        else:
            write(engine.ring(), self.batch)

    def passes(self, point: str) -> bool:
        """True if the write passes a crash point of writes. Evictions are not considered."""
        if point == "write.priority":
            return not self.placed
        keeps_slots = self.in_place and set(self.placed) <= self.old.keys()
        return not (keeps_slots and point in ("write.source", "write.raw"))

    @property
    def targets(self) -> list[int]:
        """The slots to which the batch is written."""
        if self.placed:
            return list(self.placed)
        kept = self.batch[-CAPACITY:]
        first = self.before + len(self.batch) - len(kept)
        return [(first + k) % CAPACITY for k in range(len(kept))]

    @property
    def after(self) -> dict[int, int]:
        """The number of the item in each slot of the batch, if the complete batch is present."""
        return dict(zip(self.targets, self.batch[-CAPACITY:], strict=True))

    @property
    def old(self) -> dict[int, int]:
        """The number of the item in each slot before the write."""
        return {k % CAPACITY: k for k in range(self.before)}


SITUATIONS = {
    "one item": Situation(3, (100,)),
    "a batch": Situation(2, (100, 101, 102, 103, 104)),
    "around the end": Situation(6, (100, 101, 102, 103)),
    "over a full ring": Situation(11, (100, 101, 102)),
    "a batch as large as the ring": Situation(5, tuple(range(100, 108))),
    "a batch larger than the ring": Situation(5, tuple(range(100, 111))),
    "placed": Situation(6, (100, 101, 102), (5, 0, 7)),
    "in place": Situation(10, (100, 101), (1, 4), in_place=True),
}


def prepare(path: Path, situation: Situation, kind: str) -> Engine:
    engine = Engine.open(path, settings(kind))
    ring = engine.define(schema(kind))
    for number in range(situation.before):
        write(ring, [number])
    return engine


def require_whole_or_absent(engine: Engine, situation: Situation) -> bool:
    """Checks G1, G2, G3: the batch is complete or absent, other old items are unchanged.

    Returns True if the batch is present.
    """
    assert engine.ring() is not None
    there = read_all(engine.ring())
    batch = {slot: number for slot, number in there.items() if number >= 100}
    assert batch in ({}, situation.after), "a part of a dead writer's batch is there"
    untouched = {s: number for s, number in situation.old.items() if s not in situation.targets}
    # The oldest items may have been evicted.
    if engine.ring().schema.record_bytes == KINDS["short records"]:
        kept = sorted(set(there.values()) & set(untouched.values()))
        assert kept == sorted(untouched.values())[len(untouched) - len(kept) :]
        untouched = {slot: number for slot, number in untouched.items() if number in kept}
        assert kept
    for slot, number in situation.old.items():
        if slot in untouched:
            assert there.get(slot) == number, f"item {number} is lost"
        elif not batch:
            passed = not situation.placed and engine.ring().head > situation.before
            assert there.get(slot) in ((None,) if passed else (None, number)), (
                "it is the newest now"
            )
    return bool(batch)


def killed_at_passings(
    folder: Path,
    kind: str,
    point: str,
    situation: Situation,
    look: Callable[[Path, Engine, bool], None],
    *,
    alone: bool = False,
    passings: Iterable[int] = PASSINGS,
) -> int:
    """Kills a victim at several passings of the point; returns the number of kills.

    Args:
        folder: folder of the buffers.
        kind: the kind of items.
        point: the crash point.
        situation: the state of the buffer, and the write of the victim.
        look: checks the buffer. Its last argument is True for the first kill, when a check in a new
            process is worth its time.
        alone: no other client is attached when the victim dies, so that a recovery is the first to
            see what it left.
        passings: the numbers of passings after which the victims are killed.
    """
    kills = 0
    for passing in passings:
        path = folder / str(passing)
        engine = prepare(path, situation, kind)
        if alone:
            engine.close()
        killed = dies(path, point, situation.work, after=passing)
        if killed:
            look(path, engine, kills == 0)
        engine.close()
        if not killed:
            break
        kills += 1
    old = [slot for slot in situation.old if slot in situation.targets]
    if point in EVICTIONS:
        assert kills or situation.before < CAPACITY
    elif point == "write.mass":
        assert bool(kills) == bool(old)
    else:
        assert kills, f"{point} was never reached"
    return kills


def fresh(path: Path, situation: Situation, *, expected: bool) -> None:
    with Engine.open(path, None) as engine:
        assert require_whole_or_absent(engine, situation) == expected
        require_sound(engine)


def is_committed_at(point: str) -> bool:
    """True if a death at this point rolls forward, which it does from COMMITTING on."""
    points = native_points("write")
    return points.index(point) >= points.index("write.committing")
