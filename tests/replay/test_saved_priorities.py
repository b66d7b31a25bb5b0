"""Priorities in TorchRL's layout: in its trees, and in a file of our own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.kit.rings import ring_of


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_a_place_without_an_item_has_no_mass(tmp_path: Path, alpha: float) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=alpha, beta=0.4, eps=0.0, storage=LazyTensorStorage(6)
    )
    index = buffer.extend(TensorDict({"number": torch.arange(4)}, [4]))
    given = torch.tensor([0.5, 1.0, 2.0, 4.0])
    buffer.update_priority(index, given)
    buffer.dumps(tmp_path, layout="torchrl")
    masses = given.double().numpy() ** alpha
    largest = torch.finfo(torch.float32).max
    for name, nothing in (("sumtree", 0.0), ("mintree", largest)):
        found = np.fromfile(tmp_path / "sampler" / f"{name}.memmap")
        assert found == pytest.approx(np.append(masses, [nothing, nothing]))


OWN = "shmbuffer.priorities.memmap"


def saved_for_torchrl(path: Path, alpha: float) -> list[float]:
    """Saves a full buffer of 6 items in TorchRL's layout; returns its priorities."""
    with TensorDictPrioritizedReplayBuffer(
        alpha=alpha,
        beta=0.4,
        storage=LazyMemmapStorage(6),
        writer=TensorDictRoundRobinWriter(track_generations=True),
    ) as buffer:
        index = buffer.extend(TensorDict({"number": torch.arange(7)}, [7]))
        given = torch.tensor([0.5, 1.0, 2.0, 4.0])
        buffer.update_priority(index[-4:], given)
        buffer.dumps(path, layout="torchrl")
        return ring_of(buffer).tree.priorities().tolist()


@pytest.mark.parametrize("alpha", [0.7, 0.1])
def test_a_sampler_that_was_saved_with_its_storage_can_be_loaded_alone(
    tmp_path: Path, alpha: float
) -> None:
    known = saved_for_torchrl(tmp_path, alpha)
    assert not (tmp_path / "sampler" / OWN).exists()  # the save of the storage contains them
    sampler = PrioritizedSampler(6, alpha=1.0, beta=1.0)
    sampler.loads(tmp_path / "sampler")
    assert (sampler.alpha, sampler.beta) == (alpha, 0.4)
    assert ring_of(sampler).tree.priorities() == pytest.approx(known, rel=1e-12)
    assert ring_of(sampler).tree.max_priority == 4.0


def test_a_sampler_that_is_saved_alone_has_its_priorities_exactly(tmp_path: Path) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.4, storage=LazyTensorStorage(6))
    index = buffer.extend(TensorDict({"number": torch.arange(4)}, [4]))
    buffer.update_priority(index, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    buffer.sampler.dumps(tmp_path)
    found = np.fromfile(tmp_path / OWN)
    assert found[:4].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert np.isnan(found[4:]).all()


def test_how_often_each_place_was_written_is_saved_for_torchrl(tmp_path: Path) -> None:
    saved_for_torchrl(tmp_path, 0.7)
    generation = np.fromfile(tmp_path / "writer" / "generation.memmap", np.int64)
    assert generation.tolist() == [2, 1, 1, 1, 1, 1]


def test_there_is_nothing_to_save_yet(tmp_path: Path) -> None:
    PrioritizedSampler(3, alpha=0.7, beta=0.4).dumps(tmp_path)
    assert np.fromfile(tmp_path / "sumtree.memmap").tolist() == [0.0] * 3
    assert not (tmp_path / OWN).exists()
    sampler = PrioritizedSampler(3, alpha=1.0, beta=1.0)
    sampler.loads(tmp_path)
    assert (sampler.alpha, sampler.ring()) == (0.7, None)
