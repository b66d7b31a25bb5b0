"""``top`` shows what happens as it happens, changes nothing, and outlives whom it watches."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.cli import main
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.inspect import inspect
from tests.cli.contents import contents
from tests.memory import rows
from tests.service import items
from tests.service.programs import Program, environment

PATIENCE_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

BUSY = """
import sys, time
from pathlib import Path
import numpy as np
from tests.service import items
engine = items.create(Path(sys.argv[1]), 64)
items.write(engine, range(64))
engine.ring.bind_priorities(0.6, 1e-8)
print("ready", flush=True)
number = 64
while True:
    items.write(engine, range(number, number + 4))
    number += 4
    time.sleep(0.001)
"""


def test_once_shows_rates_of_a_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "busy"
    with Program.python(BUSY, path) as program:
        program.line()
        assert main(["top", str(path), "--once"]) == 0
        text = capsys.readouterr().out
        assert "64 of 64 (100.0%)" in text
        assert "1 alive" in text
        rate = re.search(r"items written +([\d.e+,]+)", text)
        assert rate is not None
        assert float(rate[1].replace(",", "")) > 0
        assert re.search(rf"client +{program.pid:,} +\w+ +\w+ +[\d.e+,]+ +0 ", text)
        assert main(["top", str(path), "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["pace"]["rates"]["inserts"] > 0
        assert found["pace"]["rates"]["sampled"] == 0
        assert sum(found["priorities"].values()) == pytest.approx(1.0)


def test_a_dead_one_changes_nothing(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(dead)
    assert main(["top", str(dead), "--once"]) == 0
    text = capsys.readouterr().out
    assert "0 alive, 1 dead" in text
    assert "nobody alive" in text
    assert "payload" in text  # what its claim was at
    assert contents(dead) == before


def test_where_no_buffer_is_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "none")]) == 3
    assert "none" in capsys.readouterr().err


def test_it_loads_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("top", closed, "--once")


def test_the_live_view_follows_a_kill_a_recovery_and_the_removal(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "busy"
    with Program.python(BUSY, path) as program:
        program.line()
        with screen("top", path, "--interval", 0.05) as shows:
            shows(r"1 alive")
            shows(r"items written +[\d,.e+]*[1-9]")
            program.kill()
            shows(r"0 alive, 1 dead")
            shows(r"needs recovery +nobody alive")
            with Engine.open(path, None) as engine:
                shows(r"recoveries +1")
                items.write(engine, [1])
                engine.cleanup()
            shows(r"there is no buffer here any more")
            with items.create(path, 8) as engine:
                items.write(engine, [1])
                shows(r"1 of 8 \(12\.5%\)")


def test_without_a_terminal_looks_follow_each_other(closed: Path) -> None:
    with Program.shmbuffer("top", closed, "--json", "--interval", 0.01) as program:
        first, second = program.json(), program.json()
        assert first["counters"] == second["counters"]
        assert second["pace"]["seconds"] > 0
        program.signal(signal.SIGINT)
        assert program.end()[0] == 130


def test_priorities_are_spread_over_powers_of_two(tmp_path: Path) -> None:
    with items.create(tmp_path / "spread", 8) as engine:
        items.write(engine, range(6))
        ring = rows.ring_of(engine)
        ring.update(ring.committed(), np.array([0.0, 0.3, 0.5, 1.0, 3.0, 4.0]))
        found = inspect(engine.path, priorities=True)["priorities"]
        assert found == pytest.approx({"0": 1 / 6, "0.5": 2 / 6, "1": 1 / 6, "4": 2 / 6})
        assert "priorities" not in inspect(engine.path)


def test_without_a_tree_there_are_no_priorities(tmp_path: Path) -> None:
    with Engine.open(tmp_path / "uniform", Settings(capacity=8)) as engine:
        items.write(engine, [1])
        assert inspect(engine.path, priorities=True)["priorities"] is None


@contextlib.contextmanager
def screen(*argv: object) -> Iterator[Callable[[str], None]]:
    """Runs a verb in a terminal; what it gives waits until the pattern is on the screen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shmbuffer", *map(str, argv)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm-256color", LINES="60", COLUMNS="100"),
    )
    os.close(theirs)
    seen = ""

    def shows(pattern: str) -> None:
        nonlocal seen
        end, seen = time.monotonic() + PATIENCE_S, ""
        while not re.search(pattern, seen):
            assert time.monotonic() < end, f"{pattern} was not shown, but: {seen[-3000:]}"
            seen += ESCAPES.sub("", os.read(ours, 65536).decode(errors="replace"))

    try:
        yield shows
        process.send_signal(signal.SIGINT)
        drain(ours)
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def drain(fd: int) -> None:
    """Reads until the other end is closed, which Linux tells of a terminal by EIO."""
    with contextlib.suppress(OSError):
        while os.read(fd, 65536):
            pass
