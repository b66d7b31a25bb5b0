"""A save is a buffer directory that can be attached to for reading, inspected and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuffer.numpy
from shmbuffer import (
    BufferExistsError,
    ConsumingSampler,
    FormatError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReadOnlyError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.memory import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.service.client import open_to_read
from tests.kit.rings import engine_of, ring_of


def items(first: int, stop: int) -> TensorDict:
    number = torch.arange(first, stop)
    obs = number[:, None] * torch.tensor([1.0, 0.5])
    return TensorDict({"number": number, "obs": obs}, [stop - first])


def saved(path: Path, count: int = 12) -> TensorDictPrioritizedReplayBuffer:
    """Saves a prioritized buffer of 8 slots in which item 4 has a different priority."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.4, storage=LazyTensorStorage(8), batch_size=4
    )
    rb.extend(items(0, count))
    rb.update_priority(torch.tensor([4]), torch.tensor([9.0]))
    rb.dumps(path, extra={"step": 7})
    return rb


def content_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("inner", ["", "storage"])
def test_a_save_is_sampled_and_updated_in_one_process_and_stays_as_it_is(
    tmp_path: Path, inner: str
) -> None:
    rb = saved(tmp_path)
    before = content_of(tmp_path)
    place = tmp_path / inner
    with attach(place, batch_size=50) as other, attach(place, batch_size=50) as third:
        assert type(other) is TensorDictPrioritizedReplayBuffer
        assert (other[:] == rb[:]).all()
        assert ring_of(other).tree.priorities().tolist() == ring_of(rb).tree.priorities().tolist()
        assert ring_of(other).tree.mass().tolist() == ring_of(rb).tree.mass().tolist()
        other.update_priority(torch.arange(8), torch.tensor([1.0] + 7 * [0.0]))
        assert other.sample()["number"].unique().tolist() == [8]
        assert third.sample()["number"].unique().numel() > 1
    for sampler in (SamplerWithoutReplacement(), ConsumingSampler()):
        with attach(place, batch_size=8, sampler=sampler) as other:
            assert sorted(other.sample()["number"].tolist()) == list(range(4, 12))
    assert content_of(tmp_path) == before


def test_every_write_to_a_save_raises_and_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    before = content_of(tmp_path)
    with attach(tmp_path) as rb:
        for write in (
            lambda: rb.extend(items(0, 2)),
            lambda: rb.add(items(0, 1)[0]),
            lambda: rb.storage.set(3, items(0, 1)[0]),
            lambda: rb.reserve(2),
        ):
            with pytest.raises(ReadOnlyError, match=r"storage: .*read.*on_existing='recover'"):
                write()
        assert len(rb) == 8
    with shmbuffer.numpy.attach(tmp_path, batch_size=4) as arrays:
        assert set(arrays.sample()["number"].tolist()) <= set(range(4, 12))
        with pytest.raises(ReadOnlyError, match="this save is open for reading only"):
            arrays.extend({"number": np.arange(1), "obs": np.zeros((1, 2), np.float32)})
    with pytest.raises(ReadOnlyError, match="which this call would change"):
        Engine.open(tmp_path / "storage", None)
    assert content_of(tmp_path) == before


def test_a_save_is_continued_in_and_is_a_live_buffer_then(tmp_path: Path) -> None:
    rb = saved(tmp_path)
    uuid = inspect(tmp_path)["uuid"]
    with attach(tmp_path, on_existing="recover") as one, attach(tmp_path) as other:
        assert (one[:] == rb[:]).all()
        assert ring_of(one).tree.priorities().tolist() == ring_of(rb).tree.priorities().tolist()
        assert one.extend(items(12, 14)).tolist() == rb.extend(items(12, 14)).tolist()
        assert (other[:] == rb[:]).all()
        assert engine_of(one).check().ok
        found = inspect(tmp_path)
        assert found["uuid"] != uuid
        assert "SAVE" not in found["flags"]
    assert TensorDict.load_memmap(tmp_path / "storage").batch_size == torch.Size([8])
    again = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.4, storage=LazyTensorStorage(8), batch_size=4
    )
    assert again.loads(tmp_path) == {"step": 7}  # the items of the live buffer
    assert (again[:] == rb[:]).all()


def test_a_save_is_inspected_checked_exported_and_counted(tmp_path: Path) -> None:
    saved(tmp_path)
    before = content_of(tmp_path)
    found = inspect(tmp_path)
    assert (found["needs_recovery"], found["clients"]) == (None, [])
    assert "SAVE" in found["flags"]
    report = check(tmp_path)
    assert (report.ok, report.items, report.alive) == (True, 8, False)
    opened, changed = open_to_read(tmp_path, timeout=1.0, on_progress=None)
    assert (len(opened), changed) == (8, None)
    opened.close()
    assert content_of(tmp_path) == before


def test_a_save_of_records_is_attached_to(tmp_path: Path) -> None:
    storage = LazyStackStorage(40, scratch_dir=tmp_path / "run", shared_init=True, max_bytes=2**14)
    with TensorDictReplayBuffer(storage=storage, batch_size=4) as rb:
        for number in range(60):  # until the byte ring has wrapped around
            rb.add(TensorDict({"number": torch.tensor(number), "x": torch.arange(number % 9)}))
        kept = sorted(int(one["number"]) for one in rb[:].unbind(0))
        rb.dumps(tmp_path / "save")
    with attach(tmp_path / "save", batch_size=1) as other:
        assert sorted(int(one["number"]) for one in other[:].unbind(0)) == kept
        assert int(other.sample()["number"]) in kept
        with pytest.raises(ReadOnlyError, match="this save is open for reading only"):
            other.add(TensorDict({"number": torch.tensor(0), "x": torch.arange(3)}))
    assert check(tmp_path / "save").ok
    with attach(tmp_path / "save", on_existing="recover") as continued:
        continued.add(TensorDict({"number": torch.tensor(60), "x": torch.arange(3)}))
        assert engine_of(continued).check().ok


def test_what_has_no_leaves_or_another_layout_is_refused_and_loads_is_named(tmp_path: Path) -> None:
    texts = ReplayBuffer(storage=ListStorage(4), batch_size=1)
    texts.extend(["a", "b"])
    texts.dumps(tmp_path / "texts")
    with pytest.raises(
        SchemaMismatchError, match=r"Python objects, which.*load the save with loads\(\)"
    ):
        attach(tmp_path / "texts", timeout=1.0)
    saved(tmp_path / "ours").dumps(tmp_path / "theirs", layout="torchrl")
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "storage"):
        with pytest.raises(FormatError, match=r"in TorchRL's layout.*load it .*with loads\(\)"):
            attach(path, timeout=1.0)


def test_a_handle_on_a_save_goes_to_no_other_process(tmp_path: Path) -> None:
    saved(tmp_path)
    with (
        attach(tmp_path) as rb,
        pytest.raises(RuntimeError, match="open for reading in this process only; attach to it"),
    ):
        rb.storage.open_engine.__reduce__()


@pytest.mark.parametrize("share_next", [False, True])
def test_a_save_of_a_save_has_the_same_items(tmp_path: Path, share_next: bool) -> None:
    obs = torch.arange(7)[:, None] * torch.ones(4)
    steps = TensorDict({"obs": obs[:-1], "next": {"obs": obs[1:]}}, [6])
    storage: Any = LazyMemmapStorage(8, scratch_dir=tmp_path / "run", share_next=share_next)
    with TensorDictReplayBuffer(storage=storage, batch_size=2) as rb:
        rb.extend(steps)
        rb.dumps(tmp_path / "one")
    with attach(tmp_path / "one") as one:
        one.dumps(tmp_path / "two")
    with attach(tmp_path / "two") as two:
        assert (two[:] == steps).all()
    assert (TensorDict.load_memmap(tmp_path / "two" / "storage") == steps).all()


def test_a_save_whose_control_file_is_damaged_is_not_saved_over(tmp_path: Path) -> None:
    rb = saved(tmp_path)
    (tmp_path / "storage" / layout.CONTROL).write_bytes(b"damaged")
    before = content_of(tmp_path)
    with pytest.raises(BufferExistsError, match=r"contains a damaged buffer or save \(.*another"):
        rb.dumps(tmp_path)
    assert content_of(tmp_path) == before
