"""``check`` reports whether a buffer is intact, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.system.region import Directory
from tests.cli.contents import contents
from tests.service import items


def test_a_whole_one(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(closed)
    assert main(["check", str(closed)]) == exits.DONE
    assert capsys.readouterr().out == (f"{closed}: intact, 3 items, 3 verified, not in use\n")
    assert contents(closed) == before


def test_a_damaged_one(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaf = closed / "number.memmap"
    leaf.write_bytes(b"\xff" + leaf.read_bytes()[1:])
    assert main(["check", str(closed)]) == exits.DAMAGED
    text = capsys.readouterr().out
    assert "DAMAGED" in text
    assert "problem: slot 0: the bytes do not match their checksum" in text


def test_a_truncated_one(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (closed / "number.memmap").open("r+b") as leaf:
        leaf.truncate(10)
    assert main(["check", str(closed)]) == exits.DAMAGED
    assert "number.memmap" in capsys.readouterr().out


def test_repairs_left_to_recovery_are_not_damage(
    dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(dead)
    assert main(["check", str(dead)]) == exits.DONE
    text = capsys.readouterr().out
    assert "note: 2 slots were being written; recovery frees them" in text
    assert contents(dead) == before


def test_a_live_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live"
    with items.create(path, 8) as engine:
        assert main(["check", str(path)]) == exits.DONE
        items.write(engine, [1, 2])
        assert main(["check", str(path)]) == exits.DONE
        assert "intact, 2 items, 2 verified, in use" in capsys.readouterr().out


def test_a_directory_that_somebody_holds_is_waited_for_no_longer_than_asked(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Directory.open(closed) as directory, InitLock(directory, 5.0):
        assert main(["check", str(closed), "--timeout=0"]) == exits.REFUSED
    assert f"waited 0 s for pid {os.getpid()}" in capsys.readouterr().err


def test_json_is_one_object(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(closed), "--json"]) == exits.DONE
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["items"], answer["problems"]) == (True, 3, [])


def test_it_loads_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("check", closed)
