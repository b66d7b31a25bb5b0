"""``list`` finds the buffers below a directory in any state, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from tests.cli.contents import contents
from tests.service import items


@pytest.fixture
def several(tmp_path: Path, closed: Path, dead: Path) -> Path:
    """Makes a closed buffer, a dead one, one with a damaged control file, and other files."""
    foreign = tmp_path / "runs" / "foreign"
    shutil.copytree(closed, foreign)
    (foreign / ".shmbuffer" / "control").write_bytes(b"x" * 143360)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "again").symlink_to(closed)
    return tmp_path


def test_every_buffer_is_on_a_line_with_who_uses_it(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(several)
    with items.create(several / "runs" / "live", 16) as engine:
        items.write(engine, [1])
        assert main(["list", str(several)]) == exits.DONE
        foreign, header, *lines = capsys.readouterr().out.splitlines()
        assert header.split() == ["buffer", "used", "by", "items", "of", "size"]
        closed, dead, live = lines
        assert f"{several}/closed" in closed
        assert "not in use (all clients closed it)" in closed
        assert "not in use (1 client died; the next client recovers it)" in dead
        assert foreign == (
            f"{several}/runs/foreign: this is not a control file of shmbuffer; check the "
            "path. Nothing was changed"
        )
        assert "1 alive" in live
        assert live.split()[2:5] == ["alive", "1", "16"]
    shutil.rmtree(several / "runs" / "live")
    assert contents(several) == before


def test_json_has_what_a_script_wants_to_know(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with items.create(several / "runs" / "live", 16) as engine:
        items.write(engine, [1])
        assert main(["list", str(several), "--json"]) == exits.DONE
    closed, dead, foreign, live = json.loads(capsys.readouterr().out)["buffers"]
    assert (closed["items"], closed["elements"], closed["pids"]) == (3, 8, [])
    assert dead["needs_recovery"]
    assert foreign.keys() == {"path", "error"}
    assert live["pids"] == [os.getpid()]
    assert live["bytes"] > 0


def test_where_there_is_none_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == exits.DONE
    assert (
        capsys.readouterr().out
        == f"{tmp_path}: no buffer was found in this directory or below it\n"
    )
    assert main(["list", str(tmp_path / "none")]) == exits.NO_BUFFER
    assert "no such directory" in capsys.readouterr().err


def test_here_is_where_it_looks_by_default(
    closed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(closed.parent)
    assert main(["list"]) == exits.DONE
    assert "\n  closed  not in use" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_named(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = several / "runs" / "empty"
    hidden.chmod(0)
    assert main(["list", str(several)]) == exits.DONE
    hidden.chmod(0o700)
    assert f"{hidden}: may not be read" in capsys.readouterr().out


def test_it_loads_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("list", closed)
