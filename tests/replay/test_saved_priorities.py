"""TorchRL's trees, as a save has them: no mass where there is no item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import LazyTensorStorage, TensorDictPrioritizedReplayBuffer


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_a_place_without_an_item_has_no_mass(tmp_path: Path, alpha: float) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=alpha, beta=0.4, eps=0.0, storage=LazyTensorStorage(6)
    )
    index = buffer.extend(TensorDict({"number": torch.arange(4)}, [4]))
    given = torch.tensor([0.5, 1.0, 2.0, 4.0])
    buffer.update_priority(index, given)
    buffer.dumps(tmp_path)
    masses = given.double().numpy() ** alpha
    largest = torch.finfo(torch.float32).max
    for name, nothing in (("sumtree", 0.0), ("mintree", largest)):
        found = np.fromfile(tmp_path / "sampler" / f"{name}.memmap")
        assert found == pytest.approx(np.append(masses, [nothing, nothing]))
