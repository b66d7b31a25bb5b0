"""How far something has come: a bar in a terminal, lines elsewhere, nothing for what is small."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from shmbuffer.cli import progress
from shmbuffer.cli.progress import LARGE_BYTES, Bar

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called in the test itself: before it pytest has another stderr there."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")


def test_what_is_small_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("prefault") as bar:
        for done in (0, LARGE_BYTES - 1):
            bar(done, LARGE_BYTES - 1)
    assert capsys.readouterr() == ("", "")


def test_elsewhere_there_is_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bar("prefault") as bar:
        bar(LARGE_BYTES // 4, LARGE_BYTES)
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        bar(LARGE_BYTES // 2, LARGE_BYTES)
        monkeypatch.setattr(progress, "LINE_EVERY_S", 60.0)
        bar(LARGE_BYTES * 3 // 4, LARGE_BYTES)
        bar(LARGE_BYTES, LARGE_BYTES)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "prefault: 512.0 MiB of 1.0 GiB",
        "prefault: 1.0 GiB of 1.0 GiB",
    ]


def test_a_terminal_has_a_bar_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    with Bar("prefault") as bar:
        bar(LARGE_BYTES // 2, LARGE_BYTES)
        bar(LARGE_BYTES, LARGE_BYTES)
    out, err = capsys.readouterr()
    assert out == ""
    assert "prefault" in err
    assert "1.0/1.0 GiB" in err


def test_a_bar_that_is_left_in_the_middle_gives_the_terminal_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    in_terminal(monkeypatch)
    with Bar("prefault") as bar:
        bar(LARGE_BYTES // 2, LARGE_BYTES)
        assert HIDE_CURSOR in capsys.readouterr().err
    assert SHOW_CURSOR in capsys.readouterr().err


def test_a_terminal_without_rich_has_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = builtins.__import__

    def no_rich(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return known(name, *arguments, **keywords)

    in_terminal(monkeypatch)
    monkeypatch.setattr(builtins, "__import__", no_rich)
    with Bar("prefault") as bar:
        bar(LARGE_BYTES, LARGE_BYTES)
    assert capsys.readouterr().err == "prefault: 1.0 GiB of 1.0 GiB\n"
