"""``ps`` lists the clients of a buffer and what each of them holds, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from shmbuffer.memory import Engine
from tests.cli.conftest import KILLED_WITH_A_CLAIM
from tests.cli.contents import contents
from tests.kit.programs import Program


def test_the_living_are_listed_with_what_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "busy"
    with Program.python(KILLED_WITH_A_CLAIM, path) as program:
        program.line()
        with Engine.open(path, None, role="learner") as learner:
            assert main(["ps", str(path)]) == exits.DONE
            text = capsys.readouterr().out
            assert text.startswith(f"{path}\n")
            first, second = text.splitlines()[2:]
            assert re.search(rf"client +{program.pid} +running .* 2 slots, from ticket 3$", first)
            assert re.search(rf"learner +{os.getpid()} +running .* -", second)
            assert main(["ps", str(path), "--json"]) == exits.DONE
            writer, reader = json.loads(capsys.readouterr().out)["clients"]
            assert writer["holds"] == "2 slots, from ticket 3"
            assert (reader["role"], reader["pid"], reader["holds"]) == (
                "learner",
                os.getpid(),
                None,
            )
            assert len(learner.clients()) == 2  # it did not join
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        assert main(["ps", str(path)]) == exits.DONE
        assert re.search(rf"{program.pid} +stopped", capsys.readouterr().out)


def test_the_dead_are_listed_until_somebody_cleans_up(
    dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(dead)
    assert main(["ps", str(dead)]) == exits.DONE
    assert re.search(r"client +\d+ +dead .* 2 slots, from ticket 3\n", capsys.readouterr().out)
    assert contents(dead) == before


def test_where_nobody_is_it_says_so(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", str(closed)]) == exits.DONE
    assert capsys.readouterr().out == f"{closed}: not in use (all clients closed it)\n"


def test_no_buffer_is_no_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", str(tmp_path)]) == exits.NO_BUFFER
    assert str(tmp_path) in capsys.readouterr().err


def test_it_loads_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("ps", closed)
