"""Which storages have their pages allocated in advance, and from when on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ProgressReport,
    ReplayBuffer,
    SpaceError,
)
from shmbuffer.memory.system import prefault

RING = {"max_bytes": 2**20, "shared_init": True}


class Heard:
    """The reports of a storage about its pages."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def __call__(self, now: ProgressReport) -> None:
        self.done, self.total = now.done, now.total


@pytest.mark.parametrize(
    "make",
    [
        lambda path, **how: LazyTensorStorage(100, **how),
        lambda path, **how: LazyTensorStorage(100, shared_init=True, **how),
        lambda path, **how: LazyMemmapStorage(100, **how),
        lambda path, **how: LazyMemmapStorage(100, scratch_dir=path, **how),
        lambda path, **how: LazyMemmapStorage(100, scratch_dir=path, shared_init=True, **how),
        lambda path, **how: LazyStackStorage(100, scratch_dir=path, **RING, **how),
        lambda path, **how: CompressedListStorage(100, scratch_dir=path, **RING, **how),
    ],
)
def test_when_the_first_write_returns_the_pages_are_there(make: Any, tmp_path: Path) -> None:
    heard = Heard()
    storage = make(tmp_path / "buffer", prefault="full", on_progress=heard)
    rb = ReplayBuffer(storage=storage, batch_size=2)
    rb.extend(TensorDict({"obs": torch.arange(4.0)}, [4]))
    assert heard.done == heard.total > 0
    assert sorted(rb[:]["obs"].tolist()) == [0.0, 1.0, 2.0, 3.0]
    rb.close()


def test_a_storage_that_finds_a_buffer_makes_its_own(tmp_path: Path) -> None:
    first = LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True)
    first.set(range(4), TensorDict({"obs": torch.arange(4.0)}, [4]))
    heard = Heard()
    other = LazyMemmapStorage(
        10, scratch_dir=tmp_path / "buffer", shared_init=True, prefault="full", on_progress=heard
    )
    assert heard.done == heard.total > 0
    assert len(other) == 4
    heard.total = 0
    third = pickle.loads(pickle.dumps(other))  # a callback need not be picklable
    assert len(third) == 4
    assert heard.total == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda mode: LazyTensorStorage(4, prefault=mode),
        lambda mode: LazyMemmapStorage(4, prefault=mode),
        lambda mode: LazyStackStorage(4, prefault=mode),
        lambda mode: CompressedListStorage(4, prefault=mode),
    ],
)
def test_an_unknown_mode_is_refused(make: Any) -> None:
    with pytest.raises(
        ValueError, match="prefault must be 'off', 'background' or 'full', but is 'on'"
    ):
        make("on")


@pytest.mark.parametrize("storage", [LazyStackStorage, CompressedListStorage])
def test_a_list_in_one_process_has_no_pages(storage: type[ListStorage]) -> None:
    with pytest.raises(
        ValueError, match=rf"{storage.__name__}\(prefault='full'\): a list in one process has no"
    ):
        storage(4, prefault="full")  # type: ignore[call-arg]


def test_too_little_memory_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "free_memory_bytes", lambda: 2**12)
    storage = LazyMemmapStorage(
        100, scratch_dir=tmp_path / "buffer", prefault="full", reserve=False
    )
    with pytest.raises(SpaceError, match="prefault='full' would load the whole buffer into memory"):
        storage.set(range(4), TensorDict({"obs": torch.arange(4.0)}, [4]))
    assert not (tmp_path / "buffer").exists()
