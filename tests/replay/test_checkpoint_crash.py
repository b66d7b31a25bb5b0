"""A process that is killed during a save leaves the earlier save or the new one, complete."""

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
    LazyStackStorage,
    LazyTensorStorage,
    RandomSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.saves import publication
from shmbuffer.saves.work_directory import MARK
from tests.crash.harness import is_killed_at, python_points
from tests.kit.programs import in_fork
from tests.kit.rings import engine_of, ring_of

pytestmark = pytest.mark.crash

CAPACITY = 6
COUNTS = {"exchanged", "replaced", "published"}
"""Steps after which the new save is the valid one."""


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
    """Returns everything that a save may change."""
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
    """Runs ``work`` in a child that is killed at its ``at``-th step; returns the steps reached."""
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
    """Returns the first and the last position at which each step occurs."""
    return sorted(
        {names.index(name) for name in names}
        | {len(names) - 1 - names[::-1].index(name) for name in names}
    )


@pytest.mark.product(few=4)
@pytest.mark.parametrize("layout", ["shmbuffer", "torchrl"])
@pytest.mark.parametrize("there", ["nothing", "a save", "a save, without exchange"])
def test_a_save_that_is_killed_at_any_step_leaves_a_whole_one(
    tmp_path: Path, layout: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "without" in there:
        monkeypatch.setattr(publication, "exchange", lambda *_: False)
    where, saver, before, after = tmp_path / "runs" / "run", new(), state(old()), state(new())

    def prepare() -> None:
        shutil.rmtree(where.parent, ignore_errors=True)
        if there != "nothing":
            old().dumps(where, layout=layout)
        if layout == "shmbuffer":
            where.mkdir(parents=True, exist_ok=True)
            (where / "model.pt").write_text("mine")

    def save() -> None:
        saver.dumps(where, layout=layout)

    prepare()
    names = steps_until(save)
    replaced = {"nothing": "replaced", "a save": "exchanged"}.get(there, "moved away")
    assert {"made", "written", "listed", "synced", replaced, "published"} <= set(names)
    for at in points(names):
        prepare()
        assert steps_until(save, at) == names[: at + 1]
        expected = after if names[at] in COUNTS else before
        loaded = buffer()
        if there == "nothing" and expected is before:
            with pytest.raises(FileNotFoundError, match="no buffer was saved"):
                loaded.loads(where)
        else:
            loaded.loads(where)
            assert state(loaded) == expected, f"killed at {names[at]}"
        # The next process saves normally and removes the leftovers.
        save()
        loaded = buffer()
        loaded.loads(where)
        assert state(loaded) == after
        assert os.listdir(where.parent) == ["run"]
        if layout == "shmbuffer":
            assert sorted(os.listdir(where)) == ["model.pt", "storage"]
        assert not list(where.rglob(f"*{MARK}"))


class Mortal(RandomSampler):
    """A sampler that kills the process while it is saved, after the storage has been written."""

    def dumps(self, path: Any) -> None:
        (path / "half").write_text("written")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_is_killed_half_written_leaves_the_one_before(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=Mortal())
    other.extend(items(50, 58))
    assert in_fork(lambda: other.dumps(tmp_path)) == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # the leftovers lie beside the save
    loaded = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    loaded.loads(tmp_path)
    assert loaded[:]["a"].tolist() == [0, 1, 2]
    rb.dumps(tmp_path)
    assert os.listdir(tmp_path) == ["storage"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_save_in_place_that_is_killed_leaves_the_buffer_and_whole_parts(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(publication, "exchange", lambda *_: False)
    where = tmp_path / "run"

    def open_in_place() -> TensorDictPrioritizedReplayBuffer:
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=where / "storage", existsok=True)
        return buffer(storage, batch_size=2)

    def write_and_save() -> None:
        rb = open_in_place()
        rb.extend(items(100, 102))
        rb.dumps(where, extra="now")

    def before() -> None:
        shutil.rmtree(where, ignore_errors=True)
        with open_in_place() as rb:
            rb.extend(items(0, 3))
            rb.dumps(where, extra="before")

    before()
    names = steps_until(write_and_save)
    for at in points(names):
        before()
        steps_until(write_and_save, at)
        with buffer(LazyMemmapStorage(CAPACITY, scratch_dir=where / "storage")) as loaded:
            extra = loaded.loads(where)  # the live buffer takes precedence over its save
            assert extra == ("now" if names[at] in COUNTS else "before"), names[at]
            assert loaded[:]["a"].tolist() == [0, 1, 2, 100, 101]
            assert (loaded.write_count, ring_of(loaded).cursor) == (5, 5)
            assert engine_of(loaded).check().ok
            loaded.dumps(where)
        assert os.listdir(where) == ["storage"]
        assert not list(where.rglob(f"*{MARK}"))


def records() -> Any:
    rb = TensorDictReplayBuffer(
        storage=LazyStackStorage(CAPACITY, max_bytes=2**14, shared_init=True)
    )
    rb.extend([TensorDict({"a": torch.tensor(n), "c": torch.ones(n)}) for n in range(1, 5)])
    return rb


SUPERBLOCK = ("superblock.half", "superblock.stored")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "records"])
def test_a_process_that_is_killed_while_it_continues_in_a_save_is_followed_by_the_next(
    tmp_path: Path, kind: str
) -> None:
    made = new() if kind == "rows" else records()
    held = [int(item["a"]) for item in made[:]]
    where, passed = tmp_path / "run", set()
    made.dumps(tmp_path / "saved")

    def recover() -> None:
        with attach(where, on_existing="recover"):
            pass

    for point in [*python_points("recover"), *SUPERBLOCK]:
        for passing in range(2):
            shutil.rmtree(where, ignore_errors=True)
            shutil.copytree(tmp_path / "saved", where)
            if not is_killed_at(point, passing, recover):
                break
            passed.add(point)
            with attach(where) as read:  # either a save, or a buffer that is not in use
                assert [int(item["a"]) for item in read[:]] == held, f"killed at {point}"
            with attach(where, on_existing="recover") as rb:
                assert [int(item["a"]) for item in rb[:]] == held, f"killed at {point}"
                assert engine_of(rb).check().ok
                rb.add(rb[0])
                assert rb.write_count == made.write_count + 1
    assert passed >= {"recover.reserved", "recover.state", "recover.superblock", *SUPERBLOCK}
