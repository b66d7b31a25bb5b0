"""Buffers in which some slots hold no item: reads, and writes beside other processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    ReplayBuffer,
    SpaceError,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of


def grid(path: Path) -> TensorDictReplayBuffer:
    """Makes 4 lanes over 3 batches of 5 steps; the slots 5 to 7 were claimed and released."""
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(40, ndim=2, scratch_dir=path, shared_init=True), batch_size=3
    )
    steps = torch.arange(10).expand(4, 10)
    rb.extend(TensorDict({"step": steps[:, :5]}, [4, 5]))
    ring = ring_of(rb)
    ring.claims.claim(3)
    ring.claims.abort()
    rb.extend(TensorDict({"step": steps[:, 8:]}, [4, 2]))
    return rb


def test_a_slice_along_any_dimension_leaves_out_slots_without_an_item(tmp_path: Path) -> None:
    rb = grid(tmp_path / "buffer")
    there = [0, 1, 2, 3, 4, 8, 9]
    assert len(rb) == 28
    assert rb[:]["step"].tolist() == [there] * 4
    assert rb.read_all_in_order()["step"].tolist() == [there] * 4
    assert rb[1, 3:9]["step"].tolist() == [3, 4, 8]
    assert rb[..., 4:]["step"].tolist() == [[4, 8, 9]] * 4
    assert rb[:, 8]["step"].tolist() == [8] * 4
    with pytest.raises(IndexError, match="there is no item at 6"):
        rb[:, 6]
    rb.close()


def test_too_little_space_at_the_first_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    rb = ReplayBuffer(storage=LazyMemmapStorage(10**10, scratch_dir=path))
    with pytest.raises(SpaceError):
        rb.extend(torch.zeros(2, 1000))
    assert not path.exists()
    again = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=path))
    again.extend(torch.zeros(2, 1000))
    assert len(again) == 2
    again.close()
