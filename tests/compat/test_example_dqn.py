"""The DQN of TorchRL's tutorials runs on both buffers, which differ in one line."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.compat.family  # noqa: F401 - skips these tests where TorchRL is not installed

pytest.importorskip("gymnasium")
# This module keeps the error of a failed import with all frames. It is therefore imported here: an
# import by `train` would keep the buffer of that frame until the process ends.
pytest.importorskip("torchrl.envs.libs.utils")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dqn_torchrl.py"
OURS = "from shmbuffer import LazyTensorStorage, TensorDictPrioritizedReplayBuffer\n"
THEIRS = OURS.replace("shmbuffer", "torchrl.data")

# TorchRL and gymnasium warn about deprecations, which are not tested here.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def torchrl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a copy of the example that uses TorchRL's own buffer."""
    text = EXAMPLE.read_text()
    assert text.count(OURS) == 1
    assert text.replace(OURS, "").count("import shmbuffer") == 0
    path = tmp_path_factory.mktemp("theirs") / EXAMPLE.name
    path.write_text(text.replace(OURS, THEIRS))
    return path


def structure(sample: Any) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {
        str(key): (sample[key].dtype, list(sample[key].shape)) for key in sample.keys(True, True)
    }


def test_both_buffers_give_the_loss_samples_of_the_same_structure(torchrl_file: Path) -> None:
    samples = []
    for path in (EXAMPLE, torchrl_file):
        rewards, sample = runpy.run_path(str(path))["train"](frames=600)
        assert len(rewards) > 5
        assert all(reward >= 8 for reward in rewards)  # a pole needs that long to fall
        samples.append(sample)
    ours, theirs = (structure(sample) for sample in samples)
    assert ours.pop("_weight") == ours["priority_weight"]  # shmbuffer returns it under both names
    assert ours == theirs
    assert ours["observation"] == (torch.float32, [128, 4])
    assert [type(sample).__name__ for sample in samples] == ["TensorDict", "TensorDict"]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_the_script_runs_as_it_stands(whose: str, torchrl_file: Path) -> None:
    path = EXAMPLE if whose == "ours" else torchrl_file
    result = subprocess.run(
        [sys.executable, str(path), "--frames", "600"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "mean reward of the last" in result.stdout.splitlines()[-1]
