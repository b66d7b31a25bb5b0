"""Two processes die, one after the other, while a buffer is made, changed, recovered or removed.

The first victim is killed at every point of its work. The next process continues from there, and is
killed at every point of its own work. A third process has to find a usable buffer, or a path where
it can create one if the first victim was removing the buffer.

The points are those that a process was observed to pass, so that none can be forgotten. A process
is killed when it passes a point for the first time. The superblock decides what the next process
does, so a process is killed at each passing of the points of the superblock. The first victim is
killed at the points of the Python code, and test_compound.py kills at those of the core. The
default run takes some of the first deaths, each with every thirteenth of the second ones. `--full`
takes all of both, and the campaign takes any passing of any point.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shmbuffer import (
    BufferClosedError,
    BufferNotFoundError,
    ForkedHandleError,
    SchemaMismatchError,
    recover,
)
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Schema
from shmbuffer.memory.directory import removal
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState
from shmbuffer.memory.upkeep.check import check
from tests.crash.harness import (
    CAPACITY,
    LEAVES,
    dies,
    each_point,
    ended,
    everything,
    fork,
    read_all,
    require_sound,
    require_usable,
    sample,
    schema,
    settings,
    write,
)
from tests.kit.rings import ring_of

pytestmark = pytest.mark.crash

#: Each test takes every sixteenth of the first deaths.
PARTS = 16
#: The default run takes every thirteenth second death, with another offset for each first death.
STRIDE = 13

Arm = Callable[[], object]
Work = Callable[[Path, str, Arm], None]
Death = tuple[str, int]


def creates(path: Path, kind: str, arm: Arm) -> None:
    arm()
    Engine.open(path, settings(kind)).close()


def defines(path: Path, kind: str, arm: Arm) -> None:
    with Engine.open(path, settings(kind)) as engine:
        arm()
        engine.define(schema(kind))


def resizes(path: Path, kind: str, arm: Arm) -> None:
    with Engine.open(path, settings(kind)) as engine:
        write(engine.define(schema(kind)), range(6))
        ring_of(engine).empty()
        arm()
        make_larger(engine, kind)


def recovers(path: Path, kind: str, arm: Arm) -> None:
    """Recovers a buffer whose writer died committing four items around the end of the ring."""
    if not path.exists():
        assert ended(fork(lambda: dies_committing(path, kind))) == -signal.SIGKILL
    arm()
    recover(path)


def removes(path: Path, kind: str, arm: Arm) -> None:
    with Engine.open(path, settings(kind)) as engine:
        write(engine.define(schema(kind)), range(6))
        arm()
        engine.cleanup()


def sweeps(path: Path, kind: str, arm: Arm) -> None:
    """Removes a temporary directory whose owner was killed, like the next start of a program."""
    if not path.exists():
        assert ended(fork(lambda: owner_dies(path, kind))) == -signal.SIGKILL
    arm()
    removal._remove_abandoned(path)


def opens_and_defines(path: Path, kind: str, arm: Arm) -> None:
    arm()
    with Engine.open(path, settings(kind)) as engine:
        engine.define(schema(kind))


def opens_and_resizes(path: Path, kind: str, arm: Arm) -> None:
    arm()
    with Engine.open(path, None) as engine:
        make_larger(engine, kind)


def finishes_the_removal(path: Path, kind: str, arm: Arm) -> None:
    arm()
    with suppress(BufferNotFoundError), Engine.open(path, None) as engine:
        engine.cleanup()


def make_larger(engine: Engine, kind: str) -> None:
    """Withdraws the definition unless that was done already, and creates a larger one."""
    ring = engine.ring()
    if ring is not None and ring.capacity == CAPACITY:
        assert engine.undefine()
    engine.define(replace(schema(kind), capacity=2 * CAPACITY))


def owner_dies(path: Path, kind: str) -> None:
    engine = Engine.open(path, settings(kind), temporary=True)
    write(engine.define(schema(kind)), range(6))
    os.kill(os.getpid(), signal.SIGKILL)


def dies_committing(path: Path, kind: str) -> None:
    engine = Engine.open(path, settings(kind))
    write(engine.define(schema(kind)), range(6))
    _core.arm("write.commit")
    write(ring_of(engine), range(100, 104))


@dataclass(frozen=True)
class Case:
    """The work of the two victims and what the third process has to find.

    Attributes:
        first: what the first victim does.
        second: what the next process does.
        items: the sets of items of which the third process has to find one.
        company: whether a client is attached while the two die, so that no process recovers the
            buffer in between. It leaves before the third process opens, or is the third one.
        kinds: the kinds of items. Records are included if other files are created for them.
    """

    first: Work
    second: Work
    items: tuple[frozenset[int], ...] = (frozenset(),)
    company: bool = False
    kinds: tuple[str, ...] = ("rows",)


NONE, SIX = frozenset[int](), frozenset(range(6))
COMMITTED = frozenset({2, 3, 4, 5, 100, 101, 102, 103})
BOTH = ("rows", "records")
CASES = {
    "create": Case(creates, opens_and_defines),
    "define": Case(defines, opens_and_defines),
    "define in company": Case(defines, opens_and_defines, company=True, kinds=BOTH),
    "resize": Case(resizes, opens_and_resizes),
    "recover": Case(recovers, recovers, (COMMITTED,)),
    "remove": Case(removes, opens_and_defines, (NONE, SIX), kinds=BOTH),
    "remove, twice": Case(removes, finishes_the_removal, (NONE, SIX)),
    "sweep": Case(sweeps, opens_and_defines, (NONE, SIX)),
}
#: Points of the core. test_compound.py kills recoveries at these points.
OF_THE_CORE = frozenset(_core.crash_points())


def points(work: Work, path: Path, kind: str) -> list[str]:
    """Lets a process do the work; returns the points that it passes."""

    def watched(tell: int, hear: int) -> None:
        work(path, kind, lambda: _core.arm("*", "pause", notify_fd=tell, wait_fd=hear))

    return list(each_point(watched))


def deaths(passed: list[str]) -> list[Death]:
    """Returns points with the number of times that a process passes each before it is killed."""
    found: list[Death] = []
    for point in dict.fromkeys(passed):
        times = passed.count(point) if point.startswith("superblock.") else 1
        found += [(point, after) for after in range(times)]
    return found


def dies_at(death: Death, work: Work, path: Path, kind: str) -> bool:
    """True if a process was killed there; otherwise it did not pass the point and finished."""
    point, after = death
    status = ended(fork(lambda: work(path, kind, lambda: _core.arm(point, after=after))))
    assert status in (0, -signal.SIGKILL), f"a victim ended with {status}"
    return status == -signal.SIGKILL


def uses(engine: Engine, kind: str, items: tuple[frozenset[int], ...]) -> None:
    """Checks the items, writes, samples and runs the check."""
    ring = engine.ring() or engine.define(schema(kind))
    assert frozenset(read_all(ring).values()) in items
    write(ring, range(500, 503))
    assert len(sample(ring, 4)) == 4
    require_sound(engine)


def two_deaths(
    path: Path, kind: str, case: Case, first: Death, second: Death, *, survivor: bool = False
) -> int:
    """Runs two victims and a third process; returns how many of the two were killed.

    Args:
        survivor: whether the client that is attached all the time is the third process.
    """
    items = case.items
    company = Engine.open(path, settings(kind)) if case.company else None
    kills = dies_at(first, case.first, path, kind) + dies_at(second, case.second, path, kind)
    if company is not None and survivor:
        uses(company, kind, items)
        items = (frozenset(read_all(ring_of(company)).values()),)
    if company is not None:
        company.close()
    with Engine.open(path, settings(kind)) as third:
        uses(third, kind, items)
    return kills


def require_in_order(path: Path) -> None:
    """Runs all checks of the directory, removes it, and checks that no file is left."""
    assert [name for name in everything(path) if ".new" in name or "tmp" in name] == []
    report = check(path)
    assert report.ok, report.problems
    assert recover(path).items == report.items
    with Engine.open(path, None) as engine:
        require_usable(ring_of(engine), 999)
        engine.cleanup()
    assert not path.exists() or everything(path) == []


@pytest.mark.product("name kind")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case.kinds]
)
def test_a_third_process_finds_a_working_buffer_after_two_deaths(
    tmp_path: Path, name: str, kind: str, part: int, full: bool
) -> None:
    case, kills, pairs = CASES[name], 0, 0
    passed = points(case.first, tmp_path / "watched", kind)
    firsts = deaths([point for point in passed if point not in OF_THE_CORE])[part::PARTS]
    for number, first in enumerate(firsts):
        seconds = deaths(after_one_death(tmp_path / str(number), kind, case, first))
        for second in seconds if full else seconds[(part + number) % STRIDE :: STRIDE]:
            path = tmp_path / f"{number} {second}"
            try:
                kills += two_deaths(path, kind, case, first, second, survivor=pairs % 2 == 1)
                pairs += 1
                if second[0].startswith("superblock."):
                    require_in_order(path)
            except Exception as error:
                where = f"{kind}: killed at {first}, then at {second}"
                raise AssertionError(f"{where}: {error}") from error
    assert kills >= pairs


def after_one_death(path: Path, kind: str, case: Case, first: Death) -> list[str]:
    """Returns the points that the next process passes after one death."""
    company = Engine.open(path, settings(kind)) if case.company else None
    try:
        dies_at(first, case.first, path, kind)
        return points(case.second, path, kind)
    finally:
        if company is not None:
            company.close()


#: Points at which a first write has finished everything except its note in the runtime page.
FINISHED: list[Death] = [
    *(("superblock.stored", 0), ("superblock.half", 1), ("superblock.stored", 1)),
    ("define.superblock", 0),
]


@pytest.mark.product
@pytest.mark.parametrize("first", FINISHED)
def test_two_writers_die_in_their_first_write_and_the_buffer_is_still_there(
    tmp_path: Path, kind: str, first: Death
) -> None:
    """The second process publishes what the first one has finished, and creates no file again."""
    path, slots = tmp_path / "buffer", tmp_path / "buffer" / layout.SLOTS
    with Engine.open(path, settings(kind)) as idle:
        assert dies_at(first, defines, path, kind)
        made = slots.stat().st_ino
        assert idle.superblock.state == BufferState.READY
        assert idle.seat.state() == BufferState.NO_SCHEMA
        torn = ["one of the two superblock copies is damaged; the other is used"]
        assert check(path).problems == (torn if first[0] == "superblock.half" else [])
        assert recover(path).reason == "in use"
        for second in deaths(points(defines, tmp_path / "another", kind)):
            dies_at(second, defines, path, kind)
            assert slots.exists(), f"removed by a process that died at {second}"
            assert slots.stat().st_ino == made, f"made again by a process that died at {second}"
    with Engine.open(path, settings(kind)) as third:
        uses(third, kind, (NONE,))
    require_in_order(path)


def test_a_first_write_of_another_schema_is_refused_as_if_the_dead_writer_had_lived(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buffer"
    with Engine.open(path, settings("rows")) as engine:
        assert dies_at(("define.superblock", 0), defines, path, "rows")
        with pytest.raises(SchemaMismatchError, match="bytes"):
            engine.define(Schema(LEAVES[:2], CAPACITY))
        uses(engine, "rows", (NONE,))


def test_a_first_write_does_not_bring_back_a_buffer_that_a_dead_process_was_removing(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "buffer"
    with Engine.open(path, settings(kind)) as engine:
        assert dies(path, "remove.closing", lambda other: other.cleanup() and None)
        with pytest.raises(BufferClosedError, match="is being removed"):
            engine.define(schema(kind))
        assert engine.superblock.state == BufferState.CLOSING
    with Engine.open(path, settings(kind)) as third:
        uses(third, kind, (NONE,))


class Orphan:
    """A forked child that outlives its parent, and writes with the parent's handle."""

    def __init__(self, path: Path, parent_does: Callable[[Engine], object]) -> None:
        told, tell = os.pipe()
        waits, goes = os.pipe()

        def parent() -> None:
            engine = Engine.open(path, settings("rows"))
            write(engine.define(schema()), range(6))
            ring_of(engine).empty()
            if os.fork():
                parent_does(engine)
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(goes)
            assert os.read(waits, 1) == b""
            try:
                write(ring_of(engine), [7])
            except ForkedHandleError as error:
                os.write(tell, str(error).encode())

        assert ended(fork(parent)) == -signal.SIGKILL
        os.close(tell)
        os.close(waits)
        self._goes = goes
        self._told = told

    def writes(self) -> str:
        """Lets the child write and end; returns the error that it got."""
        os.close(self._goes)
        with os.fdopen(self._told) as told:
            return told.read()


@pytest.mark.parametrize(
    "death",
    [
        *(("superblock.stored", 0), ("superblock.stored", 1), ("undefine.superblock", 0)),
        *(("undefine.state", 0), ("define.leaf", 0), ("define.ready", 0)),
    ],
)
def test_a_forked_child_does_not_write_to_files_that_its_parent_has_withdrawn(
    tmp_path: Path, death: Death
) -> None:
    def parent_does(engine: Engine) -> None:
        _core.arm(death[0], after=death[1])
        make_larger(engine, "rows")

    orphan = Orphan(tmp_path / "buffer", parent_does)
    assert orphan.writes().endswith("; close the handle, and attach again")
    with Engine.open(tmp_path / "buffer", settings("rows")) as third:
        uses(third, "rows", (NONE,))


@pytest.mark.parametrize("point", ["recover.state", "recover.mutex", "recover.superblock"])
def test_a_forked_child_does_not_join_a_buffer_whose_recovery_has_died(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "buffer"
    orphan = Orphan(path, lambda _: None)
    assert dies_at((point, 0), recovers, path, "rows")
    assert orphan.writes().endswith("; close the handle, and attach again")
    with Engine.open(path, settings("rows")) as third:
        uses(third, "rows", (NONE,))


def test_a_forked_child_writes_after_its_parent_has_died_and_the_buffer_was_recovered(
    tmp_path: Path,
) -> None:
    orphan = Orphan(tmp_path / "buffer", lambda _: None)
    recover(tmp_path / "buffer")
    assert orphan.writes() == ""
    with Engine.open(tmp_path / "buffer", None) as third:
        assert list(read_all(ring_of(third)).values()) == [7]
