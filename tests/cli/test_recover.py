"""``recover`` repairs a buffer and reports what it has done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from shmbuffer.memory.engine import Engine
from tests.service import items


def test_a_dead_one(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", str(dead)]) == exits.DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["items", "present", "3"] in rows
    assert ["rolled", "back", "2"] in rows
    with Engine.open(dead, None) as engine:
        assert items.read(engine) == [1, 2, 3]


def test_json_is_one_object(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", str(dead), "--json"]) == exits.DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["items"], report["rolled_back"], report["clients_retired"]) == (3, 2, 1)


def test_a_live_one_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live"
    with items.create(path, 8) as engine:
        items.write(engine, [1])
        assert main(["recover", str(path), "--timeout", "5"]) == exits.DONE
        assert "in use" in capsys.readouterr().out
        items.write(engine, [2])
        assert items.read(engine) == [1, 2]


def test_damaged_items_are_dropped_and_reported(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(closed, copy)  # every item of a copy is verified
    leaf = copy / "number.memmap"
    leaf.write_bytes(b"\xff" + leaf.read_bytes()[1:])
    assert main(["recover", str(copy), "--json"]) == exits.DAMAGED
    report = json.loads(capsys.readouterr().out)
    assert (report["items"], report["checksum_failed"]) == (2, 1)
    assert main(["check", str(copy)]) == exits.DONE


def test_a_bad_timeout_is_wrong_usage(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("soon", "-1", "nan", "inf"):
        with pytest.raises(SystemExit) as ended:
            main(["recover", str(dead), f"--timeout={text}"])
        assert ended.value.code == exits.USAGE
        assert f"'{text}' is not a number of seconds" in capsys.readouterr().err


def test_it_loads_no_torch(dead: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("recover", dead)
