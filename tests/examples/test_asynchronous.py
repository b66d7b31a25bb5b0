"""The asynchronous examples learn within seconds, and pass their own checks under kills."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str | Path) -> str:
    """Returns the output of the example."""
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_no_prompt_is_skipped_or_trained_on_twice_whoever_is_killed(tmp_path: Path) -> None:
    said = run("grpo.py", tmp_path, "--prompts", "480", "--kill")
    assert "3 processes killed" in said
    assert "every prompt was trained on once" in said
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert sorted(n for line in lines for n in line["prompts"]) == [*range(480)]
    assert [line["step"] for line in lines] == [*range(1, 61)]
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-10:]) > 1.5 * sum(rewards[:10])


@pytest.mark.full
def test_every_segment_is_learned_from_once_and_none_is_too_old(tmp_path: Path) -> None:
    said = run("on_policy_queue.py", tmp_path, "--updates", "30", "--collectors", "2", "--kill")
    first, last, killed = map(int, re.findall(r"return (\d+) -> (\d+); (\d+)", said)[0])
    assert killed == 1
    assert last > 1.5 * first
    behind = re.findall(r"(\d+) versions behind at most, 0 segments twice", said)
    assert int(behind[0]) <= 2
