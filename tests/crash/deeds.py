"""Deeds: the operations of a process that change a buffer, and what a death in one may leave.

Each deed is done in a ring of eight slots that contains the items 3 to 10. If the process dies, the
deed is afterwards either done or not done. `require_done_or_not` checks which of the two it must be
for the point at which the process died.
"""

from __future__ import annotations

import ctypes
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import (
    RECORD_POINTS,
    dies,
    ended,
    fork,
    native_points,
    read_all,
    require_sound,
    schema,
    settings,
    write,
)
from tests.crash.situations import is_committed_at
from tests.kit.rings import ring_of

ITEMS = {k % 8: k for k in range(3, 11)}
BATCH = (100, 101, 102)
TARGETS = dict(zip((3, 4, 5), BATCH, strict=True))
UPDATED = [0, 2, 3, 5]
MUTEX = ("mutex.locked", "mutex.unlocked")
TREE = ("tree.sum", "tree.least")
LEAVES = ("leaves.mass", "leaves.length", "leaves.padding")


def prepare(path: Path, kind: str = "rows") -> Engine:
    engine = Engine.open(path, settings(kind))
    write(engine.define(schema(kind)), range(11))
    return engine


def writes(engine: Engine) -> None:
    write(ring_of(engine), BATCH)


def updates(engine: Engine) -> None:
    where = np.array(UPDATED, np.int64)
    tickets = (ring_of(engine).live.words[where] >> np.uint64(2)).astype(np.int64)
    ring_of(engine).update(where, np.full(len(where), 50.0), tickets)


def empties(engine: Engine) -> None:
    ring_of(engine).empty()


def sets_alpha(engine: Engine) -> None:
    ring_of(engine).tree.set_alpha(2.0)


def aborts(engine: Engine) -> None:
    ring_of(engine).claims.claim(3)
    ring_of(engine).claims.abort()


def copies(engine: Engine) -> None:
    ring = ring_of(engine)
    if ring.records is not None:
        with tempfile.TemporaryFile() as file:
            ring.records.copy_out(file.fileno(), "a file")
    rows = [bytearray(max(1, ring.elements * leaf.nbytes)) for leaf in ring.schema.leaves]
    ring.copy_out([ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows])


def reaps(engine: Engine) -> None:
    engine.seat.reap_dead()


#: Maps the name of a deed to its function and the crash points that it passes.
DEEDS: dict[str, tuple[Callable[[Engine], None], tuple[str, ...]]] = {
    "write": (
        writes,
        (
            *(point for point in native_points("write") if point not in RECORD_POINTS),
            *(*MUTEX, *TREE, "count.added"),
        ),
    ),
    "update": (updates, (*native_points("update"), *MUTEX, *TREE, "count.added")),
    "empty": (empties, (*native_points("empty"), *MUTEX, *TREE, "reap.mass", "count.added")),
    "alpha": (sets_alpha, (*native_points("alpha"), *MUTEX, *TREE, *LEAVES)),
    "abort": (aborts, (*native_points("abort"), "count.added")),
    "reap": (
        reaps,
        (
            *("reap.locked", "reap.mass", "reap.leaf", "reap.word", "reap.head", "reap.count"),
            *("reap.parents", "reap.idle", "reap.freed", "reap.unlocked", "count.added"),
            *(*MUTEX, *TREE),
        ),
    ),
}
PAIRS = [(deed, point) for deed, (_, points) in DEEDS.items() for point in points]


def is_done(deed: str, point: str) -> bool | None:
    """True if the deed is done when its process dies at that point; None if both are allowed."""
    match deed:
        case "write":
            return point == "count.added" or (point.startswith("write.") and is_committed_at(point))
        case "empty":
            before = ("empty.locked", "empty.first", "empty.span", "empty.noted", "mutex.locked")
            return point not in before
        case "alpha":
            return point != "mutex.locked"
        case "update":
            if point in ("mutex.locked", "update.locked"):
                return False
            return True if point in ("update.unlocked", "mutex.unlocked", "count.added") else None
    return True


def begins(path: Path, deed: str) -> Callable[[Engine], None]:
    """Returns the function of a victim. For a reaping, it first leaves a dead process to reap."""
    if deed == "reap":
        assert dies(path, "write.copy", writes)
    return DEEDS[deed][0]


def ends_at(path: Path, deed: str, point: str, after: int = 0) -> bool:
    """Kills a victim at the point; returns False if the victim did not pass the point.

    A joiner reaps before it takes an entry, so a reaper arms the point before it joins.
    """
    work = begins(path, deed)
    if deed != "reap":
        return dies(path, point, work, after=after)

    def joins() -> None:
        _core.arm(point, after=after)
        with Engine.open(path, None):
            _core.disarm()

    status = ended(fork(joins))
    assert status in (0, -signal.SIGKILL)
    return status == -signal.SIGKILL


def require_done_or_not(engine: Engine, deed: str, done: bool | None) -> None:
    """Checks items, priorities and alpha; ``done`` is None if the deed may be done or not."""
    ring = ring_of(engine)
    there, priorities = read_all(ring), ring.tree.priorities()
    rest = {slot: item for slot, item in ITEMS.items() if slot not in TARGETS}
    match deed, done:
        case "write", True:
            assert there == ITEMS | TARGETS
        case "empty", True:
            assert there == {}
        case "write", False:
            assert rest.items() <= there.items() <= ITEMS.items()
        case "abort" | "reap", _:
            assert there == rest
        case _:
            assert there == ITEMS
    for slot, item in there.items():
        either = {item + 1.0} if done is False or slot not in UPDATED else {item + 1.0, 50.0}
        expected = {50.0} if done and slot in UPDATED else either
        assert priorities[slot] in (expected if deed == "update" else {item + 1.0})
    if deed == "alpha" and done is not None:
        assert ring.tree.alpha == (2.0 if done else 0.5)
    require_sound(engine)
