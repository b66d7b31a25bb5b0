"""TorchRL's trainers train on our buffers, and on the classes that TorchRL looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shmbuffer
from tests.compat.family import said_by


@pytest.mark.parametrize("kind", ["plain", "prioritized"])
@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_a_trainer_trains(algorithm: str, kind: str) -> None:
    ours = said_by("train", algorithm, "shmbuffer", kind)
    other = said_by("train", algorithm, "torchrl", kind)
    assert ours["moved"]
    assert ours["finite"]
    assert ours["len"] == other["len"] == 600
    assert {*ours["keys"]} == {*other["keys"]} - {"index"}


REGISTERED = """\
import torchrl.data.replay_buffers as torchrl_buffers

for name in ("Sampler", "SamplerWithoutReplacement", "PrioritizedSampler"):
    getattr(torchrl_buffers, name).register(getattr(shmbuffer, name))
"""
USED = """
import torch
from torchrl.data.replay_buffers.scheduler import LinearScheduler
from torchrl.trainers import ReplayBufferTrainer

sampler = shmbuffer.PrioritizedSampler(10, alpha=0.7, beta=0.4)
scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
scheduler.step()
assert 0.4 < sampler.beta < 1.0
rb = shmbuffer.ReplayBuffer(storage=shmbuffer.LazyTensorStorage(10), sampler=sampler)
try:
    ReplayBufferTrainer(rb)
except ValueError as error:
    assert "Prioritized sampler not supported" in str(error)
else:
    raise AssertionError("its priorities would never be updated, and nobody would say so")
assert isinstance(shmbuffer.SamplerWithoutReplacement(), torchrl_buffers.SamplerWithoutReplacement)
"""


def test_torchrl_knows_our_samplers_after_the_lines_of_the_documentation() -> None:
    root = Path(shmbuffer.__file__).parents[1]
    assert REGISTERED in (root / "docs" / "torchrl.md").read_text()
    script = "import shmbuffer\n" + REGISTERED + USED
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_dataset_for_trl_takes_torchrls_own_class_alone() -> None:
    """docs/torchrl.md says what to write instead."""
    from torchrl.modules.llm.trl_interop import TorchRLBufferDataset

    rb = shmbuffer.ReplayBuffer(storage=shmbuffer.LazyTensorStorage(10))
    with pytest.raises(TypeError, match="must be a torchrl ReplayBuffer"):
        TorchRLBufferDataset(rb, batch_size=2)
