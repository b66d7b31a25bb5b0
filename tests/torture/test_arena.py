"""A process that hangs, ends early or survives a kill fails the round, and the error names it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory.system import identity
from tests.torture import arena as arena_module
from tests.torture import interrupts
from tests.torture.arena import Actor, Arena
from tests.torture.containers import are_possible
from tests.torture.history import History, Kind
from tests.torture.items import CHILDREN, LIVES
from tests.torture.kills import audited
from tests.torture.mixed import fork_beside

pytestmark = pytest.mark.crash


def works(actor: Actor) -> None:
    first = 0
    while actor.goes_on():
        actor.log.invoked(first, 1)
        first += 1


def fails(actor: Actor) -> None:
    raise ValueError("this one is expected")


def test_everybody_stands_still_and_goes_on(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"] * 3, 1) as arena:
        arena.fill()
        counts = []
        for _ in range(3):
            arena.still()
            counts.append(len(History.read(arena.logs).batches))
            assert len(History.read(arena.logs).batches) == counts[-1]
            arena.go()
        assert counts[0] <= counts[1] <= counts[2]
        assert arena.kill(arena.chairs) == 3
        assert len(History.read(arena.logs).batches) >= counts[-1]


def test_sigterm_ends_processes_with_and_without_a_handler(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"] * 4, 2) as arena:
        arena.fill()
        arena.still()
        arena.go()
        died = arena.kill(arena.chairs, signal.SIGTERM)
        assert 0 < died < 4, "some have a handler, some have none"


def test_a_hanging_process_is_named_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "PATIENCE_S", 0.0)
    hear, tell = os.pipe()

    def hangs(actor: Actor) -> None:
        os.write(tell, b".")
        signal.pause()

    roles = {"worker": works, "sleeper": hangs}
    with Arena(tmp_path / "logs", roles, ["worker", "sleeper"], 1) as arena, os.fdopen(hear, "rb"):
        arena.fill()
        os.close(tell)
        assert os.read(hear, 1) == b"."  # otherwise the process may not have reached its body
        with pytest.raises(AssertionError, match=r"H10: somebody hangs(.|\n)* in hangs"):
            arena.still()


def test_a_process_that_ends_by_itself_has_failed(tmp_path: Path) -> None:
    roles = {"worker": works, "failure": fails}
    with Arena(tmp_path / "logs", roles, ["worker", "failure"], 1) as arena:
        arena.fill()
        with pytest.raises(AssertionError, match="failure 2 ended by itself with 70"):
            arena.still()
        assert [chair.pid > 0 for chair in arena.chairs] == [True, False]


def test_a_process_that_ended_before_its_kill_has_failed(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"failure": fails}, ["failure"], 1) as arena:
        arena.fill()
        os.waitid(os.P_PID, arena.chairs[0].pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AssertionError, match="failure 1 ended: 70"):
            arena.kill(arena.chairs)


def test_an_audit_tells_its_figures_or_fails() -> None:
    assert audited(lambda: {"items": 3}) == {"items": 3}
    with pytest.raises(AssertionError, match="the audit failed with 70"):
        audited(lambda: {"items": 1 // 0})


def test_a_stopped_process_goes_on(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"], 1) as arena:
        arena.fill()
        arena.still()
        arena.go()
        arena.stop(arena.chairs[0], 0.0)
        arena.still()
        assert len(History.read(arena.logs).batches)


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    def draws(actor: Actor) -> None:
        while actor.goes_on():
            actor.log.seen(0, int(actor.rng.integers(2**40)), 0)

    drawn = []
    for name in "ab":
        with Arena(tmp_path / name, {"one": draws}, ["one"], 7) as arena:
            arena.fill()
            arena.still()
            arena.go()
            arena.still()
            drawn.append(History.read(arena.logs).seen["a"])
    shorter = min(map(len, drawn))
    assert np.array_equal(drawn[0][:shorter], drawn[1][:shorter])


def works_as(actor: Actor, number: int) -> int:
    actor.log.invoked(number, 1)
    return number + 1


def forks(actor: Actor) -> None:
    fork_beside(actor, works_as, lambda: None)


def test_forked_children_and_second_threads_stand_still_too(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"forker": forks}, ["forker"] * 2, 1) as arena:
        arena.fill()
        children = 0
        while children < 4:
            arena.still()
            history = History.read(arena.logs)
            assert len(History.read(arena.logs).batches) == len(history.batches)
            children = int(np.count_nonzero(history.marks["kind"] == Kind.FORKED))
            arena.go()


def test_a_forked_child_outlives_its_parent_and_ends_by_itself(tmp_path: Path) -> None:
    hear, tell = os.pipe()

    def leaves_one(actor: Actor) -> None:
        def waits(child: Actor) -> None:
            child.log.forked()
            os.write(tell, b".")
            while child.goes_on():
                pass

        actor.child(waits)
        while actor.goes_on():
            pass

    with Arena(tmp_path / "logs", {"parent": leaves_one}, ["parent"], 1) as arena:
        arena.fill()
        assert os.read(hear, 1) == b"."
        arena.kill(arena.chairs, whole=False)
        arena.fill()
        assert os.read(hear, 1) == b"."
        arena.still()
        forked = History.read(arena.logs).marks["who"]
        assert len(np.unique(forked)) == len(forked) == 2
        assert (forked // LIVES == CHILDREN + 1).all()
    for descriptor in (hear, tell):
        os.close(descriptor)


def test_an_interrupt_reaches_the_work_and_nothing_else(tmp_path: Path) -> None:
    hear, tell = os.pipe()

    def is_interrupted(actor: Actor) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # an interrupt between two calls has no effect

        def pauses() -> None:
            os.write(tell, b".")
            while True:  # an interrupt just before pause() would not end it
                time.sleep(0.01)

        assert not interrupts.finishes(pauses)
        actor.log.interrupted(0)
        assert interrupts.finishes(lambda: None)
        while actor.goes_on():
            pass

    with Arena(tmp_path / "logs", {"visitor": is_interrupted}, ["visitor"], 1) as arena:
        arena.fill()
        assert os.read(hear, 1) == b"."
        arena.interrupt(arena.chairs[0])
        arena.still()
        assert len(History.read(arena.logs).marks) == 1
    for descriptor in (hear, tell):
        os.close(descriptor)


def test_a_lock_that_stayed_is_seen(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert interrupts.held_locks() == [str(tmp_path / "lock")]
    assert interrupts.held_locks() == []


def test_a_container_sees_another_boot_and_dies_as_a_whole(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    if not are_possible(boot_id):
        pytest.skip("namespaces need root")

    def tells(actor: Actor) -> None:
        actor.child(lambda child: signal.pause())
        actor.log.seen(0, os.getpid(), identity.boot_id()[0])
        while actor.goes_on():
            pass

    containers = {1: boot_id}
    with Arena(tmp_path / "logs", {"one": tells}, ["one"] * 2, 1, containers=containers) as arena:
        arena.fill()
        arena.still()
        seen = History.read(arena.logs).seen
        inside = seen[seen["who"] == arena.chairs[0].who][0]
        outside = seen[seen["who"] == arena.chairs[1].who][0]
        assert (inside["a"], inside["b"]) == (1, 0x01)
        assert (outside["a"], outside["b"]) == (arena.chairs[1].pid, identity.boot_id()[0])
        assert arena.kill(arena.chairs[:1], whole=False) == 1
        arena.end_orphans()
