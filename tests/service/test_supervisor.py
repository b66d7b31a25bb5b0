"""Collectors are started, watched, reported and restarted; they outlive a killed coordinator."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from shmbuffer import BufferClosedError, BufferUnlinkedError, Coordinator, ForkedHandleError
from shmbuffer.memory.clients.roster import ExitRecord
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format import layout
from shmbuffer.service.children import HASTY_S, LONGEST_PAUSE_S, Spawned
from shmbuffer.service.supervisor import Supervisor
from shmbuffer.watch.historian import Death
from tests.kit.programs import Program
from tests.kit.rings import engine_of
from tests.processes.players import until
from tests.service import items, targets
from tests.service.conftest import Reports


def test_a_target_gets_the_directory_its_index_and_the_arguments(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        spawned = coordinator.spawn(targets.say_what_you_got, 2, reports.out, "word")
        assert coordinator.join(30)
        assert [one.exitcode for one in spawned] == [0, 0]
        pids = [one.pid for one in spawned]
        assert reports.take(2) == [(scratch_dir, i, "word", pids[i]) for i in (0, 1)]


def test_a_collector_that_returns_is_no_death_and_is_not_started_again(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.say_what_you_got, 1, reports.out, "", restart=True)
        assert coordinator.join(30)
        assert (one.exitcode, one.restarts, coordinator.deaths) == (0, 0, [])


def test_a_killed_collector_is_reported_and_its_slots_are_free(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=4) as coordinator:
        (one,) = coordinator.spawn(targets.claim_and_die, 1)
        assert coordinator.wait_for_deaths(1, 30)
        (death,) = coordinator.deaths
        assert (death.pid, death.role, death.name, death.index) == (
            one.pid,
            "collector",
            "claim_and_die-0",
            0,
        )
        assert (death.exitcode, death.restarted) == (-signal.SIGKILL, False)
        assert str(death) == f"claim_and_die-0 (pid {one.pid}) was killed by SIGKILL"
        assert [client.role for client in coordinator.clients()] == ["coordinator"]
        with Engine.open(scratch_dir, None) as engine:
            assert engine.stats()["rolled_back"] == 4
            items.write(engine, [2, 3, 4, 5])
            assert items.read(engine) == [5, 2, 3, 4]


def test_a_killed_collector_is_started_again_under_its_index(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        spawned = coordinator.spawn(targets.stay, 2, reports.out, restart=True)
        first = {index: pid for _, index, pid in reports.take(2)}
        assert {one.index: one.pid for one in spawned} == first
        spawned[1].kill()
        word, index, pid = reports.next()
        assert (word, index) == ("attached", 1)
        assert pid != first[1]
        assert (spawned[1].pid, spawned[1].restarts) == (pid, 1)
        assert [death.pid for death in coordinator.deaths] == [first[1]]
        assert coordinator.deaths[0].restarted
        assert spawned[0].pid == first[0]


def test_a_failing_collector_is_reported_with_its_exit_code(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.spawn(targets.fail, 1)
        assert coordinator.wait_for_deaths(1, 30)
        assert coordinator.deaths[0].cause == "ended with exit code 7"
        assert coordinator.stats()["deaths"] == 1


def test_ctrl_c_ends_a_collector_for_good(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out, restart=True)
        reports.next()
        os.kill(one.pid, signal.SIGINT)
        assert coordinator.join(30)
        assert one.exitcode == 128 + signal.SIGINT
        assert reports.next()[0] == "unwound"


def test_join_waits_for_a_collector_that_is_about_to_be_started_again(
    scratch_dir: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out, restart=True)
        reports.next()
        ended: list[bool] = []
        joining: list[threading.Thread] = []
        ask = Supervisor._is_being_stopped

        def join_meanwhile(supervisor: Supervisor) -> bool:
            joining.append(threading.Thread(target=lambda: ended.append(coordinator.join(0))))
            joining[-1].start()
            joining[-1].join(0.2)
            return ask(supervisor)

        monkeypatch.setattr(Supervisor, "_is_being_stopped", join_meanwhile)
        one.kill()
        assert reports.next()[:2] == ("attached", 0)
        monkeypatch.undo()
        for thread in joining:
            thread.join()
        assert ended
        assert not any(ended)


CTRL_C = """
import multiprocessing, os, signal, sys, time
from shmbuffer import Coordinator
from tests.service import targets
os.setpgid(0, 0)  # a group of its own, as a shell makes one
inbox, out = multiprocessing.get_context("spawn").Pipe(duplex=False)
with Coordinator(sys.argv[1], capacity=64) as coordinator:
    spawned = coordinator.spawn(targets.end_late, 2, out, restart=True)
    for _ in spawned:
        inbox.recv()
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
print(*[inbox.recv()[0] for _ in spawned])
print({one.exitcode for one in spawned} <= {130, 143}, coordinator.deaths)
"""


@pytest.mark.full
def test_ctrl_c_ends_everybody_quietly_and_what_is_registered_for_the_end_runs(
    scratch_dir: Path,
) -> None:
    command = (sys.executable, "-c", CTRL_C, str(scratch_dir))
    with Program(*command, PYTHONUNBUFFERED="") as program:
        assert program.line() == "ready"
        os.killpg(program.pid, signal.SIGINT)
        code, out, err = program.end()
    assert (code, err) == (0, "")  # no interpreter was torn down, and no process was killed
    assert out.count("one line, ") == 2
    assert out.replace("one line, ", "") == "at the end at the end\nTrue []\n"
    with Engine.open(scratch_dir, None) as engine:
        assert engine.report is not None
        assert engine.report.clients_retired == 0  # all of them have left


def test_buffered_output_of_a_target_is_written(
    scratch_dir: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # Python would pass that to C as well
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.spawn(targets.Writer(tmp_path / "rows"), 1)
        assert coordinator.join(30)
    assert sorted(capfd.readouterr().out.splitlines()) == ["a line of C", "a line of Python"]
    assert (tmp_path / "rows").read_text() == "a row\n"


def test_a_collector_that_keeps_dying_young_is_started_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start() -> object:
        raise AssertionError("not started here")

    one = Spawned(start, name="", index=0, restart=True)  # type: ignore[arg-type]
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    one._started_s = 0.0
    pauses = [one.pause_s() for _ in range(12)]
    assert pauses[:3] == [0.0, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    clock[0] = HASTY_S
    assert one.pause_s() == 0.0


def test_a_collector_is_seen_dead_although_a_child_of_it_lives(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.have_a_child, 1, reports.out)
        _, _, grandchild = reports.next()
        try:
            one.kill()
            assert coordinator.wait_for_deaths(1, 30)
            os.kill(grandchild, 0)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_closing_unwinds_the_collectors(scratch_dir: Path, reports: Reports) -> None:
    coordinator = Coordinator(scratch_dir, capacity=8)
    spawned = coordinator.spawn(targets.stay, 2, reports.out, restart=True)
    reports.take(2)
    coordinator.close()
    assert [word for word, _, _ in reports.take(2)] == ["unwound", "unwound"]
    assert [one.exitcode for one in spawned] == [128 + signal.SIGTERM] * 2
    assert coordinator.deaths == []
    with pytest.raises(BufferClosedError, match="closed"):
        coordinator.spawn(targets.stay, 1, reports.out)


def test_closing_kills_a_collector_that_ignores_sigterm(
    scratch_dir: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(scratch_dir, capacity=8, grace_s=0.1) as coordinator:
        (one,) = coordinator.spawn(targets.ignore_sigterm, 1, reports.out)
        reports.next()
    assert one.exitcode == -signal.SIGKILL
    assert f"ignore_sigterm-0 (pid {one.pid}) was killed because it ignored SIGTERM" in caplog.text


def test_closing_kills_a_stopped_collector(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8, grace_s=0.1) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        os.kill(one.pid, signal.SIGSTOP)
    assert one.exitcode == -signal.SIGKILL


@contextmanager
def open_to_all(scratch_dir: Path) -> Iterator[None]:
    scratch_dir.chmod(0o777)
    yield
    scratch_dir.chmod(0o700)


@contextmanager
def behind_a_link(scratch_dir: Path) -> Iterator[None]:
    moved = scratch_dir.rename(scratch_dir.with_name("moved"))
    scratch_dir.symlink_to(moved)
    yield
    scratch_dir.unlink()
    moved.rename(scratch_dir)


@contextmanager
def without_a_free_descriptor(scratch_dir: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as first_free:
        limit = first_free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def with_a_damaged_roster(scratch_dir: Path) -> Iterator[None]:
    for file in (scratch_dir / layout.SPAWNED).iterdir():
        file.write_text("{\n")
    yield


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    "trouble", [open_to_all, behind_a_link, without_a_free_descriptor, with_a_damaged_roster]
)
def test_the_watch_goes_on_where_a_directory_cannot_be_read_for_a_while(
    scratch_dir: Path,
    reports: Reports,
    trouble: Callable[[Path], AbstractContextManager[None]],
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        with trouble(scratch_dir):
            one.terminate()
            assert coordinator.join(30)
        assert one.exitcode == 128 + signal.SIGTERM
        (two,) = coordinator.spawn(targets.claim_and_die, 1)
        assert coordinator.join(30)
        assert two.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_keeps_nobody_waiting(
    scratch_dir: Path,
    reports: Reports,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        monkeypatch.setattr(Engine, "clients", lambda _: [][0])
        with pytest.raises(RuntimeError, match="supervision of the processes has failed") as caught:
            coordinator.join()
        cause = caught.value.__cause__
        assert isinstance(cause, IndexError)
        monkeypatch.undo()
    assert reports.next() == ("unwound", 0, one.pid)
    one.collect(ExitRecord())
    # pytest keeps log records until later: a record refers to the process, whose frames hold it.
    caplog.clear()
    cause.with_traceback(None)


def test_a_target_that_cannot_be_pickled_is_the_callers_error(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        for target, args, what in (
            (lambda scratch_dir, index: None, (), "lambda"),
            (targets.stay, (threading.Lock(),), "cannot pickle '_thread.lock' object"),
        ):
            with pytest.raises(TypeError, match=what) as refused:
                coordinator.spawn(target, 2, *args)
            assert str(refused.value).startswith(f"{scratch_dir}: the target ")
            assert "a function that is defined" in str(refused.value)
        assert coordinator.processes == []
        assert coordinator.join(0)


def test_a_negative_number_of_processes_is_refused(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        assert coordinator.spawn(targets.stay, 0, reports.out) == []
        with pytest.raises(ValueError, match="got -1"):
            coordinator.spawn(targets.stay, -1, reports.out)


COORDINATOR = """
import multiprocessing, os, signal, sys
from pathlib import Path
from shmbuffer import Coordinator
from tests.service import targets
inbox, out = multiprocessing.get_context("spawn").Pipe(duplex=False)
coordinator = Coordinator(Path(sys.argv[1]) if sys.argv[1] else None, capacity=64)
spawned = coordinator.spawn(targets.write, 2, out, restart=True)
for _ in spawned:
    inbox.recv()
print(coordinator.scratch_dir, flush=True)
print(*[one.pid for one in spawned], flush=True)
"""
STAYS = COORDINATOR + "import time\nwhile True: time.sleep(0.01)"


def test_collectors_go_on_without_their_coordinator_and_the_next_takes_over(
    scratch_dir: Path,
) -> None:
    with Program.python(STAYS, scratch_dir) as first:
        assert first.line() == str(scratch_dir)
        pids = [int(pid) for pid in first.line().split()]
        first.kill()
    try:
        with Coordinator(scratch_dir, on_existing="recover") as second:
            assert second.report is None  # the collectors are alive, so nothing is recovered
            before = second.stats()["write_count"]
            while second.stats()["write_count"] < before + 20:
                pass  # the collectors continue
            assert {client.pid for client in second.clients() if client.role == "collector"} == set(
                pids
            )
            os.kill(pids[0], signal.SIGKILL)
            # The second coordinator may have to report the death of the first one.
            while pids[0] not in (death.pid for death in second.deaths):
                assert second.wait_for_deaths(len(second.deaths) + 1, 30)
            death = next(death for death in second.deaths if death.pid == pids[0])
            assert (death.role, death.exitcode, death.cause) == ("collector", None, "died")
            assert not death.restarted
        # only spawned processes are stopped at the end
        with Engine.open(scratch_dir, None) as engine:
            before = engine.stats()["write_count"]
            while engine.stats()["write_count"] < before + 20:
                pass
    finally:
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_a_client_that_dies_before_the_first_write_is_reported_once(scratch_dir: Path) -> None:
    join = (
        "import signal, sys\n"
        "from shmbuffer.memory.engine import Engine\n"
        "engine = Engine.open(sys.argv[1], None, role='learner')\n"
        "print('joined', flush=True)\n"
        "signal.pause()"
    )
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        pids = []
        for count in (1, 2, 3):
            with Program.python(join, scratch_dir) as program:
                program.line()
                pids.append(program.pid)
                program.kill()
                assert coordinator.wait_for_deaths(count, 30)
        assert [(death.pid, death.role) for death in coordinator.deaths] == [
            (pid, "learner") for pid in pids
        ]


def test_sigterm_at_the_coordinator_stops_its_collectors(scratch_dir: Path) -> None:
    with Program.python(STAYS, scratch_dir) as program:
        program.line()
        pids = [int(pid) for pid in program.line().split()]
        program.send_signal(signal.SIGTERM)
        assert program.end()[0] == -signal.SIGTERM
    assert_gone(pids)
    assert scratch_dir.exists()


@pytest.mark.full
def test_sigterm_stops_the_collectors_before_their_temporary_directory_goes() -> None:
    with Program.python(STAYS, "") as program:
        scratch_dir = Path(program.line())
        pids = [int(pid) for pid in program.line().split()]
        program.send_signal(signal.SIGTERM)
        code, _, err = program.end()
    assert code == -signal.SIGTERM
    assert err == ""  # no collector saw a removed directory
    assert_gone(pids)
    assert not scratch_dir.exists()


@pytest.mark.full
def test_a_handler_of_the_programs_own_decides_what_sigterm_means(scratch_dir: Path) -> None:
    # pause() would never return if the signal came just before it.
    handled = "signal.signal(15, lambda *_: done.append(print('handled', flush=True)))"
    waits = "while not done: time.sleep(0.01)\ncoordinator.close()\nprint('closed')"
    source = f"import signal, time\ndone = []\n{handled}{COORDINATOR}{waits}"
    with Program.python(source, scratch_dir) as program:
        program.line()
        pids = [int(pid) for pid in program.line().split()]
        program.send_signal(signal.SIGTERM)
        assert program.line() == "handled"
        assert program.end()[:2] == (0, "closed\n")
    assert_gone(pids)


@pytest.mark.full
def test_the_end_of_the_interpreter_stops_the_collectors(scratch_dir: Path) -> None:
    with Program.python(COORDINATOR, scratch_dir) as program:
        program.line()
        pids = [int(pid) for pid in program.line().split()]
        assert program.end()[0] == 0
    assert_gone(pids)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_of_the_coordinator_looks_after_nobody(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        child = os.fork()
        if child == 0:
            coordinator.close()
            try:
                coordinator.spawn(targets.stay, 1, reports.out)
            except ForkedHandleError as error:
                os._exit(0 if str(os.getppid()) in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert one.is_alive()
        assert not reports.inbox.poll(0)
        assert not coordinator.closed


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_end_of_a_fork_that_attached_is_not_the_coordinators(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        child = os.fork()
        if child == 0:
            engine_of(coordinator).seat.rejoin()
            os._exit(0)
        os.waitpid(child, 0)
        assert coordinator.wait_for_deaths(1, 30)
        assert [str(death) for death in coordinator.deaths] == [f"client (pid {child}) died"]


@pytest.mark.parametrize(
    ("exitcode", "cause"),
    [
        (None, "died"),
        (3, "ended with exit code 3"),
        (143, "ended on SIGTERM"),
        (-9, "was killed by SIGKILL"),
        (-64, "was killed by SIGRTMAX"),
        (-60, "was killed by signal 60"),
    ],
)
def test_a_death_says_what_ended_the_process(exitcode: int | None, cause: str) -> None:
    death = Death(pid=1, role="learner", name="", index=None, exitcode=exitcode, restarted=True)
    assert str(death) == f"learner (pid 1) {cause}; it is restarted"


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_coordinator_says_once_that_its_directory_was_removed(
    scratch_dir: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [text for text in caplog.messages if "removed or replaced while" in text]

    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.wait, 1)
        shutil.rmtree(scratch_dir)
        until(lambda: said() or None)
        one.kill()
        assert coordinator.join(30)
        assert [death.pid for death in coordinator.deaths] == [one.pid], "looked after still"
        with pytest.raises(BufferUnlinkedError):
            coordinator.spawn(targets.wait, 1)
        assert len(said()) == 1
        assert f"{scratch_dir}: the directory was removed" in said()[0]


def another_buffer(scratch_dir: Path, how: str) -> Coordinator:
    if how == "removed":
        shutil.rmtree(scratch_dir)
    else:
        scratch_dir.rename(scratch_dir.with_name("moved"))
    return Coordinator(scratch_dir, capacity=8)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_coordinator_whose_directory_was_replaced_leaves_the_processes_of_the_new_one(
    scratch_dir: Path, reports: Reports, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(scratch_dir, capacity=8) as old:
        (mine,) = old.spawn(targets.stay, 1, reports.out, restart=True)
        reports.next()
        with another_buffer(scratch_dir, how) as new:
            (one,) = new.spawn(targets.stay, 1, reports.out, name="collect")
            reports.next()
            with pytest.raises(BufferUnlinkedError):
                old.spawn(targets.stay, 1, reports.out, name="collect")
            assert one.is_alive()
            mine.kill()
            assert old.join(30)
            assert "stay-0 is not restarted" in caplog.text
            assert [client.role for client in new.clients()] == ["coordinator", "collector"]
            assert len(list((scratch_dir / layout.SPAWNED).iterdir())) == 1
