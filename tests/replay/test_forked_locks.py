"""Children that are forked while another thread of the parent uses the same object."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.items.records.codec import DictionaryTrainer
from tests.crash.harness import ended, fork
from tests.kit.rings import engine_of
from tests.memory.system.test_fork_lock import held_by_another_thread

ITEMS = TensorDict(
    {
        "x": torch.arange(8),
        "policy_version": torch.zeros(8, dtype=torch.int64),
        "done": torch.zeros(8, 1, dtype=torch.bool),
    },
    [8],
)


def filled(storage: Any, **parts: Any) -> Any:
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4, **parts)
    rb.extend(ITEMS)
    return rb


def held_rows(_: Path) -> tuple[Any, Callable[[], object]]:
    rb = filled(TensorStorage(ITEMS.clone()))
    return rb.storage._mover._claim, lambda: rb.extend(ITEMS)


def objects(_: Path) -> tuple[Any, Callable[[], object]]:
    rb = ReplayBuffer(storage=ListStorage(8))
    rb.extend([1, 2])

    def refused() -> None:
        with pytest.raises(RuntimeError, match="was inherited through a fork"):
            rb.extend([3])

    return rb.storage._mover._claim, refused


def not_opened(path: Path) -> tuple[Any, Callable[[], object]]:
    storage = LazyMemmapStorage(8, scratch_dir=path / "rb")

    def refused() -> None:
        with pytest.raises(RuntimeError, match="this process is the child of a fork"):
            engine_of(storage)

    return storage._opening, refused


def highest(_: Path) -> tuple[Any, Callable[[], object]]:
    rb = filled(LazyTensorStorage(8), writer=TensorDictMaxValueWriter(rank_key="x"))
    return rb.writer._lock, lambda: rb.extend(ITEMS)


def slices(_: Path) -> tuple[Any, Callable[[], object]]:
    sampler = SliceSampler(slice_len=2, end_key="done", traj_key=None)
    rb = filled(LazyTensorStorage(8), sampler=sampler)
    rb.sample()
    return rb.sampler._boundaries.lock, rb.sample


def labels(_: Path) -> tuple[Any, Callable[[], object]]:
    rb = filled(LazyTensorStorage(8), sampler=StalenessAwareSampler())
    rb.sample()
    return rb.sampler._index.lock, rb.sample


def ahead(_: Path) -> tuple[Any, Callable[[], object]]:
    rb = filled(LazyTensorStorage(8), prefetch=1)
    return rb._parts.prefetcher.choosing, rb.sample


def dictionaries(_: Path) -> tuple[Any, Callable[[], object]]:
    trainer = DictionaryTrainer(3, 1000)
    return trainer._lock, lambda: trainer.learn([b"1"], "here")


@pytest.mark.parametrize(
    "made", [held_rows, objects, not_opened, highest, slices, labels, ahead, dictionaries]
)
def test_the_child_of_a_fork_waits_for_no_thread_of_its_parent(
    made: Callable[[Path], tuple[Any, Callable[[], object]]], tmp_path: Path
) -> None:
    lock, use = made(tmp_path)

    def used_in_child() -> None:
        signal.alarm(20)
        use()

    with held_by_another_thread(lock):
        assert ended(fork(used_in_child)) == 0
