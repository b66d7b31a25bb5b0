"""Saves that do not load and files that run code, as other projects report.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, attach
from tests.memory.rows import Parent, child


def filled(path: Path, count: int = 8) -> TensorDictPrioritizedReplayBuffer:
    """Makes a buffer with items 0 to 7, of which the last one has all the priority."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        storage=LazyMemmapStorage(8, scratch_dir=path, shared_init=True),
        batch_size=4,
    )
    if count:
        rb.extend(step(range(count)))
        rb.update_priority(torch.arange(count), (torch.arange(count) == count - 1).double())
    return rb


def step(numbers: range) -> TensorDict:
    number = torch.tensor(list(numbers))
    return TensorDict({"number": number, "twice": number * 2}, [len(numbers)])


def test_reverb_147_a_save_that_was_taken_while_others_wrote_is_loaded(tmp_path: Path) -> None:
    """Loading the checkpoint never ended."""

    def keep_writing(parent: Parent) -> None:
        writer = attach(tmp_path / "live")
        parent.tell_him()
        while True:
            writer.extend(step(range(4)))

    rb = filled(tmp_path / "live")
    with child(keep_writing) as other:
        other.reached()
        rb.dumps(tmp_path / "saved")
        other.kill()
    rb.close()
    again = filled(tmp_path / "restored", 0)
    again.loads(tmp_path / "saved")
    data = again[:]
    assert (data["twice"] == data["number"] * 2).all()
    assert len(again) in range(1, 9)
    again.close()


def test_reverb_14_what_was_saved_is_what_is_restored(tmp_path: Path) -> None:
    """Items were restored without the table's state, or not at all."""
    rb = filled(tmp_path / "live")
    rb.dumps(tmp_path / "saved")
    rb.empty()
    rb.loads(tmp_path / "saved")
    assert rb[:]["number"].tolist() == [*range(8)]
    assert rb.write_count == 8
    rb.close()


def test_reverb_118_after_a_restore_the_same_is_sampled(tmp_path: Path) -> None:
    """A restored sampler did not know the priorities of its items."""
    rb = filled(tmp_path / "live")
    rb.dumps(tmp_path / "saved")
    again = filled(tmp_path / "restored", 0)
    again.loads(tmp_path / "saved")
    assert again.sample()["number"].tolist() == [7] * 4
    assert again.extend(step(range(1))).tolist() == [0], "it goes on where it was"
    for one in (rb, again):
        one.close()


@pytest.mark.crash
def test_rl_3463_an_item_sampled_during_an_extend_is_of_one_write(tmp_path: Path) -> None:
    """Rows that a learner drew were half old item and half new item."""
    path = tmp_path / "live"
    rb = filled(path)

    def keep_writing(parent: Parent) -> None:
        torch.set_num_threads(1)
        writer = attach(path)
        parent.tell_him()
        for first in range(0, 10**6, 4):
            writer.extend(step(range(first, first + 4)))

    with child(keep_writing) as other:
        other.reached()
        for _ in range(200):
            data = rb.sample()
            assert (data["twice"] == data["number"] * 2).all()
        other.kill()
    rb.close()


class Marker:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("report", ["cve_2025_32434", "cve_2026_24747"])
def test_a_file_that_runs_code_when_it_is_loaded_is_loaded_by_nobody(
    tmp_path: Path, report: str
) -> None:
    """`torch.load(weights_only=True)` ran code from pickles and from archives of them."""
    live, saved, ran = tmp_path / "live", tmp_path / "saved", tmp_path / "ran"
    rb = filled(live)
    rb.dumps(saved)
    rb.close()
    payload = pickle.dumps(Marker(ran))
    if report == "cve_2026_24747":
        torch.save({"payload": Marker(ran)}, tmp_path / "archive")
        payload = (tmp_path / "archive").read_bytes()
    for folder in (live, live / ".shmbuffer", saved, saved / "storage"):
        for name in ("other.pickle", "meta.pt", "dictionary"):
            (folder / name).write_bytes(payload)
    again = attach(live)
    assert again[:]["number"].tolist() == [*range(8)]
    again.close()
    restored = filled(tmp_path / "restored", 0)
    restored.loads(saved)
    restored.dumps(tmp_path / "export", layout="torchrl")
    saved = tmp_path / "export"
    (saved / "transform.t").write_bytes(payload)
    with pytest.raises(ValueError, match=r"transform\.t: cannot be loaded without running code"):
        restored.loads(saved)
    restored.close()
    assert not ran.exists()
