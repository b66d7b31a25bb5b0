"""Progress of long operations: a bar in a terminal, lines without rich, and nothing elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shmbuffer import ProgressReport
from shmbuffer.cli import exits, main, progress_bar
from shmbuffer.cli.progress_bar import Bar
from shmbuffer.memory.system import progress as memory_progress

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
GIB = 2**30


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every operation long, and lets each of its pieces be reported."""
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(memory_progress, "EVERY_S", 0.0)
    monkeypatch.setattr(memory_progress, "PIECE_BYTES", 1)


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must be called in the test itself, because pytest replaces stderr before it."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)


def test_short_work_shows_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 3600.0)
    in_terminal(monkeypatch)
    with Bar() as bar:
        for done in (0, 50, 100):
            bar(ProgressReport("check", done, 100, "items"))
    assert capsys.readouterr() == ("", "")


def test_a_pipe_has_nothing(capsys: pytest.CaptureFixture[str], slow: None) -> None:
    with Bar() as bar:
        for done in (1, 50, 100):
            bar(ProgressReport("check", done, 100, "items"))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    with Bar() as bar:
        bar(ProgressReport("prefault", GIB // 2, GIB))
        bar(ProgressReport("prefault", GIB, GIB))
    out, err = capsys.readouterr()
    assert out == ""
    assert "prefault" in err
    assert "1.0 GiB of 1.0 GiB" in err
    assert err.count(HIDE_CURSOR) == err.count(SHOW_CURSOR) == 1


def test_each_thing_that_is_done_has_a_bar_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    with Bar() as bar:
        for what, unit in (("recover", "items"), ("prefault", "bytes")):
            bar(ProgressReport(what, 2048, 4096, unit))
            bar(ProgressReport(what, 4096, 4096, unit))
    err = capsys.readouterr().err
    assert "4,096 items of 4,096 items" in err
    assert "4.0 KiB of 4.0 KiB" in err
    assert err.count(HIDE_CURSOR) == err.count(SHOW_CURSOR) == 2


def test_a_bar_that_is_left_in_the_middle_gives_the_terminal_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    with Bar() as bar:
        bar(ProgressReport("prefault", GIB // 2, GIB))
        assert HIDE_CURSOR in capsys.readouterr().err
    assert SHOW_CURSOR in capsys.readouterr().err


def test_a_terminal_without_rich_has_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    in_terminal(monkeypatch)
    without_rich(monkeypatch)
    with Bar() as bar:
        bar(ProgressReport("prefault", GIB // 4, GIB))
        monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0.0)
        bar(ProgressReport("prefault", GIB // 2, GIB))
        monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 60.0)
        bar(ProgressReport("prefault", GIB, GIB))
    assert capsys.readouterr().err == "prefault: 512.0 MiB of 1.0 GiB\n"


@pytest.mark.parametrize("verb", ["check", "recover"])
def test_a_verb_shows_it_in_a_terminal(
    verb: str,
    closed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    slow: None,
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    copy = shutil.copytree(closed, tmp_path / "copy")  # every item of a copy is verified
    assert main([verb, str(copy)]) == exits.DONE
    out, err = capsys.readouterr()
    assert "3 items of 3 items" in err
    assert verb in err
    assert "items of" not in out
    assert SHOW_CURSOR in err


ON_A_TERMINAL = """
import sys
from shmbuffer.cli import main, progress_bar
progress_bar.SHOWN_AFTER_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def on_a_terminal(
    *arguments: object,
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], bytes]]]:
    """Runs the command line in a process whose stderr is a terminal.

    Returns the process's result and the output of the terminal.
    """
    master, slave = os.openpty()

    def seen() -> bytes:
        shown = b""
        with suppress(OSError):  # EIO: no process has the terminal open
            while part := screen.read(65536):
                shown += part
        return shown

    with open(master, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        with process:
            yield process, seen


def test_a_real_terminal_has_its_cursor_and_a_clean_line_at_the_end(closed: Path) -> None:
    pytest.importorskip("rich")
    with on_a_terminal("check", closed) as (process, seen):
        shown = seen()
        assert process.stdout is not None
        out = process.stdout.read().decode()
    assert process.returncode == exits.DONE
    assert out == f"{closed}: intact, 3 items, 3 verified, not in use\n"
    assert b"3 items of 3 items" in shown
    assert shown.count(HIDE_CURSOR.encode()) == shown.count(SHOW_CURSOR.encode()) == 1
    assert b"\x1b[2K" in shown[shown.index(b"3 items of 3 items") :]  # the bar was erased


def test_serve_shows_the_recovery_and_the_prefault_and_then_that_it_is_ready(closed: Path) -> None:
    pytest.importorskip("rich")
    wishes = ("--on-existing", "recover", "--prefault", "full")
    with on_a_terminal("serve", closed, *wishes) as (process, seen):
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready: ")
        process.send_signal(signal.SIGTERM)
        shown = seen()
    assert process.returncode == exits.DONE
    assert b"recover" in shown
    assert b"prefault" in shown[shown.index(b"3 items of 3 items") :]
    assert shown.count(HIDE_CURSOR.encode()) == shown.count(SHOW_CURSOR.encode()) == 2


@pytest.mark.parametrize("verb", ["check", "recover"])
def test_with_json_or_in_a_pipe_there_is_the_result_alone(
    verb: str,
    closed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    slow: None,
) -> None:
    copies = [shutil.copytree(closed, tmp_path / name) for name in ("one", "other")]
    assert main([verb, str(copies[0])]) == exits.DONE
    assert capsys.readouterr().err == ""
    in_terminal(monkeypatch)
    assert main([verb, str(copies[1]), "--json"]) == exits.DONE
    out, err = capsys.readouterr()
    assert json.loads(out)["items"] == 3
    assert err == ""
