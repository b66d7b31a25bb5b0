"""A script that runs in a fork runs, ends and is killed like one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import warm
from tests.docs.blocks import ROOT

SERVER = """
from tests.docs import warm
listening = warm.listen({address!r})
print("ready", flush=True)
warm.serve(listening)
"""


@pytest.fixture
def address() -> Iterator[str]:
    name = f"shmbuffer-test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER.format(address=name)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield name
        os.killpg(server.pid, signal.SIGKILL)


def started(address: str, folder: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-SE", warm.__file__, address, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "WORD": "heard"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_has_its_arguments_directory_environment_and_streams(
    address: str, tmp_path: Path
) -> None:
    source = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["WORD"], input())
sys.exit(3)
"""
    with started(address, tmp_path, source, "-x", "1") as script:
        said, _ = script.communicate("given")
    assert said == f"__main__ {[str(tmp_path / 'script.py'), '-x', '1']} {tmp_path} heard given\n"
    assert script.returncode == 3


def test_its_processes_are_spawned_from_it(address: str, tmp_path: Path) -> None:
    source = """
import multiprocessing

def work():
    print("spawned", __file__, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""
    with started(address, tmp_path, source) as script:
        said, _ = script.communicate()
    assert said == f"spawned {tmp_path / 'script.py'}\n"
    assert script.returncode == 0


WAITS = """
import os, signal, time

def heard(number, _):
    print("heard", number, flush=True)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, heard)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_is_passed_on(address: str, tmp_path: Path) -> None:
    with started(address, tmp_path, WAITS) as script:
        assert script.stdout is not None
        script.stdout.readline()
        script.terminate()
        assert script.stdout.read() == f"heard {signal.SIGTERM:d}\n"
    assert script.returncode == 0


def test_what_stands_for_it_is_killed_with_it_and_it_with_that(
    address: str, tmp_path: Path
) -> None:
    for end in ("the script", "what stands for it"):
        with started(address, tmp_path, WAITS) as script:
            assert script.stdout is not None
            pid = int(script.stdout.readline())
            os.kill(pid if end == "the script" else script.pid, signal.SIGKILL)
            assert script.stdout.read() == ""  # no process has the pipe open any more
        assert script.returncode == -signal.SIGKILL
