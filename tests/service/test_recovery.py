"""recover() repairs a directory and reports what it has done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shmbuffer import BufferNotFoundError, RecoveryReport, recover
from shmbuffer.memory.engine import Engine
from tests.kit.programs import Program, environment
from tests.service import items

KILLED_WITH_A_CLAIM = """
import signal, sys
from pathlib import Path
from tests.service import items
engine = items.create(Path(sys.argv[1]), 8)
items.write(engine, [1, 2, 3])
engine.ring().claims.claim(2, timeout=5.0)
print("claimed", flush=True)
signal.pause()
"""


@pytest.fixture
def dead_run(scratch_dir: Path) -> Path:
    """Makes a directory whose only process was killed with two claimed slots."""
    with Program.python(KILLED_WITH_A_CLAIM, scratch_dir) as program:
        program.line()
        program.kill()
    return scratch_dir


def test_the_report_says_what_was_found_and_done(dead_run: Path) -> None:
    report = recover(dead_run)
    assert isinstance(report, RecoveryReport)
    assert (report.items, report.rolled_back, report.rolled_forward) == (3, 2, 0)
    assert (report.clients_retired, report.checksum_failed, report.unverified) == (1, 0, 0)
    assert report.duration_ms > 0
    with Engine.open(dead_run, None) as engine:
        assert items.read(engine) == [1, 2, 3]


def test_the_report_prints_as_a_table(dead_run: Path) -> None:
    lines = str(recover(dead_run)).splitlines()
    assert len(lines) > 5
    for word in ("items", "rolled back", "rolled forward", "priorities", "unverified", "ms"):
        assert any(word in line for line in lines), word


def test_it_may_be_repeated(dead_run: Path) -> None:
    recover(dead_run)
    again = recover(dead_run)
    assert (again.items, again.rolled_back, again.clients_retired) == (3, 0, 0)


def test_a_directory_in_use_keeps_its_living_clients(dead_run: Path) -> None:
    with Engine.open(dead_run, None) as engine:
        report = recover(dead_run)
        assert report.items == 3
        items.write(engine, [4])
        assert items.read(engine) == [1, 2, 3, 4]


def test_no_buffer_is_an_error_and_nothing_is_made(scratch_dir: Path) -> None:
    with pytest.raises(BufferNotFoundError, match=str(scratch_dir)):
        recover(scratch_dir)
    assert not scratch_dir.exists()


def test_it_needs_no_torch(dead_run: Path) -> None:
    source = (
        "import sys\n"
        "from shmbuffer import recover\n"
        "import shmbuffer.watch.stats\n"
        "recover(sys.argv[1])\n"
        "print(*{'torch', 'tensordict'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(dead_run)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []
