"""A storage in files allocates disk space in steps for one process, else all of it at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    Coordinator,
    LazyMemmapStorage,
    LazyStackStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.memory.format.layout import Flag
from tests.kit.programs import in_fork
from tests.kit.rings import engine_of

ITEMS = 4000
ITEM_BYTES = 2**16  # all items take 250 MiB
STEP = 32 * 2**20


def frames(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    pixels = numbers.to(torch.uint8)[:, None].expand(count, ITEM_BYTES)
    return TensorDict({"pixels": pixels.contiguous(), "number": numbers}, [count])


def taken(path: Path) -> int:
    """Returns the bytes that the files occupy on disk."""
    found = (os.stat(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)
    return sum(one.st_blocks * 512 for one in found)


def reserve_of(storage: LazyMemmapStorage) -> Any:
    return storage._location.reserve  # type: ignore[union-attr]


def test_fifty_frames_in_a_storage_of_thousands_take_a_step(fast_path: Path) -> None:
    path = fast_path / "buffer"
    storage = LazyMemmapStorage(ITEMS, scratch_dir=path)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=16)
    rb.extend(frames(0, 50))
    assert STEP <= taken(path) < 1.2 * STEP
    rb.extend(frames(50, 600))
    assert 650 * ITEM_BYTES <= taken(path) < 650 * ITEM_BYTES + 1.2 * STEP
    batch = rb.sample()
    assert (batch["pixels"] == batch["number"].to(torch.uint8)[:, None]).all()
    assert engine_of(rb).superblock.flags & (Flag.STEPS | Flag.RESERVE) == Flag.STEPS
    before = taken(path)
    rb.empty()
    rb.extend(frames(0, 50))
    assert taken(path) == before
    assert len(rb) == 50
    rb.close()


def test_another_process_that_attaches_takes_space_too(fast_path: Path) -> None:
    path = fast_path / "buffer"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(ITEMS, scratch_dir=path), batch_size=4)
    rb.extend(frames(0, 5))

    def writes() -> None:
        other = attach(path, timeout=5.0)
        other.extend(frames(5, 600))
        other.close()

    assert in_fork(writes) == 0
    assert len(rb) == 605
    assert rb[:]["number"].tolist() == [*range(605)]
    assert engine_of(rb).check().ok
    rb.close()


@pytest.mark.parametrize(
    ("options", "reserve"),
    [
        ({}, "steps"),
        ({"shared_init": True}, "all"),
        ({"prefault": "background"}, "all"),
        ({"reserve": "all"}, "all"),
        ({"reserve": False}, False),
        ({"reserve": "steps", "shared_init": True}, "steps"),
    ],
)
def test_the_default_depends_on_who_uses_the_files(
    fast_path: Path, options: dict[str, Any], reserve: Any
) -> None:
    storage = LazyMemmapStorage(8, scratch_dir=fast_path / "buffer", **options)
    assert reserve_of(storage) == reserve
    storage.set(range(3), frames(0, 3))
    assert engine_of(storage).settings.reserve == reserve
    storage.close()


def test_a_coordinator_takes_all_space_and_steps_if_asked(fast_path: Path) -> None:
    for reserve, most in (("all", None), ("steps", 1.3 * STEP)):
        path = fast_path / reserve
        options: dict[str, Any] = {} if reserve == "all" else {"reserve": reserve}
        with Coordinator(path, capacity=1000, example=frames(0, 1)[0], **options):
            size = taken(path)
        assert size >= 1000 * ITEM_BYTES if most is None else size < most


def test_values_that_cannot_be_are_refused_before_anything_is_made(fast_path: Path) -> None:
    path = fast_path / "buffer"
    for value in (True, "none", 1):
        with pytest.raises(ValueError, match="reserve must be 'all', 'steps' or False, but is"):
            LazyMemmapStorage(8, scratch_dir=path, reserve=value)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="reserve must be 'all', 'steps' or False, but is"):
            Coordinator(path, capacity=8, reserve=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prefault='full' allocates the pages of all items"):
        LazyMemmapStorage(8, scratch_dir=path, reserve="steps", prefault="full")
    with pytest.raises(
        ValueError, match=r"reserve='steps' is not supported for a buffer with a byte ring"
    ):
        LazyStackStorage(8, scratch_dir=path, max_bytes=4096, reserve="steps").set(0, frames(0, 1))
    assert not path.exists()


def test_pages_that_are_made_ahead_are_those_of_slots_with_space(fast_path: Path) -> None:
    path = fast_path / "buffer"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(ITEMS, scratch_dir=path), batch_size=4)
    rb.extend(frames(0, 5))
    before = taken(path)
    attach(path, timeout=5.0, prefault="full").close()
    assert taken(path) == before
    rb.close()


def test_a_save_takes_what_it_holds_and_goes_on_in_steps(fast_path: Path) -> None:
    path, save = fast_path / "buffer", fast_path / "save"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(ITEMS, scratch_dir=path), batch_size=4)
    rb.extend(frames(0, 5))
    rb.dumps(save)
    rb.close()
    size = taken(save)
    assert size < 8 * 2**20  # the margin is a number of bytes, not of rows
    opened = attach(save / "storage", timeout=5.0)
    assert opened[:]["number"].tolist() == [*range(5)]
    opened.close()
    assert taken(save) - size < 2**20  # a read-only attach allocates no step
    again = attach(save / "storage", timeout=5.0, on_existing="recover")
    assert taken(save) < 2 * STEP
    again.extend(frames(5, 5))
    assert again[:]["number"].tolist() == [*range(10)]
    assert taken(save) < 2 * STEP
    again.close()
