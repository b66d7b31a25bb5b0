"""Directories in the state in which a run leaves them, for tests of the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.programs import Program
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
def closed(tmp_path: Path) -> Path:
    """Makes a buffer with three items that all clients have left cleanly."""
    path = tmp_path / "closed"
    with items.create(path, 8) as engine:
        items.write(engine, [1, 2, 3])
    return path


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """Makes a buffer with three items whose only process was killed with two claimed slots."""
    path = tmp_path / "dead"
    with Program.python(KILLED_WITH_A_CLAIM, path) as program:
        program.line()
    return path


@pytest.fixture
def loads_no_torch() -> Callable[..., None]:
    """Runs a verb in a process of its own and checks which modules it has imported."""

    def look(*argv: object) -> None:
        source = (
            "import sys\n"
            "from shmbuffer.cli import main\n"
            "code = main(sys.argv[1:])\n"
            "print(code, *{'torch', 'tensordict'} & sys.modules.keys())"
        )
        with Program(sys.executable, "-c", source, *map(str, argv)) as program:
            code, out, err = program.end()
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == "0"

    return look
