"""``top`` shows changes, changes nothing, and outlives the processes that it watches."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer.cli import main
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.identity import ProcessState
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.watch.pace import Pace, Watch
from shmbuffer.watch.top.live import BufferWatch
from shmbuffer.watch.top.screen import Screen
from tests.cli.contents import contents
from tests.kit.programs import Program, environment
from tests.kit.rings import ring_of
from tests.service import items

PATIENCE_S = 60.0
LEFT = b"\x1b[?1049l"  # leaves the alternate screen
ECHO = 3  # index in the result of tcgetattr
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

BUSY = """
import sys, time
from pathlib import Path
import numpy as np
from tests.service import items
engine = items.create(Path(sys.argv[1]), 64)
items.write(engine, range(64))
engine.ring().tree.bind(0.6, 1e-8)
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
        assert "██ 100.0%, 64 of 64; " in text
        assert "1 alive" in text
        rate = re.search(r"items written/s +([\d.,]+)", text)
        assert rate is not None
        assert float(rate[1].replace(",", "")) > 0
        assert re.search(rf"client +{program.pid} +running +[\d.,]+ +0 +[\d.]+ s +[\d.]+ MiB", text)
        assert "never  stale updates, redraws, waits for a slot" in text
        assert main(["top", str(path), "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["pace"]["rates"]["inserts"] > 0
        assert found["pace"]["rates"]["items_sampled"] == 0
        assert sum(found["priorities"].values()) == pytest.approx(1.0)


def test_a_dead_one_changes_nothing(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(dead)
    assert main(["top", str(dead), "--once"]) == 0
    text = capsys.readouterr().out
    assert "state       READY: not in use (1 client died; the next client recovers it)" in text
    # the position of its claim
    assert re.search(r"client +\d+ +dead .* 2 slots, from ticket 3\n", text)
    assert contents(dead) == before


def test_a_stopped_process_is_alive_and_said_to_be_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "busy"
    with Program.python(BUSY, path) as program:
        program.line()
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        assert main(["top", str(path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "state       READY: 1 alive, 1 stopped\n" in text
    assert re.search(rf"client +{program.pid} +stopped +0 +0 ", text)


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
            shows(r"items written/s +[\d,.]*[1-9]")
            program.kill()
            shows(rf"not in use \(1 client died; .*died +client {program.pid}")
            with Engine.open(path, None) as engine:
                shows(
                    r"recoveries +1, .*recovered +no client alive, 64 items kept, "
                    r".*1 client reaped"
                )
                shows(rf"joined +client {os.getpid()}")
                items.write(engine, [1])
                engine.cleanup()
            shows(r"the buffer was removed")
            shows(r"removed +the buffer was removed")
            with items.create(path, 8) as engine:
                items.write(engine, [1])
                shows(r"12\.5%, 1 of 8; 1 written")
                shows("new buffer +the buffer was replaced by another one")


def test_q_ends_it_and_the_terminal_is_as_it_was(closed: Path) -> None:
    pytest.importorskip("rich")
    with in_a_terminal("top", closed, "--interval", 3600) as (process, terminal):
        before = termios.tcgetattr(terminal)
        assert not drawn(terminal)[ECHO] & termios.ECHO
        os.write(terminal, b"xyz")  # keys without a meaning
        os.write(terminal, b"q")
        assert LEFT in rest(terminal)
        assert process.wait() == 0
        assert termios.tcgetattr(terminal) == before


@pytest.mark.product(few=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_when_the_terminal_is_as_it_was(closed: Path, number: int) -> None:
    pytest.importorskip("rich")
    with in_a_terminal("top", closed, "--interval", 3600) as (process, terminal):
        before = termios.tcgetattr(terminal)
        drawn(terminal)
        process.send_signal(number)
        assert LEFT in rest(terminal)
        assert process.wait() == (130 if number == signal.SIGINT else -number)
        assert termios.tcgetattr(terminal) == before


SWALLOWS = """
import os, signal, sys
from shmbuffer.cli import main, top
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
shown = top.fill_screen
def fill_screen(*args):
    Last()
    shown(*args)
top.fill_screen = fill_screen
main(["top", sys.argv[1], "--interval", "3600"])
"""


def test_a_signal_whose_exception_python_ignores_ends_it_too(closed: Path) -> None:
    pytest.importorskip("rich")
    command = (sys.executable, "-c", SWALLOWS, str(closed))
    with in_a_terminal(command=command) as (process, terminal):
        seen = rest(terminal)
        assert b"ignored in" in seen
        assert LEFT in seen
        assert process.wait() == -signal.SIGTERM


def test_where_standard_input_is_no_terminal_no_key_ends_it(closed: Path) -> None:
    pytest.importorskip("rich")
    with in_a_terminal("top", closed, "--interval", 0.01, stdin=subprocess.PIPE) as (
        process,
        terminal,
    ):
        before = termios.tcgetattr(terminal)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(b"q")
        assert drawn(terminal) == before
        drawn(terminal)
        process.send_signal(signal.SIGINT)
        assert LEFT in rest(terminal)
        assert process.wait() == 130


BACKGROUND = 'set -m; "$@" & echo "pid $!"; wait $!; echo "status $?"'


def test_in_the_background_it_leaves_the_keyboard_to_others(closed: Path) -> None:
    """A background program that reads the terminal or changes its settings is stopped."""
    pytest.importorskip("rich")
    top = (sys.executable, "-m", "shmbuffer", "top", str(closed), "--interval", "0.01")
    shell = ("setsid", "--ctty", "bash", "-c", BACKGROUND, "bash", *top)
    with in_a_terminal(command=shell) as (process, terminal):
        before = termios.tcgetattr(terminal)
        seen = b""
        while (told := re.search(rb"pid (\d+)", seen)) is None:
            seen += os.read(terminal, 65536)
        os.write(terminal, b"q\n")
        for _ in range(3):
            assert drawn(terminal) == before
        os.kill(int(told[1]), signal.SIGTERM)
        seen = rest(terminal)
        assert LEFT in seen
        assert b"status 143" in seen  # if it had been stopped, wait would have reported that before
        process.wait()


def test_without_a_terminal_looks_follow_each_other(closed: Path) -> None:
    with Program.shmbuffer("top", closed, "--json", "--interval", 0.01) as program:
        first, second = program.json(), program.json()
        assert first["counters"] == second["counters"]
        assert second["pace"]["seconds"] > 0
        program.send_signal(signal.SIGINT)
        assert program.end()[0] == 130


def test_priorities_are_spread_over_powers_of_two(tmp_path: Path) -> None:
    with items.create(tmp_path / "spread", 8) as engine:
        items.write(engine, range(6))
        ring = ring_of(engine)
        ring.update(ring.live.committed(), np.array([0.0, 0.3, 0.5, 1.0, 3.0, 4.0]))
        found = inspect(engine.path, priorities=True)["priorities"]
        assert found == pytest.approx({"0": 1 / 6, "0.5": 2 / 6, "1": 1 / 6, "4": 2 / 6})
        assert "priorities" not in inspect(engine.path)


def test_without_a_tree_there_are_no_priorities(tmp_path: Path) -> None:
    with Engine.open(tmp_path / "uniform", Settings(capacity=8)) as engine:
        items.write(engine, [1])
        assert inspect(engine.path, priorities=True)["priorities"] is None


def test_a_buffer_that_is_gone_says_whether_its_directory_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buffer"
    watch = BufferWatch(str(path))
    with items.create(path, 8) as engine:
        items.write(engine, [1, 2])
        watch.update()
        engine.cleanup()
    path.mkdir(exist_ok=True)
    watch.try_update()
    found = watch.to_json()
    assert found["error"] == "the buffer was removed; the directory still exists"
    assert [event["kind"] for event in found["pace"]["events"]] == ["removed"]
    path.rmdir()
    watch.try_update()
    found = watch.to_json()
    assert found["error"] == "the buffer was removed; the directory was removed, too"
    assert found["pace"]["events"] == ()
    shown = "\n".join(drawn_by(watch.screen(), 80, 24))
    assert "last seen  2 of 8 items, " in shown
    assert "removed" in shown


def test_damage_during_a_live_view_is_reported(closed: Path) -> None:
    watch = BufferWatch(str(closed))
    watch.update()
    (closed / ".shmbuffer" / "schema.json").write_text("{}")
    watch.try_update()
    found = watch.to_json()
    assert "schema cannot be read" in found["error"]
    assert [event["kind"] for event in found["pace"]["events"]] == ["unreadable"]


#: Snapshots of a client, with the text that describes each.
CLIENTS = [
    ({}, "running"),
    ({"state": "stopped"}, "stopped"),
    ({"alive": False, "state": "dead"}, "dead"),
    ({"state": "other container", "memory_bytes": None}, "other container"),
    ({"claimed": {"first": 5008, "count": 16}, "phase": "PAYLOAD"}, "16 slots, from ticket 5,008"),
    (
        {"claimed": {"first": 7, "count": 1}, "phase": "COMMITTING", "mutex": True},
        "the lock; 1 slot, from ticket 7, committing",
    ),
    ({"claimed": {"first": 0, "count": 8}, "phase": "EMPTYING"}, "emptying the buffer"),
    ({"queue_position": 3, "queued_s": 0.42}, "queue position 3, waiting 0.4 s for a slot"),
    ({"idle_s": 300.0}, "5 min"),
    ({"idle_s": None}, "-"),
]


@pytest.mark.parametrize(("change", "words"), CLIENTS)
def test_each_client_is_told_in_words(closed: Path, change: dict[str, Any], words: str) -> None:
    watch, found = Watch(), look(closed, client(1, **change))
    pace = watch.add(found)
    [shown] = [line for line in lines(found, pace, watch, 120, 40) if line.startswith("collector")]
    assert re.fullmatch(rf"collector +101 .*{re.escape(words)}.*", shown), shown


def test_the_page_names_every_state_of_a_client() -> None:
    page = (Path(__file__).parents[2] / "docs" / "top.md").read_text()
    table = page.split("| state | meaning |\n", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE) == list(ProcessState)


def test_a_claim_held_for_long_shows_its_duration(closed: Path) -> None:
    watch, held = Watch(), {"claimed": {"first": 5, "count": 2}, "phase": "PAYLOAD"}
    for at in (0.0, 3.0):
        pace = watch.add(look(closed, client(1, **held)), at=at)
    shown = "\n".join(lines(look(closed, client(1, **held)), pace, watch, 120, 40))
    assert "2 slots for 3.0 s, from ticket 5" in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"needs_recovery": None, "clients": [1, 2]}, "READY: 2 alive  "),
        ({"needs_recovery": "no client alive"}, "not in use (all clients closed it)"),
        (
            {"needs_recovery": "reboot"},
            "the machine was rebooted; the next client recovers",
        ),
        ({"needs_recovery": "copy"}, "a copy of another directory; the next client"),
        ({"needs_recovery": "no client alive", "state": "RECOVERING"}, "being recovered"),
        ({"needs_recovery": None, "state": "CLOSING", "clients": [1]}, "being removed"),
        (
            {"needs_recovery": None, "state": "NO_SCHEMA", "clients": [1]},
            "nothing written yet, 1 alive",
        ),
        (
            {"epoch": 3, "recovery": None},
            "recoveries  3; the result of the last one was not recorded",
        ),
    ],
)
def test_every_state_has_its_words(closed: Path, change: dict[str, Any], words: str) -> None:
    clients = [client(number) for number in change.pop("clients", [])]
    watch, found = Watch(), look(closed, *clients) | change
    assert words in "\n".join(lines(found, watch.add(found), watch, 130, 40))


def test_the_title_counts_who_stands_still_or_waits(closed: Path) -> None:
    watch, waits = Watch(), client(1, queue_position=1, queued_s=0.1)
    found = look(closed, waits, client(2, state="stopped"), client(3))
    found["needs_recovery"] = None
    shown = lines(found, watch.add(found), watch, 80, 24)
    assert "READY: 3 alive, 1 stopped, 1 waiting for a slot  " in shown[0]


@pytest.mark.product(few=3)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (160, 50), (60, 15)])
@pytest.mark.parametrize("count", [0, 3, 40])
def test_it_fits_any_terminal(closed: Path, width: int, height: int, count: int) -> None:
    watch = Watch()
    for at in range(60):
        clients = [client(number) for number in range(count + at % 2)]
        pace = watch.add(look(closed, *clients, inserts=at**3), at=float(at))
    shown = lines(look(closed, *clients), pace, watch, width, height)
    assert max(map(len, shown)) <= width
    if height >= 24:
        assert len(shown) <= height
        assert sum("joined" in line or "left" in line for line in shown) >= 3
    if (count, height) == (40, 24):
        assert any(re.match(r"\d+ more", line) for line in shown)
    if (count, height) == (40, 50):
        assert sum(line.startswith("collector") for line in shown) >= 15


def test_the_dead_come_before_the_living(closed: Path) -> None:
    watch = Watch()
    watch.add(look(closed, *map(client, range(30))), at=0.0)
    others = [client(number) for number in range(29) if number != 17]
    found = look(closed, *others, client(29, alive=False, state="dead"), reaped=1)
    shown = lines(found, watch.add(found, at=1.0), watch, 80, 24)
    rows = [line.split()[1:3] for line in shown if line.startswith("collector")]
    assert rows[:3] == [["117", "dead,"], ["129", "dead"], ["100", "running"]]


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        ({"0": 0.001, "0.25": 0.002, "0.5": 0.4, "1": 0.597}, "up to 0.25 ▁▆█ up to 1, each bar"),
        ({"0.0625": 0.5, "0.5": 0.5}, "up to 0.0625 █▁▁█ up to 0.5, each bar"),
        ({"4.941e-324": 0.1, "1": 0.9}, f"up to 4.657e-10 ▂{'▁' * 30}█ up to 1, each bar"),
        ({"0": 1.0}, "all 0"),
        ({"1": 1.0}, "up to 1 █ up to 1"),
    ],
)
def test_on_a_line_each_bar_of_the_priorities_doubles(
    closed: Path, shares: dict[str, float], shown: str
) -> None:
    watch = Watch()
    found = look(closed) | {"priorities": shares}
    watch.add(found)
    assert f"priorities  {shown}" in "\n".join(lines(found, Pace.nothing(), watch, 100, 24))


def client(number: int, **change: Any) -> dict[str, Any]:
    return {
        "entry": number,
        "incarnation": number,
        "role": "collector",
        "pid": 100 + number,
        "alive": True,
        "state": "running",
        "phase": "IDLE",
        "claimed": None,
        "queue_position": None,
        "queued_s": None,
        "mutex": False,
        "joined_s": 0.0,
        "idle_s": 1.5,
        "memory_bytes": 2**20,
        "counters": dict.fromkeys(layout.COUNTERS, 0),
        **change,
    }


def look(path: Path, *clients: dict[str, Any], **counted: int) -> dict[str, Any]:
    """Returns the snapshot of a directory, with other clients and counters."""
    found = inspect(path, priorities=True)
    return {**found, "clients": list(clients), "counters": {**found["counters"], **counted}}


def lines(found: dict[str, Any], pace: Pace, watch: Watch, width: int, height: int) -> list[str]:
    return drawn_by(Screen("run/buffer", found, pace, watch), width, height)


def drawn_by(shown: Screen, width: int, height: int) -> list[str]:
    """Returns the text on the screen."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=width, height=height, file=io.StringIO(), legacy_windows=False)
    console.print(shown)
    return [line.rstrip() for line in console.file.getvalue().rstrip().split("\n")]


@contextlib.contextmanager
def in_a_terminal(
    *argv: object, stdin: int | None = None, command: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs a verb or a command in a terminal; yields the test's end of it."""
    ours, theirs = pty.openpty()
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the tests ignore it
    process = subprocess.Popen(
        command or (sys.executable, "-m", "shmbuffer", *map(str, argv)),
        stdin=theirs if stdin is None else stdin,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm-256color", LINES="60", COLUMNS="100"),
    )
    signal.signal(signal.SIGHUP, outside)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@contextlib.contextmanager
def screen(*argv: object) -> Iterator[Callable[[str], None]]:
    """Runs a verb in a terminal; yields a function that waits until a pattern is on the screen."""
    with in_a_terminal(*argv) as (process, ours):
        seen = ""

        def shows(pattern: str) -> None:
            nonlocal seen
            end, seen = time.monotonic() + PATIENCE_S, ""
            while not re.search(pattern, seen, re.DOTALL):
                assert time.monotonic() < end, f"{pattern} was not shown, but: {seen[-3000:]}"
                seen += ESCAPES.sub("", os.read(ours, 65536).decode(errors="replace"))

        yield shows
        process.send_signal(signal.SIGINT)
        rest(ours)
        assert process.wait() == 130


def drawn(terminal: int) -> list[Any]:
    """Waits for the first picture; returns the terminal's settings at that time."""
    seen = b""
    while b"items" not in seen:
        seen += os.read(terminal, 65536)
    return termios.tcgetattr(terminal)


def rest(terminal: int) -> bytes:
    """Reads until the other end is closed, which Linux reports as EIO for a terminal."""
    seen = b""
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 65536):
            seen += more
    return seen
