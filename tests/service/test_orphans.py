"""A killed script is started again: the processes that it had spawned are ended or adopted."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from shmbuffer import AttachTimeout, BufferInUseError, Coordinator
from shmbuffer.memory.clients import roster
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import identity
from tests.kit.programs import Program
from tests.service import targets
from tests.service.conftest import Reports

SCRIPT = """
import multiprocessing, sys, time
from pathlib import Path
from shmbuffer._native import _core
from shmbuffer import Coordinator
from tests.service import targets
inbox, out = multiprocessing.get_context("spawn").Pipe(duplex=False)
path, target, n = Path(sys.argv[1]), getattr(targets, sys.argv[2]), int(sys.argv[3])
argument = targets.Late(Path(sys.argv[4])) if target is targets.leave_a_mark else out
if len(sys.argv) > 5:
    _core.arm(sys.argv[5])
coordinator = Coordinator(path, capacity=64, on_existing="recover")
spawned = coordinator.spawn(target, n, argument)
if argument is out:
    for _ in spawned:
        inbox.recv()
print(*[one.pid for one in spawned], flush=True)
while True:
    time.sleep(1)
"""


@contextmanager
def orphans(scratch_dir: Path, target: str, n: int, *more: object) -> Iterator[list[int]]:
    """Yields the pids that a coordinator has spawned and left, by index."""
    pids: list[int] = []
    try:
        with Program.python(SCRIPT, scratch_dir, target, n, *more) as script:
            pids += map(int, script.line().split())
            script.kill()
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: gone(pid))  # type: ignore[misc]


def gone(pid: int) -> bool:
    return identity.process_state(pid) == identity.ProcessState.DEAD


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 50
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def collectors(coordinator: Coordinator) -> set[int]:
    return {one.pid for one in coordinator.clients() if one.alive and one.role == "collector"}


def files(scratch_dir: Path) -> list[Path]:
    return sorted((scratch_dir / layout.SPAWNED).iterdir())


@pytest.mark.full
def test_a_script_that_is_started_again_ends_what_it_had_spawned_before(
    scratch_dir: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        orphans(scratch_dir, "write", 3) as old,
        Coordinator(scratch_dir, on_existing="recover") as coordinator,
    ):
        assert collectors(coordinator) == set(old)
        new = coordinator.spawn(targets.write, 2, reports.out)
        assert all(map(gone, old))
        reports.take(2)
        assert collectors(coordinator) == {one.pid for one in new}
        assert len(files(scratch_dir)) == 2
        said = "of an earlier coordinator were still running and were ended"
        assert f"processes tests.service.targets.write {said} (pids " in caplog.text
        assert all(str(pid) in caplog.text for pid in old)
    assert files(scratch_dir) == []


@pytest.mark.full
def test_processes_of_another_name_and_foreign_ones_run_on(
    scratch_dir: Path, reports: Reports
) -> None:
    with (
        orphans(scratch_dir, "write", 1) as old,
        Engine.open(scratch_dir, None, role="collector"),
        Coordinator(scratch_dir, on_existing="recover") as coordinator,
    ):
        coordinator.spawn(targets.stay, 1, reports.out)
        coordinator.spawn(targets.write, 1, reports.out, name="another")
        coordinator.spawn(targets.write, 1, reports.out, orphans="leave")
        reports.take(3)
        assert not gone(old[0])
        assert collectors(coordinator) >= {old[0], os.getpid()}


@pytest.mark.full
def test_orphans_that_have_not_attached_are_stopped_or_deaf_are_found_too(
    scratch_dir: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        orphans(scratch_dir, "sleep", 2) as asleep,
        orphans(scratch_dir, "ignore_sigterm", 1) as deaf,
    ):
        os.kill(asleep[0], signal.SIGSTOP)
        with Coordinator(scratch_dir, on_existing="recover", grace_s=1.0) as coordinator:
            coordinator.spawn(targets.sleep, 0, reports.out)
            assert all(map(gone, asleep))
            assert "killed" not in caplog.text
            coordinator.spawn(targets.ignore_sigterm, 0, reports.out)
            assert gone(deaf[0])
            assert f"killed because they ignored SIGTERM (pids {deaf[0]})" in caplog.text


def test_a_child_of_the_running_coordinator_is_no_orphan(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.spawn(targets.stay, 1, reports.out)
        coordinator.spawn(targets.stay, 1, reports.out)
        reports.take(2)
        assert [one.is_alive() for one in coordinator.processes] == [True, True]


def test_orphans_are_adopted_by_index_and_replaced_when_they_die(
    scratch_dir: Path, reports: Reports
) -> None:
    with (
        orphans(scratch_dir, "write", 3) as old,
        Coordinator(scratch_dir, on_existing="recover") as coordinator,
    ):
        os.kill(old[0], signal.SIGKILL)
        wait_until(lambda: gone(old[0]))
        spawned = coordinator.spawn(targets.write, 2, reports.out, orphans="adopt", restart=True)
        assert spawned[1].pid == old[1]
        assert gone(old[2])  # two processes remain two
        assert reports.next() == ("wrote", 0, spawned[0].pid)
        spawned[1].kill()
        word, index, pid = reports.next()
        assert (word, index) == ("wrote", 1)
        death = next(one for one in coordinator.deaths if one.pid == old[1])
        assert (death.name, death.exitcode, death.restarted) == ("write-1", None, True)
        assert pid == spawned[1].pid != old[1]
        assert (spawned[1].restarts, spawned[1].exitcode) == (1, None)


def test_an_adopted_one_that_ends_as_it_should_is_done(scratch_dir: Path, reports: Reports) -> None:
    with (
        orphans(scratch_dir, "write", 1) as old,
        Coordinator(scratch_dir, on_existing="recover") as coordinator,
    ):
        (one,) = coordinator.spawn(targets.write, 1, reports.out, orphans="adopt", restart=True)
        os.kill(old[0], signal.SIGINT)
        assert coordinator.join(30)
        assert (one.exitcode, one.restarts) == (128 + signal.SIGINT, 0)


def test_an_orphan_that_becomes_the_coordinator_does_not_end_itself(scratch_dir: Path) -> None:
    with orphans(scratch_dir, "take_over", 2) as pids:
        wait_until(lambda: all(map(gone, pids)))
        assert scratch_dir.with_suffix(".taken").exists()


def test_closing_ends_adopted_processes(scratch_dir: Path, reports: Reports) -> None:
    with orphans(scratch_dir, "write", 1) as old:
        with Coordinator(scratch_dir, on_existing="recover") as coordinator:
            coordinator.spawn(targets.write, 1, reports.out, orphans="adopt")
            assert not gone(old[0])
        assert gone(old[0])


def test_a_child_that_its_coordinator_did_not_live_to_see_does_not_run(
    scratch_dir: Path, tmp_path: Path, reports: Reports
) -> None:
    late = tmp_path / "late"
    with orphans(scratch_dir, "leave_a_mark", 1, late) as (child,):
        wait_until(late.with_suffix(".begun").exists)
        with Coordinator(scratch_dir, on_existing="recover") as coordinator:
            coordinator.spawn(targets.stay, 1, reports.out)
            late.touch()
            wait_until(lambda: gone(child))
        assert not late.with_suffix(".ran").exists()


@pytest.mark.parametrize("step", ["spawned.planned", "spawned.removed"])
def test_a_coordinator_that_dies_at_a_step_leaves_nothing_that_lasts(
    scratch_dir: Path, reports: Reports, step: str
) -> None:
    with orphans(scratch_dir, "sleep", 1) as old:
        with Program.python(SCRIPT, scratch_dir, "sleep", 1, "", step) as script:
            script.wait(60)
        with Coordinator(scratch_dir, on_existing="recover") as coordinator:
            (one,) = coordinator.spawn(targets.sleep, 1, reports.out)
            assert gone(old[0])
            assert reports.next() == ("asleep", 0, one.pid)
            assert len(files(scratch_dir)) == 1


@pytest.mark.parametrize("another", ["pid", "pid_namespace"])
def test_a_process_that_is_not_proven_to_be_the_orphan_is_not_hit(
    scratch_dir: Path, reports: Reports, another: str
) -> None:
    with (
        Coordinator(scratch_dir, capacity=8) as coordinator,
        Program("sleep", "60") as other,
    ):
        start_time = identity._state_and_start(other.pid)
        assert start_time is not None
        who = asdict(identity.current()) | {"pid": other.pid, "start_time": start_time[1]}
        who["boot_id"] = identity.boot_id().hex()
        who["start_time" if another == "pid" else another] -= 1
        path = scratch_dir / roster.create_file(scratch_dir)
        path.write_text(json.dumps({"name": "mine", "index": 0, **who}) + "\n")
        with path.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if another == "pid":  # the pid has been reused: the orphan itself is dead
                coordinator.spawn(targets.stay, 1, reports.out, name="mine")
            else:
                with pytest.raises(BufferInUseError, match="in another pid namespace") as caught:
                    coordinator.spawn(targets.stay, 1, reports.out, name="mine")
                assert caught.value.parts["pids"] == [other.pid]
        assert other.poll() is None


@pytest.mark.parametrize("text", ["", "no JSON", '{"pid": "x"}', "[" * 30_000, "[]"])
def test_a_held_entry_that_says_nothing_of_use_is_a_timeout(
    scratch_dir: Path, reports: Reports, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "TESTER_PATIENCE_S", 0.1)
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        path = scratch_dir / roster.create_file(scratch_dir)
        path.write_text(text + "\n")
        with path.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(AttachTimeout, match=path.name):
                coordinator.spawn(targets.stay, 1, reports.out)
        coordinator.spawn(targets.stay, 1, reports.out)
        assert not path.exists()


def test_a_wrong_word_for_orphans_is_refused(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        with pytest.raises(ValueError, match="'stop', 'adopt' or 'leave', got 'kill'"):
            coordinator.spawn(targets.stay, 1, reports.out, orphans="kill")  # type: ignore[arg-type]
        assert coordinator.processes == []


FAIL = """
import sys
from pathlib import Path
from shmbuffer import Coordinator
from tests.service import targets
with Coordinator(sys.argv[1], capacity=8) as coordinator:
    (one,) = coordinator.spawn(targets.fail_here_or_there, 1, Path(sys.argv[2]), restart=True)
    coordinator.wait_for_deaths(3)
    print("three", flush=True)
    Path(sys.argv[2]).touch()
    coordinator.wait_for_deaths(4)
"""


@pytest.mark.full
def test_a_traceback_is_printed_once_and_again_when_it_is_another(
    scratch_dir: Path, tmp_path: Path
) -> None:
    with Program.python(FAIL, scratch_dir, tmp_path / "there") as program:
        code, _, err = program.end()
    assert code == 0
    assert err.count("Traceback (most recent call last):") == 2
    assert err.count("in fail_here_or_there") == 2
    process = "Process fail_here_or_there-0: the same error, "
    assert err.count(process) == 2
    assert f"{process}3 times in a row: ValueError: in process " in err
    assert err.count("KeyError: 'there'") == 1
