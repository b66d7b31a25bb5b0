"""The first process is killed at every step of creation, definition and removal."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from shmbuffer import BufferClosedError, BufferNotFoundError
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import (
    LEAVES,
    SETTINGS,
    dies,
    ended,
    everything,
    fork,
    python_points,
    read_all,
    require_sound,
    require_usable,
    schema,
    settings,
    succeeds,
    write,
)

pytestmark = [pytest.mark.crash, pytest.mark.product]


def _creates(path: Path, point: str, after: int, kind: str) -> None:
    _core.arm(point, after=after)
    with Engine.open(path, settings(kind)) as engine:
        write(engine.define(schema(kind)), range(3))
    _core.disarm()


POINTS = ["open.locked", *python_points("create"), *python_points("define"), "superblock.half"]
#: Steps that exist only if items are rows, or only if they are records.
ONLY = {
    "rows": ("define.leaf", "define.meta", "remove.file"),
    "records": ("define.records",),
}


def cases(points: list[str]) -> list[tuple[str, str]]:
    """Returns each kind of item with each step that it has."""
    return [
        (kind, point)
        for kind, other in (("rows", "records"), ("records", "rows"))
        for point in points
        if point not in ONLY[other]
    ]


@pytest.mark.parametrize(("kind", "point"), cases(POINTS))
def test_the_next_process_finishes_what_a_dead_creator_began(
    tmp_path: Path, kind: str, point: str
) -> None:
    passing = 0
    while True:
        path = tmp_path / str(passing)
        if ended(fork(lambda path=path, after=passing: _creates(path, point, after, kind))) == 0:
            break
        with Engine.open(path, settings(kind)) as engine:
            ring = engine.define(schema(kind))
            assert read_all(ring) == {}
            write(ring, range(5))
            require_sound(engine)
            require_usable(ring, 999)
            assert [name for name in everything(path) if ".new" in name or "tmp" in name] == []
        passing += 1
    assert passing > 0


@pytest.mark.parametrize(("kind", "point"), cases(POINTS))
def test_a_waiting_process_takes_over_from_a_dead_creator(
    tmp_path: Path, kind: str, point: str
) -> None:
    """The process waits for init.lock when the creator dies, and notices it without a timeout."""
    path = tmp_path / "buffer"
    told, tell = os.pipe()
    never, _say = os.pipe()

    def pauses() -> None:
        _core.arm(point, "pause", notify_fd=tell, wait_fd=never)
        with Engine.open(path, settings(kind)) as engine:
            engine.define(schema(kind))

    creator = fork(pauses)
    os.close(tell)
    assert os.read(told, 1) == b"\x01"

    def waits() -> None:
        with Engine.open(path, settings(kind)) as engine:
            write(engine.define(schema(kind)), [os.getpid()])
            assert os.getpid() in read_all(engine.ring()).values()  # type: ignore[arg-type]

    waiters = [fork(waits) for _ in range(2)]
    os.kill(creator, signal.SIGKILL)
    assert ended(creator) == -signal.SIGKILL
    assert [ended(pid) for pid in waiters] == [0, 0]
    with Engine.open(path, None) as engine:
        assert sorted(read_all(engine.ring()).values()) == sorted(waiters)  # type: ignore[arg-type]
    for fd in (told, never, _say):
        os.close(fd)


@pytest.mark.parametrize("kind", ["rows", "records"])
@pytest.mark.parametrize("point", [*python_points("undefine"), "superblock.half", "remove.file"])
def test_a_half_withdrawn_definition_is_empty_for_the_next_process(
    tmp_path: Path, kind: str, point: str
) -> None:
    def undefines(engine: Engine) -> None:
        write(engine.define(schema(kind)), range(3))
        assert engine.ring() is not None
        engine.ring().empty()
        assert engine.undefine()

    path, after = tmp_path / "buffer", 0
    Engine.open(path, settings(kind)).close()
    while dies(path, point, undefines, after):
        with Engine.open(path, settings(kind)) as engine:
            assert engine.report is not None
            ring = engine.define(schema(kind))
            assert read_all(ring) == {}
            write(ring, range(5))
            require_sound(engine)
            ring.empty()
        after += 1
    assert after > 0 or (kind, point) == ("records", "remove.file")


@pytest.mark.parametrize(("kind", "point"), cases(python_points("remove")))
def test_a_removal_that_dies_can_be_repeated(tmp_path: Path, kind: str, point: str) -> None:
    path = tmp_path / "buffer"
    foreign = path / "notes.txt"
    with Engine.open(path, settings(kind)) as engine:
        write(engine.define(schema(kind)), range(3))
    foreign.write_text("not ours")

    def removes() -> None:
        with Engine.open(path, None) as found:
            _core.arm(point)
            found.cleanup()

    assert ended(fork(removes)) == -signal.SIGKILL

    def finishes() -> None:
        try:
            with Engine.open(path, None) as found:
                found.cleanup()
        except BufferNotFoundError:
            with Engine.open(path, settings(kind)) as again:
                again.define(schema(kind))
                again.cleanup()
        assert everything(path) == ["notes.txt"]

    succeeds(finishes)


def test_a_dictionary_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "buffer"

    def publishes() -> None:
        with Engine.open(path, None) as engine:
            _core.arm("dictionary.published")
            engine.seat.publish_dictionary(b"the second")

    with Engine.open(path, settings("records")) as engine:
        engine.define(schema("records"))
        assert engine.seat.dictionary() is None
        assert ended(fork(publishes)) == -signal.SIGKILL
        assert engine.seat.dictionary() == b"the second"
        assert engine.seat.publish_dictionary(b"the third") == b"the second"
        assert engine.cleanup()
    assert not path.exists()


@pytest.mark.full
def test_eight_processes_that_start_at_once_make_one_buffer(tmp_path: Path) -> None:
    for round_ in range(10):
        path = tmp_path / str(round_)
        ready, go = os.pipe()

        def races(path: Path = path, ready: int = ready) -> None:
            os.read(ready, 1)
            with Engine.open(path, SETTINGS) as engine:
                write(engine.define(schema()), [os.getpid()])

        pids = [fork(races) for _ in range(8)]
        os.write(go, b"x" * 8)
        assert [ended(pid) for pid in pids] == [0] * 8
        with Engine.open(path, None) as engine:
            assert sorted(read_all(engine.ring()).values()) == sorted(pids)  # type: ignore[arg-type]
            assert engine.superblock.leaves == len(LEAVES)
        os.close(ready)
        os.close(go)


#: System calls and stores during the creation of a buffer with a schema.
CALLS = [
    *("file.made", "file.mode", "file.sized", "file.written", "file.renamed", "folder.made"),
    *("mutex.cleared", "mutex.initialised", "join.identity", "join.live"),
]


@pytest.mark.parametrize("kind", ["rows", "records"])
@pytest.mark.parametrize("point", CALLS)
def test_the_next_process_finishes_what_a_creator_began_that_died_at_a_call(
    tmp_path: Path, kind: str, point: str
) -> None:
    kills = killed_while_creating(tmp_path, kind, point)
    assert kills > 0


def killed_while_creating(folder: Path, kind: str, point: str) -> int:
    """Kills at the first passing, the second and so on; returns the number of kills."""
    passing = 0
    while True:
        path = folder / str(passing)
        body = partial(_creates, path, point, passing, kind)
        if ended(fork(body)) == 0:
            return passing
        with Engine.open(path, settings(kind)) as engine:
            ring = engine.define(schema(kind))
            assert read_all(ring) in ({}, {0: 0, 1: 1, 2: 2})
            write(ring, range(5))
            require_sound(engine)
            assert [name for name in everything(path) if ".new" in name or "tmp" in name] == []
        passing += 1


@pytest.mark.parametrize("kind", ["rows", "records"])
@pytest.mark.parametrize("point", ["file.unlinked", "folder.removed", "remove.state"])
def test_a_removal_that_dies_after_any_file_can_be_repeated(
    tmp_path: Path, kind: str, point: str
) -> None:
    passing = 0
    while True:
        path = tmp_path / str(passing)
        with Engine.open(path, settings(kind)) as engine:
            write(engine.define(schema(kind)), range(3))

        def removes(path: Path = path, after: int = passing) -> None:
            with Engine.open(path, None) as found:
                _core.arm(point, after=after)
                found.cleanup()
                _core.disarm()

        killed = ended(fork(removes)) == -signal.SIGKILL
        assert killed or not path.exists()
        if not killed:
            break
        try:
            with Engine.open(path, None) as found:
                found.cleanup()
        except BufferNotFoundError:
            with Engine.open(path, settings(kind)) as again:
                again.define(schema(kind))
                again.cleanup()
        assert not path.exists() or everything(path) == []
        passing += 1
    assert passing > 0


def test_every_crash_point_belongs_to_a_protocol_that_is_killed_at_it() -> None:
    tested = {
        *("write", "update", "sample", "alpha", "empty", "reap", "repair", "recover", "leave"),
        *("join", "flush", "abort", "wait", "create", "define", "undefine", "remove", "open"),
        *(
            "superblock",
            "restore",
            "copy",
            "dictionary",
            "turn",
            "wake",
            "mutex",
            "tree",
            "leaves",
            "relink",
            "raise",
        ),
        *("count", "file", "folder", "flow", "limit", "history", "vouch", "control", "draw"),
        *("weights", "share", "mixture", "version", "reserve", "ledger", "partial", "consume"),
        *("spawned", "grow", "space"),
    }
    prefixes = {name.split(".")[0] for name in _core.crash_points()}
    prefixes |= {name.split(".")[0] for name in python_points(r"\w+")}
    assert prefixes == tested


@pytest.mark.parametrize(("kind", "point"), cases(python_points("remove")))
def test_a_handle_that_has_not_read_an_item_yet_learns_of_a_removal(
    tmp_path: Path, kind: str, point: str
) -> None:
    def define_and_remove(engine: Engine) -> None:
        engine.define(schema(kind))
        engine.cleanup()

    with Engine.open(tmp_path / "buffer", settings(kind)) as late:
        assert dies(tmp_path / "buffer", point, define_and_remove)
        before = ("remove.closing", "remove.state", "remove.synced")
        if point in before or (kind, point) == ("records", "remove.leaves"):
            # All files are still present.
            assert late.ring() is not None
        else:
            with pytest.raises(
                BufferClosedError, match=r"is being removed|was removed or replaced"
            ):
                late.ring()
