"""A directory that an earlier build has written is read, bit for bit."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import attach
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from tests.replay.records import golden
from tests.replay.records.likeness import alike

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its lock is of another kind of machine"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    golden.unpack(tmp_path)
    return tmp_path


def test_ragged_items_of_an_earlier_build_are_there(folder: Path) -> None:
    assert check(folder / "ragged").ok
    rb = attach(folder / "ragged")
    report = rb.storage.engine().report
    assert (report.reason, report.checksum_failed, report.words_refused) == ("copy", 0, 0)
    assert rb.write_count == 21
    numbers = {slot: next(n for n in range(20, -1, -1) if n % 12 == slot) for slot in range(12)}
    numbers[4] = 100
    assert len(rb) == 12
    for slot, number in numbers.items():
        assert alike(rb[slot], golden.ragged(number))
    assert rb.storage.ring().tree.priorities()[:4].tolist() == [n % 6 for n in (12, 13, 14, 15)]
    rb.close()


def test_steps_of_an_earlier_build_are_there(folder: Path) -> None:
    assert check(folder / "joined").ok
    rb = attach(folder / "joined")
    film = golden.frames(0, 30)
    there = rb.storage.ring().live.committed().tolist()
    assert len(there) == 12
    for slot in there:
        number = next(n for n in range(29, -1, -1) if n % 12 == slot)
        assert torch.equal(rb[slot]["obs"], film["obs"][number])
        assert torch.equal(rb[slot]["next", "obs"], film["next", "obs"][number])
        assert float(rb[slot]["reward"]) == number / 2
    batch = rb.sample()
    assert type(batch) is TensorDict
    assert torch.equal(batch["obs"], film["obs"][(batch["reward"] * 2).long()])
    rb.close()


def test_the_same_items_are_the_same_bytes_today(folder: Path, tmp_path: Path) -> None:
    """Of raw records; what zstd makes of frames is its own business."""
    golden.write_ragged(tmp_path / "today")
    for name in (layout.RECORDS, layout.SLOTS):
        then = np.fromfile(folder / "ragged" / name, np.uint8)
        now = np.fromfile(tmp_path / "today" / name, np.uint8)
        if name == layout.SLOTS:  # the checksums are salted with the schema, which is the same
            then, now = then[: 8 * 12 + 4 * 12], now[: 8 * 12 + 4 * 12]
        assert np.array_equal(then, now)
