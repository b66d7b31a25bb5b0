"""The README is true: its examples run, its first screen holds what a reader needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(tmp_path: Path, number: int) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if number == 0:
        assert done.stdout == "1000 PriorityUpdate(applied=256, stale=0)\n"


def test_the_first_example_is_short() -> None:
    assert len(EXAMPLES[0].splitlines()) <= 15


def test_the_first_screen_has_the_install_line_an_example_and_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:40])
    for needed in ("pip install", "```python", "scripts/demo", "scripts/test"):
        assert needed in screen


def test_every_file_that_is_linked_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
