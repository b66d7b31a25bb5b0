"""``inspect`` reports the contents of a live or dead directory, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.cli import main
from shmbuffer.memory import Engine
from tests.cli.contents import contents
from tests.kit.programs import run
from tests.memory.carried import publish
from tests.service import items


def test_a_closed_buffer(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(closed)
    assert main(["inspect", str(closed)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{closed}\n")
    assert "items          3 of 8 (37.5%), 3 written" in text
    assert "not in use (all clients closed it)" in text
    assert "next.number  int64  []" in text
    assert "\nclients" not in text
    assert contents(closed) == before


def test_a_dead_one(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(dead)
    assert main(["inspect", str(dead)]) == 0
    text = capsys.readouterr().out
    assert "not in use (1 client died; the next client recovers it)" in text
    assert "2 slots, from ticket 3" in text  # the position of its claim
    assert contents(dead) == before


def test_a_live_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live"
    with items.create(path, 8) as engine:
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        assert "NO_SCHEMA" in text
        assert "items          0 of 8" in text
        assert "\nleaves" not in text
        items.write(engine, [1])
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        assert "used by        1 alive" in text
        assert str(os.getpid()) in text
        assert len(engine.clients()) == 1  # it did not join


@pytest.mark.parametrize("verb", [("inspect",), ("top", "--once")])
def test_the_newest_weights(
    closed: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine.open(closed, None) as engine:
        for number in (1, 2):
            publish(engine, 10_000 * number)
    assert main([verb[0], str(closed), *verb[1:]]) == 0
    text = capsys.readouterr().out
    assert re.search(r"weights +version 2, step 200,000, .* ago; 4\.0 KiB in 5 tensors", text), text


def test_json_is_one_object(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(closed), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["path"] == str(closed)
    assert found["counters"]["length"] == 3
    assert list(found["schema"]["leaves"]) == ["number", "next.number"]
    assert found["clients"] == []


def test_it_loads_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("inspect", closed)


@pytest.mark.parametrize("installed", [True, False])
def test_rich_is_used_on_a_terminal_and_not_needed(
    closed: Path,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if installed:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["inspect", str(closed)]) == 0
    text = capsys.readouterr().out
    assert "next.number" in text
    assert ("─" in text) == installed


def test_a_name_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[31mred"
    with items.create(path, 8) as engine:
        items.write(engine, [1])
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert r"\x1b[31mred" in text


def test_the_exit_code_reaches_the_shell(closed: Path) -> None:
    assert run("inspect", closed)[0] == 0


def test_the_last_recovery_and_the_room_are_told(
    dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(dead)]) == 0
    assert "recoveries     none" in capsys.readouterr().out
    assert main(["recover", str(dead)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(dead)]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"recoveries     1, [\d.]+ s ago: no client alive, 3 items kept, 2 rolled back, "
        r"1 client reaped, in [\d.]+ ms\n",
        text,
    )
    assert re.search(r"size +[\d.]+ KiB (on disk|in memory).*, [\d.]+ \w+ free\n", text)


def test_counters_that_are_0_are_shown_with_all_only(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(closed)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n  inserts +3\n", text)
    assert re.search(r"\n  all others +0 \(shown with --all\)\n", text)
    assert "evicted" not in text
    assert main(["inspect", str(closed), "--all"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n  evicted +0\n", text)
    assert "all others" not in text


@pytest.mark.parametrize("verb", ["inspect", "check", "recover", "stop", "set", "top"])
def test_a_buffer_one_directory_away_is_named(
    closed: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for path in (closed.parent, closed / ".shmbuffer", closed / "next"):
        assert main([verb, str(path)]) == 3
        said = f"shmbuffer: {path}: there is no buffer here; did you mean {closed}?\n"
        assert capsys.readouterr().err == said


def test_three_of_many_nearby_buffers_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abcde":
        items.create(tmp_path / name, 8).close()
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path)]) == 3
    near = ", ".join(str(tmp_path / name) for name in "abc")
    assert capsys.readouterr().err.endswith(f"did you mean {near} and 2 more?\n")


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    ("wishes", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": ""}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_go_into_a_pipe_where_they_are_asked_for(
    closed: Path, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, str], coloured: bool
) -> None:
    pytest.importorskip("rich")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = run("inspect", closed, **wishes)
    assert (code, err) == (0, "")
    assert ("\x1b[" in out) == coloured
