"""The coordinator records counters and clients.

It may be killed without affecting other clients.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import BufferNotFoundError, Coordinator
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.history import EventKind, History
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.watch.buffer_state import BufferState
from shmbuffer.watch.historian import Historian
from shmbuffer.watch.plot.charts import client_spans
from shmbuffer.watch.plot.timeline import Timeline
from tests.kit.programs import Program
from tests.service import items, targets
from tests.service.conftest import Reports

PATIENCE_S = 30.0

RECORDER = """
import signal, sys
from shmbuffer._native import _core
from shmbuffer import Coordinator
if len(sys.argv) > 2:
    _core.arm(sys.argv[2], after=int(sys.argv[3]))
coordinator = Coordinator(sys.argv[1], capacity=64, on_existing="recover")
print("ready", flush=True)
signal.pause()
"""


SPAWNER = """
import signal, sys
from shmbuffer import Coordinator
from tests.service import targets
coordinator = Coordinator(sys.argv[1], capacity=64)
print(*[one.pid for one in coordinator.spawn(targets.stay_attached, 2)], flush=True)
signal.pause()
"""


def look_at(path: Path) -> BufferState:
    return BufferState(inspect(path), None, None, "", time.time())


def read(path: Path) -> History:
    with Directory.open(path) as directory:
        return history.read(directory)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def records(path: Path) -> int:
    try:
        return len(read(path).fine)
    except BufferNotFoundError:
        return 0


def events(path: Path) -> list[tuple[str, str, int]]:
    try:
        found = read(path).events
    # the historian creates the file shortly after the coordinator starts
    except BufferNotFoundError:
        found = ()
    return [(event.kind.name, event.role.upper(), event.pid) for event in found]


def test_the_counters_are_recorded_second_by_second(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8):
        with Engine.open(scratch_dir, None, role="collector") as engine:
            items.write(engine, [1, 2, 3])
            wait_until(lambda: records(scratch_dir) >= 3)
        found = read(scratch_dir)
        assert found.fine["write_count"][-1] == found.fine["inserts"][-1] == 3
        assert found.fine["length"][-1] == 3
        assert found.fine["living_collector"][-1] == found.fine["living_coordinator"][-1] == 1
        steps_s = (found.fine["boottime_ns"][1:] - found.fine["boottime_ns"][:-1]) / 1e9
        assert (steps_s >= history.FINE_S * 0.9).all()


@pytest.mark.parametrize("storage", ["LazyMemmapStorage", "LazyStackStorage"])
def test_a_load_is_no_spike_in_what_plot_draws(
    scratch_dir: Path, tmp_path: Path, storage: str
) -> None:
    """A resumed run shows the rates of its collectors rather than those of its save."""
    options: dict[str, Any] = {"capacity": 4096, "storage": storage}
    if storage != "LazyMemmapStorage":
        options["max_bytes"] = 2**22
    with Coordinator(scratch_dir, **options) as coordinator:
        coordinator.buffer.extend(TensorDict({"obs": torch.arange(2048)}, [2048]))
        coordinator.buffer.dumps(tmp_path / "saved")
        wait_until(lambda: records(scratch_dir) and read(scratch_dir).fine["length"][-1] == 2048)
        coordinator.buffer.empty()
        wait_until(lambda: bool(read(scratch_dir).fine["length"][-1] == 0))
        before = records(scratch_dir)
        coordinator.buffer.loads(tmp_path / "saved")
        wait_until(lambda: bool(read(scratch_dir).fine["length"][-1] == 2048))
    line = Timeline(read(scratch_dir))
    after = line.times_s >= line.times_s[before - 1]
    # A load sets priorities, which count as updates. No panel plots these as a rate.
    drawn = [name for name in layout.COUNTERS if name != "updates_applied"]
    times, rates = line.rates(*drawn)
    for name, rate in zip(drawn, rates, strict=True):
        seen = rate[np.isin(times, line.times_s[after])]
        assert np.nanmax(seen, initial=0.0) <= 0, name


def test_joining_and_leaving_clients_are_noted(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out, restart=True)
        first = reports.next()[2]
        wait_until(lambda: ("JOINED", "COLLECTOR", first) in events(scratch_dir))
        one.kill()
        second = reports.next()[2]
        wait_until(lambda: ("JOINED", "COLLECTOR", second) in events(scratch_dir))
    me = os.getpid()
    assert events(scratch_dir) == [
        ("JOINED", "COORDINATOR", me),
        ("JOINED", "COLLECTOR", first),
        ("DIED", "COLLECTOR", first),
        ("JOINED", "COLLECTOR", second),
        ("LEFT", "COLLECTOR", second),
        ("LEFT", "COORDINATOR", me),
    ]
    died = read(scratch_dir).events[2]
    assert (died.name, died.exitcode) == ("stay-0", -signal.SIGKILL)
    assert died.restarted


CLIENT = """
import sys, time
from shmbuffer.memory import Engine
engine = Engine.open(sys.argv[1], None, role="learner")
print("ready", flush=True)
while True:  # no pause(): a signal that comes just before it would not end it
    time.sleep(0.01)
"""


@pytest.fixture
def coordinator(scratch_dir: Path) -> Iterator[Engine]:
    """Opens the handle of a coordinator without its background threads."""
    settings = Settings(capacity=8)
    with Engine.open(scratch_dir, settings, role="coordinator") as engine:
        yield engine


def test_a_client_that_another_process_reaped_is_noted_as_dead(
    coordinator: Engine, scratch_dir: Path
) -> None:
    items.write(coordinator, [1])
    historian = Historian(coordinator, scratch_dir)
    with Program.python(CLIENT, scratch_dir) as program:
        program.line()
        historian.record(coordinator.clients(), [], {})
        program.kill()
    Engine.open(scratch_dir, None).close()  # joining reaps the dead client
    assert coordinator.glance()["reaped"] == 1
    historian.record(coordinator.clients(), [], {})
    assert ("DIED", "LEARNER", program.pid) in events(scratch_dir)
    historian.close()


def test_a_client_that_leaves_in_good_order_has_left(
    coordinator: Engine, scratch_dir: Path
) -> None:
    historian = Historian(coordinator, scratch_dir)
    with Engine.open(scratch_dir, None):
        historian.record(coordinator.clients(), [], {os.getpid(): "me"})
    historian.record(coordinator.clients(), [], {})
    historian.close()
    me = os.getpid()
    assert events(scratch_dir) == [
        ("JOINED", "COORDINATOR", me),
        ("JOINED", "CLIENT", me),
        ("LEFT", "CLIENT", me),
        ("LEFT", "COORDINATOR", me),
    ]
    assert [event.name for event in read(scratch_dir).events] == ["me", "me", "", ""]


def test_clients_present_when_a_recorder_begins_are_noted(
    coordinator: Engine, scratch_dir: Path
) -> None:
    with Engine.open(scratch_dir, None) as other:
        for _ in range(3):
            historian = Historian(coordinator, scratch_dir)
            historian.record(coordinator.clients(), [], {})
            historian.close()
        line = Timeline(read(scratch_dir))
        joined = [one for one in line.events if one.kind == EventKind.JOINED]
        assert len(joined) == 6
        first = next(one for one in joined if one.incarnation == other.seat.incarnation)
        assert line.known[other.seat.incarnation] == first


def test_clients_that_a_recovery_finds_dead_are_noted_once_by_name(
    scratch_dir: Path, reports: Reports
) -> None:
    with Program.python(SPAWNER, scratch_dir) as program:
        pids = list(map(int, program.line().split()))
        wait_until(
            lambda: (
                {pid for kind, _, pid in events(scratch_dir) if kind == "JOINED"}
                >= {*pids, program.pid}
            )
        )
        so_far = records(scratch_dir)
        wait_until(lambda: records(scratch_dir) > so_far)
        program.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: inspect(scratch_dir)["needs_recovery"] is not None)
    for _ in range(2):
        Engine.open(scratch_dir, None).close()  # any client can do so
    found = read(scratch_dir)
    died = [event for event in found.events if event.kind == EventKind.DIED]
    assert {event.pid for event in died} == {*pids, program.pid}
    assert len(died) == 3
    assert sorted(event.name for event in died) == ["", "stay_attached-0", "stay_attached-1"]
    assert [event.recorder for event in died] == [history.BY_RECOVERY] * 3

    found_stays = client_spans(Timeline(found), look_at(scratch_dir))
    assert sorted((who, has_died) for who, _, _, has_died in found_stays) == [
        ("coordinator", True),
        ("stay_attached-0", True),
        ("stay_attached-1", True),
    ]
    until_s = Timeline(found).end_s
    # the stay ends before the recovery
    assert all(end_s <= until_s for _, _, end_s, _ in found_stays)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("orderly", [True, False])
def test_clients_that_left_without_a_recorder_are_noted_by_the_next_one(
    coordinator: Engine, scratch_dir: Path, orderly: bool
) -> None:
    items.write(coordinator, [1])
    historian = Historian(coordinator, scratch_dir)
    with Program.python(CLIENT, scratch_dir) as program:
        program.line()
        historian.record(coordinator.clients(), [], {program.pid: "its name"})
        historian.close()
        program.send_signal(signal.SIGINT if orderly else signal.SIGKILL)
        program.end()
    Engine.open(scratch_dir, None).close()  # joining reaps the dead client
    historian = Historian(coordinator, scratch_dir)
    historian.record(coordinator.clients(), [], {})
    historian.close()
    found = read(scratch_dir).events
    (one,) = [event for event in found if event.recorder == history.BY_RECOVERY]
    assert (one.pid, one.name) == (program.pid, "its name")
    assert one.kind == (EventKind.LEFT if orderly else EventKind.DIED)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("damage", [b"", b"damaged"])
def test_a_recovery_leaves_a_history_alone_that_it_cannot_go_on_with(
    scratch_dir: Path, damage: bytes
) -> None:
    with Program.python(RECORDER, scratch_dir) as program:
        program.line()
        wait_until(lambda: records(scratch_dir) >= 1)
        program.kill()
    path = scratch_dir / layout.HISTORY
    path.write_bytes(damage)
    with Engine.open(scratch_dir, None) as engine:
        assert engine.report is not None
    assert path.read_bytes() == damage


def test_a_recovery_that_nobody_recorded_is_noted_by_the_next(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8):
        wait_until(lambda: records(scratch_dir) >= 1)
    Engine.open(scratch_dir, None).close()
    with Coordinator(scratch_dir, on_existing="recover"):
        wait_until(lambda: len(events(scratch_dir)) >= 4)
    found = read(scratch_dir).events
    assert [one.epoch for one in found if one.kind == EventKind.RECOVERED] == [2]


def test_a_registry_that_could_not_be_read_is_not_one_that_everybody_left(
    coordinator: Engine, scratch_dir: Path
) -> None:
    historian = Historian(coordinator, scratch_dir)
    historian.record(coordinator.clients(), [], {})
    before = events(scratch_dir)
    historian.record([], [], {})
    assert events(scratch_dir) == before
    historian.close()


def test_it_begins_later_while_the_files_are_in_use(
    coordinator: Engine, scratch_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    historian = Historian(coordinator, scratch_dir)
    with Directory.open(scratch_dir) as directory, Files(directory).lock(5.0):
        historian.record(coordinator.clients(), [], {})
        assert records(scratch_dir) == 0
    historian.record(coordinator.clients(), [], {})
    assert records(scratch_dir) == 1
    historian.close()
    assert caplog.text == ""


def test_without_room_for_it_the_buffer_works_and_it_is_said_once(
    scratch_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "file_bytes", lambda _: 2**62)
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        wait_until(lambda: "stopped recording the history" in caplog.text)
        with Engine.open(scratch_dir, None) as engine:
            items.write(engine, [1])
            coordinator._supervisor._check_registry()
        assert coordinator.stats()["size"] == 1
    assert caplog.text.count("stopped recording the history") == 1
    assert "are free" in caplog.text
    assert records(scratch_dir) == 0


def test_a_disk_that_becomes_full_ends_it_with_one_warning(
    coordinator: Engine,
    scratch_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    historian = Historian(coordinator, scratch_dir)
    historian.record(coordinator.clients(), [], {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        historian._next_s = 0.0
        historian.record(coordinator.clients(), [], {})
        historian.record(coordinator.clients(), [], {})
    historian.close()
    assert caplog.text.count("stopped recording the history") == 1
    assert records(scratch_dir) == 1
    follower = Historian(coordinator, scratch_dir)
    follower.record(coordinator.clients(), [], {})
    assert records(scratch_dir) == 2
    follower.close()


def test_a_damaged_history_is_replaced_and_reported(
    coordinator: Engine, scratch_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (scratch_dir / layout.HISTORY).write_bytes(b"something else")
    historian = Historian(coordinator, scratch_dir)
    historian.record(coordinator.clients(), [], {})
    historian.close()
    assert "a new history" in caplog.text
    assert "not a history of shmbuffer" in caplog.text
    assert records(scratch_dir) == 2


def test_a_temporary_buffer_takes_its_history_with_it() -> None:
    with Coordinator(capacity=8) as coordinator:
        path = coordinator.scratch_dir
        wait_until(lambda: records(path) >= 1)
    assert not path.exists()


@pytest.mark.product(few=1)
@pytest.mark.crash
@pytest.mark.parametrize(
    ("point", "after"),
    [("history.fine", 1), ("history.fine", 2), ("history.event", 0), ("history.coarse", 0)],
)
def test_the_last_seconds_of_a_killed_coordinator_can_be_read(
    scratch_dir: Path, point: str, after: int
) -> None:
    with Program.python(RECORDER, scratch_dir, point, after) as program:
        assert program.end()[0] == -signal.SIGKILL
    victim, before = program.pid, read(scratch_dir)
    assert before.left_out == 0
    assert len(before.fine) == (after + 1 if point == "history.fine" else point == "history.coarse")
    assert events(scratch_dir) == [("JOINED", "COORDINATOR", program.pid)]
    with Program.python(RECORDER, scratch_dir) as program:
        program.line()
        wait_until(lambda: records(scratch_dir) > len(before.fine))
        after_it = read(scratch_dir)
        assert after_it.fine["number"].tolist() == list(range(1, len(after_it.fine) + 1))
        assert after_it.fine["epoch"][-1] == 1
        assert events(scratch_dir)[1:] == [
            ("DIED", "COORDINATOR", victim),
            ("RECOVERED", "COORDINATOR", 0),
            ("JOINED", "COORDINATOR", program.pid),
        ]
