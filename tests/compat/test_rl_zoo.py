"""RL Zoo uses our buffer from a hyperparameter file, with the file and commands of the guide."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.kit.programs import Program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("rl_zoo3") is None, reason="scripts/compat runs these tests"
)

COMMANDS = """
import os, runpy, shlex, sys
import shmbuffer

os.chdir(sys.argv[1])
for command in sys.argv[2:]:
    sys.argv = shlex.split(command)[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    with shmbuffer.attach("run/zoo") as rb:
        print("stored", rb.write_count, flush=True)
"""


def test_a_hyperparameter_file_names_the_buffer(tmp_path: Path) -> None:
    blocks = blocks_of("docs/guides/stable-baselines3.md")
    (file,) = (block for block in blocks if block.title == "dqn.yml")
    (block,) = (block for block in blocks if block.not_run and "rl_zoo3" in block.code)
    commands = [command.replace("\\\n", "") for _, command, _ in block.commands]
    (tmp_path / file.title).write_text(file.code)
    logs = str(tmp_path / "logs of Stable-Baselines3")
    with Program.python(COMMANDS, tmp_path, *commands, SB3_LOGDIR=logs) as program:
        status, out, err = program.end()
    assert status == 0, out + err
    trained, went_on, enjoyed = (
        int(line.split()[1]) for line in out.splitlines() if line.startswith("stored")
    )
    assert 500 <= trained < 1000 <= went_on == enjoyed
    assert (tmp_path / "logs/dqn/CartPole-v1_2/CartPole-v1.zip").exists()
