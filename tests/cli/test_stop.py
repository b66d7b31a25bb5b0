"""``stop`` ends every process in order, and no coordinator restarts them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import BufferClosedError, Coordinator
from shmbuffer.cli import exits, main
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.clients.registry import Registry
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.region import Directory
from tests.kit.programs import Program
from tests.service import targets

SCRIPT = """
import multiprocessing, sys, time
from shmbuffer import Coordinator
from tests.service import targets
inbox, out = multiprocessing.get_context("spawn").Pipe(duplex=False)
coordinator = Coordinator(sys.argv[1] or None, capacity=64)
spawned = coordinator.spawn(targets.write, 1, out, restart=True)
spawned += coordinator.spawn(targets.sleep, 1, out, restart=True)
for _ in spawned:
    inbox.recv()
print(coordinator.scratch_dir, *[one.pid for one in spawned], flush=True)
while True:  # an Event that waits does not hear a signal that comes just before
    time.sleep(0.01)
"""

CLIENT = """
import os, signal, sys, time
from shmbuffer.memory import Engine
if sys.argv[3:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
handles = [Engine.open(sys.argv[1], None, role=role) for role in sys.argv[2].split(",")]
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@contextmanager
def script(scratch_dir: Path | str) -> Iterator[tuple[Program, Path, list[int]]]:
    with Program.python(SCRIPT, scratch_dir) as program:
        where, *pids = program.line().split()
        yield program, Path(where), [int(pid) for pid in pids]


@contextmanager
def client(scratch_dir: Path, roles: str, *more: str) -> Iterator[Program]:
    with Program.python(CLIENT, scratch_dir, roles, *more) as program:
        program.line()
        yield program


def stop(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[dict[str, Any]]]:
    code = main(["stop", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)["stopped"]


def test_everybody_is_ended_in_order_and_nobody_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        script(tmp_path / "b") as (coordinator, path, (writer, sleeper)),
        client(path, "learner,collector") as learner,
        client(path, "client") as plain,
        Engine.open(path, None, role="learner"),  # this process stops the others and continues
    ):
        os.kill(writer, signal.SIGSTOP)
        code, stopped = stop(capsys, path)
        assert code == exits.DONE
        assert [(one["pid"], one["role"], one["how"]) for one in stopped[2:]] == [
            (plain.pid, "client", "ended"),
            (learner.pid, "learner", "ended"),
            (coordinator.pid, "coordinator", "ended"),
        ]
        assert {(one["pid"], one["name"]) for one in stopped[:2]} == {
            (writer, "tests.service.targets.write-0"),
            (sleeper, "tests.service.targets.sleep-0"),
        }
        status, out, err = coordinator.end()
        assert (status, out) == (-signal.SIGTERM, "")
        # These clients have not left cleanly; the spawned ones have, and were not restarted.
        died = {line.partition(": ")[2] for line in err.splitlines()}
        names = {learner.pid: "learner", plain.pid: "client"}
        assert died <= {
            f"{role} (pid {pid}) died" for pid in names for role in ("collector", names[pid])
        }
        assert learner.end()[0] == plain.end()[0] == -signal.SIGTERM
        assert list((path / layout.SPAWNED).iterdir()) == []
        assert stop(capsys, path) == (exits.DONE, [])
        assert main(["stop", str(path)]) == exits.DONE
        assert capsys.readouterr().out == f"{path}: not in use\n"


def test_one_that_is_deaf_is_killed_after_the_grace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Coordinator(tmp_path / "b", capacity=8).close()
    with client(tmp_path / "b", "learner", "deaf") as learner:
        assert main(["stop", str(tmp_path / "b"), "--grace", "0.1"]) == exits.DONE
        out = capsys.readouterr().out
        assert [line.split(None, 2) for line in out.splitlines()[2:]] == [
            ["learner", str(learner.pid), "killed because it ignored SIGTERM"]
        ]
        assert learner.end()[0] == -signal.SIGKILL


@pytest.mark.full
def test_a_temporary_buffer_goes_with_its_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    with script("") as (_, path, _):
        code, stopped = stop(capsys, path)
        assert (code, len(stopped)) == (exits.DONE, 3)
    assert not path.exists()
    assert main(["stop", str(path)]) == exits.NO_BUFFER


def test_one_in_another_container_is_left_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(tmp_path / "b", capacity=8).close()
    seen = Registry.identity
    elsewhere = identity.current().pid_namespace + 1

    def far(registry: Registry, entry: int) -> identity.Identity:
        who = seen(registry, entry)
        return identity.Identity(who.pid, who.start_time, who.boot_id, elsewhere)

    with client(tmp_path / "b", "learner") as learner:
        monkeypatch.setattr(Registry, "identity", far)
        code, (one,) = stop(capsys, tmp_path / "b")
        assert (code, one["pid"], one["how"]) == (exits.REFUSED, learner.pid, "left")
        assert one["why"] == "it is in another pid namespace and must be stopped there"
        assert learner.poll() is None


def test_while_a_directory_is_being_stopped_no_process_starts_or_stops_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Coordinator(tmp_path / "b", capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.wait, 1, restart=True)
        with Directory.open(tmp_path / "b") as directory:
            held = Lock().hold(directory, layout.CONTROL, timeout=0, purpose="stops", make=False)
            assert main(["stop", str(tmp_path / "b")]) == exits.REFUSED
            assert f"pid {os.getpid()}" in capsys.readouterr().err
            with pytest.raises(BufferClosedError, match="`shmbuffer stop` is stopping the"):
                coordinator.spawn(targets.wait, 1)
            one.kill()
            assert coordinator.join(30)
            (death,) = coordinator.deaths
            assert (death.exitcode, death.restarted) == (-signal.SIGKILL, False)
            held.close()
        (two,) = coordinator.spawn(targets.wait, 1)
        assert two.is_alive()


def test_one_who_only_looks_whether_a_directory_is_being_stopped_refuses_no_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(tmp_path / "b", capacity=8).close()
    path = tmp_path / "b" / layout.CONTROL
    with path.open() as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        monkeypatch.setattr(
            "shmbuffer.memory.clients.locks.time.sleep",
            lambda _: fcntl.flock(looked, fcntl.LOCK_UN),
        )
        assert stop(capsys, tmp_path / "b") == (exits.DONE, [])
