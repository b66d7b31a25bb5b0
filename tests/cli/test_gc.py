"""``gc`` removes what killed processes left in the temporary folder, and nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from shmbuffer.cli import main
from shmbuffer.memory import Engine
from tests.kit.programs import Program
from tests.service import items

OWNER = """
import sys, signal
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from tests.service import items
engine = Engine.open(temporary_directory(), Settings(capacity=8), temporary=True)
items.write(engine, [1, 2, 3])
print(engine.path, flush=True)
signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left_by_a_killed_process() -> Path:
    with Program.python(OWNER) as program:
        return Path(program.line())


def test_nothing_was_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == f"{folder}: no abandoned buffers\n"


def test_a_dry_run_says_what_the_next_one_removes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = left_by_a_killed_process()
    before = sorted(path.rglob("*"))
    assert main(["gc", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    taken = sum(one.lstat().st_blocks * 512 for one in before)
    assert found["directories"] == {str(path): taken}
    assert sorted(path.rglob("*")) == before
    assert main(["gc"]) == 0
    assert "removed\n  directory" in capsys.readouterr().out
    assert not path.exists()
    assert main(["gc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directories"] == {}


def test_live_and_named_directories_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = folder / "named"
    with items.create(named, 8) as engine:
        items.write(engine, [1])
    with Program.python(OWNER) as program:
        living = Path(program.line())
        assert main(["gc"]) == 0
        assert "no abandoned buffers" in capsys.readouterr().out
        assert living.exists()
    assert named.exists()
    assert main(["gc"]) == 0
    assert str(living) in capsys.readouterr().out
    assert sorted(os.listdir(folder)) == ["named"]


def test_a_directory_in_use_stays_though_its_owner_was_killed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Program.python(OWNER) as program:
        path = Path(program.line())
        with Engine.open(path, None) as engine:
            program.kill()
            assert main(["gc"]) == 0
            assert "no abandoned buffers" in capsys.readouterr().out
            assert items.read(engine) == [1, 2, 3]
    assert main(["gc"]) == 0
    assert not path.exists()
