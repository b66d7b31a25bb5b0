"""``serve`` is a coordinator in the foreground, which SIGTERM and Ctrl-C end cleanly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from shmbuffer.extras import command
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.system.region import Directory
from tests.kit.programs import Program, run
from tests.service import items

DIES_WITH_A_CLAIM = """
import os, signal, sys
from shmbuffer.memory.engine import Engine
from tests.service import items
engine = Engine.open(sys.argv[1], None, role="collector")
items.write(engine, [1])
engine.ring().claims.claim(4, timeout=5.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_well_on_a_signal(path: Path, number: int) -> None:
    with Program.shmbuffer("serve", path, "--capacity", 1000) as program:
        assert program.line() == (
            f"ready: {path}, 0 of 1,000 items, pid {program.pid}; "
            "press Ctrl-C or send SIGTERM to stop"
        )
        with Engine.open(path, None, role="collector") as engine:
            items.write(engine, [1, 2, 3])
            assert [client.role for client in engine.clients()] == ["coordinator", "collector"]
        program.send_signal(number)
        assert program.end() == (
            exits.DONE,
            f"ended: {path}: 3 items left; to continue, run: shmbuffer serve {path} "
            "--on-existing recover\n",
            "",
        )
    with Engine.open(path, None) as engine:
        assert items.read(engine) == [1, 2, 3]
        assert engine.report is not None
        assert engine.report.clients_retired == 0  # the client left cleanly


def test_json_says_so_in_an_object(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity", 8, "--json") as program:
        ready = program.json()
        assert ready == {
            "event": "ready",
            "path": str(path),
            "pid": program.pid,
            "capacity": 8,
            "recovered": None,
            "metrics_port": None,
        }
        with Engine.open(path, None) as engine:
            items.write(engine, [1])
            program.send_signal(signal.SIGTERM)
            assert program.json() == {
                "event": "ended",
                "path": str(path),
                "items": 1,
                "pids": [os.getpid()],
            }
        assert program.end() == (exits.DONE, "", "")


def test_its_options_are_recorded(path: Path) -> None:
    options = (
        "--capacity=8 --alpha=0.5 --beta=0.3 --eps=0.001 --priority-key=p --batch-size=4 "
        "--ndim=2 --no-checksum --no-reserve"
    )
    with Program.shmbuffer("serve", path, *options.split()) as program:
        program.line()
        with Engine.open(path, None) as engine:
            settings = engine.settings
    assert (settings.capacity, settings.alpha, settings.eps, settings.ndim) == (8, 0.5, 1e-3, 2)
    assert (settings.checksum, settings.reserve) == (False, False)
    assert settings.extra == {
        "buffer": "TensorDictPrioritizedReplayBuffer",
        "beta": 0.3,
        "priority_key": "p",
        "batch_size": 4,
    }


def test_alpha_none_is_a_buffer_without_priorities(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=8", "--alpha=none") as program:
        program.line()
        with Engine.open(path, None) as engine:
            assert engine.settings.alpha is None


@pytest.mark.full
def test_an_existing_buffer_is_refused_recovered_or_overwritten(closed: Path) -> None:
    for capacity in ([], ["--capacity=8"]):
        assert run("serve", closed, *capacity) == (
            exits.REFUSED,
            "",
            f"shmbuffer: {closed}: already contains a buffer. To continue with it, run: "
            f"shmbuffer serve {closed} --on-existing recover (use overwrite instead of recover "
            "to start with an empty buffer)\n",
        )
    with Program.shmbuffer("serve", closed, "--on-existing=recover", "--json") as program:
        assert program.json()["recovered"]["items"] == 3
        program.send_signal(signal.SIGTERM)
        assert program.end()[0] == exits.DONE
    with Program.shmbuffer("serve", closed, "--on-existing=overwrite", "--capacity=4") as program:
        assert "0 of 4 items" in program.line()


@pytest.mark.full
def test_a_second_one_is_told_the_pid_of_the_first(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=8") as first:
        first.line()
        code, out, err = run("serve", path, "--on-existing=recover")
        assert (code, out) == (exits.REFUSED, "")
        assert err == (
            f"shmbuffer: {path}: pid {first.pid} is already the coordinator of this directory; "
            "stop this process first, or use attach()\n"
        )


def test_the_next_one_takes_over_from_a_killed_one_while_clients_run(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=8") as first:
        first.line()
        with Engine.open(path, None) as engine:
            items.write(engine, [1])
            first.kill()
            items.write(engine, [2])
            with Program.shmbuffer("serve", path, "--on-existing=recover", "--json") as second:
                assert second.json()["recovered"] is None
                items.write(engine, [3])
            assert items.read(engine) == [1, 2, 3]


def test_a_dead_client_is_reaped_and_reported(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=4") as server:
        server.line()
        with Program.python(DIES_WITH_A_CLAIM, path) as collector:
            assert collector.end()[0] == -signal.SIGKILL
        with Engine.open(path, None) as engine:
            items.write(engine, [2, 3, 4, 5])
            assert items.read(engine) == [5, 2, 3, 4]
        server.send_signal(signal.SIGTERM)
        code, _, err = server.end()
    assert code == exits.DONE
    if err:  # either the server or the engine above, which joins, has reaped it
        assert err == f"{path}: collector (pid {collector.pid}) died\n"


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "capacity, the maximum number of items, is required to create a buffer"),
        (["--capacity=0"], "capacity must be at least 1, got 0"),
        (["--capacity=8", "--alpha=-1"], "alpha must be a finite number of at least 0, got -1.0"),
        (["--capacity=8", "--batch-size=0"], "batch_size must be at least 1, got 0"),
    ],
)
def test_wrong_usage_is_a_sentence(path: Path, options: list[str], said: str) -> None:
    assert run("serve", path, *options) == (exits.USAGE, "", f"shmbuffer: {said}\n")
    assert not path.exists()


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--alpha=much", "'much' is neither a number nor 'none'"),
        ("--beta=much", "'much' is not a number"),
        ("--on-existing=keep", "invalid choice: 'keep'"),
        ("--capacity=many", "'many' is not an integer, such as 1000000, 1_000_000 or 1e6"),
        ("--capacity=1.5", "'1.5' is not an integer, such as 1000000, 1_000_000 or 1e6"),
        ("--capacity=1e999", "'1e999' is not an integer, such as 1000000, 1_000_000 or 1e6"),
    ],
)
def test_options_are_checked(path: Path, option: str, said: str) -> None:
    code, _, err = run("serve", path, option)
    assert code == exits.USAGE
    assert f"argument {option.split('=')[0]}: {said}" in err


@pytest.mark.full
def test_a_whole_number_may_be_written_with_an_exponent(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=1e3", "--batch-size=1_0") as program:
        program.line()
        with Engine.open(path, None) as engine:
            assert engine.settings.capacity == 1000
            assert engine.settings.extra["batch_size"] == 10


def test_without_prometheus_client_it_says_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["serve", str(path), "--capacity=8", "--metrics-port=0"]) == exits.REFUSED
    assert capsys.readouterr().err == (
        "shmbuffer: serving metrics needs prometheus-client, which is not installed: "
        f"{command('metrics')}\n"
    )


@pytest.mark.full
def test_a_signal_ends_it_while_it_still_waits_for_the_directory(closed: Path) -> None:
    lock = str(closed / ".shmbuffer" / "init.lock")
    with (
        Directory.open(closed) as directory,
        InitLock(directory, 5.0),
        Program.shmbuffer("serve", closed, "--on-existing=recover") as program,
    ):
        while lock not in open_files(program.pid):
            assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        assert program.end() == (exits.DONE, "", "")


def test_auto_cleanup_removes_the_buffer_in_the_end(path: Path) -> None:
    with Program.shmbuffer("serve", path, "--capacity=8", "--auto-cleanup") as program:
        program.line()
        assert path.exists()
        program.send_signal(signal.SIGTERM)
        assert program.end() == (exits.DONE, f"ended: {path}: the buffer was removed\n", "")
    assert not path.exists()


def open_files(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # it was closed in the meantime
    return found


def test_prefault_has_the_pages_of_a_recovered_buffer_there_when_it_is_ready(path: Path) -> None:
    with items.create(path, 8) as engine:
        items.write(engine, [1, 2, 3])
    with Program.shmbuffer(
        "serve", path, "--on-existing", "recover", "--prefault", "full"
    ) as program:
        assert program.line().startswith(f"ready: {path}, 3 of 8 items")
        program.send_signal(signal.SIGTERM)
        code, _, err = program.end()
        assert (code, err) == (exits.DONE, "")  # too small for a bar
