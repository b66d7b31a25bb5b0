"""A process killed while it saves leaves the earlier save or the new one, whole."""

from __future__ import annotations

import os
import shutil
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
    RandomSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.saves import publication
from tests.kit.rings import engine_of, ring_of

pytestmark = pytest.mark.crash

CAPACITY = 6
COUNTS = {"published", "replaced", "complete", "moved", "removed", "moved all"}
"""Steps after which the new save is the one that counts."""


def items(first: int, stop: int) -> TensorDict:
    n = torch.arange(first, stop)
    return TensorDict({"a": n, "b": {"c": n[:, None].repeat(1, 50).float()}}, [len(n)])


def buffer(storage: Any = None, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    storage = LazyTensorStorage(CAPACITY) if storage is None else storage
    return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=0.5, storage=storage, **options)


def old() -> TensorDictPrioritizedReplayBuffer:
    rb = buffer(batch_size=2, generator=torch.Generator().manual_seed(1))
    rb.extend(items(0, 3))
    rb.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
    return rb


def new() -> TensorDictPrioritizedReplayBuffer:
    rb = buffer(batch_size=5)
    rb.extend(items(100, 108))
    rb.update_priority(torch.arange(6), torch.arange(6) + 10.0)
    return rb


def state(rb: Any) -> dict[str, Any]:
    """Everything that a save may change."""
    return {
        "items": rb[:]["a"].tolist(),
        "other leaf": rb[:]["b", "c"].tolist(),
        "priorities": ring_of(rb).tree.priorities(ring_of(rb).live.committed()).tolist(),
        "cursor": ring_of(rb).cursor,
        "count": rb.write_count,
        "batch size": rb.batch_size,
        "generator": None if rb.generator is None else rb.generator.get_state().tolist(),
    }


def steps_until(work: Callable[[], object], at: int | None = None) -> list[str]:
    """Run ``work`` in a child that is killed at its ``at``-th step; the steps that it came to."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        passed = 0

        def step(name: str) -> None:
            nonlocal passed
            os.write(tell, f"{name},".encode())
            if passed == at:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

        status = 70
        try:
            publication._step = step
            work()
            status = 0
        finally:
            os._exit(status)
    os.close(tell)
    with os.fdopen(told) as said:
        names = said.read().split(",")[:-1]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (0 if at is None or len(names) <= at else -signal.SIGKILL)
    return names


def points(names: list[str]) -> list[int]:
    """The first and the last time that each step is passed."""
    return sorted(
        {names.index(name) for name in names}
        | {len(names) - 1 - names[::-1].index(name) for name in names}
    )


@pytest.fixture(params=["fresh", "replaced", "replaced without exchange", "beside foreign files"])
def path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Path]:
    """Makes the directory as it is before the save."""
    where = tmp_path / "runs" / "run"
    if request.param == "replaced without exchange":
        monkeypatch.setattr(publication, "exchange", lambda *_: False)

    def make() -> Path:
        shutil.rmtree(where.parent, ignore_errors=True)
        if request.param != "fresh":
            old().dumps(where)
        if request.param == "beside foreign files":
            (where / "model.pt").write_text("mine")
            (where / "storage" / "notes.txt").write_text("mine too")
        return where

    make.kind = request.param  # type: ignore[attr-defined]
    return make


def test_a_save_that_is_killed_at_any_step_leaves_a_whole_one(path: Callable[[], Path]) -> None:
    kind = path.kind  # type: ignore[attr-defined]
    saver, before, after = new(), state(old()), state(new())
    where = path()

    def save() -> None:
        saver.dumps(where)

    names = steps_until(save)
    within = kind not in ("fresh", "replaced")
    assert {"made", "written", "synced", "published"} <= set(names)
    assert ({"complete", "moved", "removed", "moved all"} <= set(names)) == within
    assert ("replaced" in names) != within
    for at in points(names):
        path()
        assert steps_until(save, at) == names[: at + 1]
        expected = after if names[at] in COUNTS else before
        loaded = buffer()
        if kind == "fresh" and expected is before:
            with pytest.raises(FileNotFoundError, match="no buffer was saved"):
                loaded.loads(where)
        else:
            loaded.loads(where)
            assert state(loaded) == expected, f"killed at {names[at]}"
        if kind == "beside foreign files":
            assert (where / "model.pt").read_text() == "mine"
            assert (where / "storage" / "notes.txt").read_text() == "mine too"
        # The next process saves as usual, and cleans up.
        saver.dumps(where)
        loaded = buffer()
        loaded.loads(where)
        assert state(loaded) == after
        assert os.listdir(where.parent) == ["run"]
        assert not [name for name in os.listdir(where) if name.startswith(".")]
        assert not (where / "rng_state").exists()


class Mortal(RandomSampler):
    """Is killed while it is saved, when the storage has been written already."""

    def dumps(self, path: Any) -> None:
        (path / "half").write_text("written")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_is_killed_half_written_leaves_the_one_before(tmp_path: Path) -> None:
    where = tmp_path / "run"
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend(items(0, 3))
    rb.dumps(where)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=Mortal())
    other.extend(items(50, 58))
    pid = os.fork()
    if not pid:
        other.dumps(where)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # its leftovers lie next to the save
    loaded = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    loaded.loads(where)
    assert loaded[:]["a"].tolist() == [0, 1, 2]
    rb.dumps(where)
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_in_place_that_is_killed_leaves_the_buffer_and_a_whole_description(
    tmp_path: Path,
) -> None:
    where = tmp_path / "run"

    def open_in_place() -> TensorDictPrioritizedReplayBuffer:
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=where / "storage", existsok=True)
        return buffer(storage, batch_size=2)

    def write_and_save() -> None:
        rb = open_in_place()
        rb.extend(items(100, 102))
        rb.dumps(where)

    def before() -> None:
        shutil.rmtree(where, ignore_errors=True)
        with open_in_place() as rb:
            rb.extend(items(0, 3))
            rb.dumps(where)

    before()
    names = steps_until(write_and_save)
    assert {"made", "written", "synced", "complete", "moved", "published"} <= set(names)
    for at in points(names):
        before()
        steps_until(write_and_save, at)
        with buffer(LazyMemmapStorage(CAPACITY, scratch_dir=where / "storage")) as loaded:
            loaded.loads(where)  # the live buffer counts, whatever was saved of it
            assert loaded[:]["a"].tolist() == [0, 1, 2, 100, 101]
            assert (loaded.write_count, ring_of(loaded).cursor) == (5, 5)
            assert engine_of(loaded).check().ok
            assert not (where / ".shmbuffer-save" / "complete.json").exists()
            loaded.dumps(where)
        assert sorted(os.listdir(where)) == [
            "buffer_metadata.json",
            "sampler",
            "shmbuffer.files.json",
            "storage",
            "writer",
        ]


@pytest.mark.full
def test_parts_that_are_saved_into_one_directory_are_whole_each(tmp_path: Path) -> None:
    saver, where = new(), tmp_path / "run"

    def before() -> None:
        shutil.rmtree(where, ignore_errors=True)
        for part in (old().storage, old().sampler, old().writer):
            part.dumps(where)

    def save() -> None:
        saver.sampler.dumps(where)

    before()
    names = steps_until(save)
    for at in points(names):
        before()
        steps_until(save, at)
        loaded = buffer()
        loaded.storage.loads(where)
        assert loaded[:]["a"].tolist() == [0, 1, 2]
        loaded.sampler.loads(where)
        found = ring_of(loaded).tree.priorities()[:3].tolist()
        whole = [10.0, 11.0, 12.0] if names[at] in COUNTS else [1.0, 2.0, 3.0]
        assert found == whole, names[at]
