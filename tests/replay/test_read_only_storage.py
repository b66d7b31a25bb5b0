"""A read-only data set in files that all users map, with priorities beside it."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferExistsError,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    PriorityUpdate,
    ReadOnlyStorage,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TensorDictReplayBuffer,
)
from shmbuffer._native import _core
from tests.crash.harness import ended, fork, native_points
from tests.kit.rings import engine_of

ITEMS = 60


def items(count: int = ITEMS) -> TensorDict:
    number = torch.arange(count)
    step = TensorDict({"reward": number[:, None].float()}, [count])
    return TensorDict({"obs": number[:, None].expand(-1, 3).clone(), "next": step}, [count])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    items().memmap(tmp_path / "data")
    return tmp_path / "data"


def buffer(path: Path, **options: Any) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(ITEMS, 1.0, 1.0, eps=0.0)
    return TensorDictReplayBuffer(
        storage=ReadOnlyStorage(path, **options),
        sampler=sampler,
        writer=ImmutableDatasetWriter(),
        batch_size=400,
    )


def content_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


# -- what it opens ---------------------------------------------------------------------------------


def saved_tensordict(path: Path) -> None:
    items().memmap(path)


def saved_buffer(path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.extend(items())
    rb.dumps(path)


def saved_storage(path: Path) -> None:
    storage = LazyTensorStorage(ITEMS)
    storage.set(range(ITEMS), items())
    storage.dumps(path)


@pytest.mark.parametrize("save", [saved_tensordict, saved_buffer, saved_storage])
def test_it_has_the_items_of(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path / "data")
    rb = TensorDictReplayBuffer(storage=ReadOnlyStorage(tmp_path / "data"), batch_size=500)
    assert len(rb) == ITEMS
    assert (rb[:] == items()).all()
    sample = rb.sample()
    assert (sample.select("obs", "next") == items()[sample["index"]]).all()
    assert sample["index"].unique().tolist() == list(range(ITEMS))


def test_places_that_a_save_has_no_item_in_hold_none(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.storage.set([3, 5, 8], items()[[3, 5, 8]])
    rb.dumps(tmp_path / "data")
    found = TensorDictReplayBuffer(storage=ReadOnlyStorage(tmp_path / "data"), batch_size=90)
    assert len(found) == 3
    assert found.sample()["index"].unique().tolist() == [3, 5, 8]
    with pytest.raises(IndexError):
        found[4]


def test_it_is_a_tensor_or_a_tree_where_that_was_saved(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"a": torch.arange(4), "b": (torch.zeros(4, 2),)})
    rb.dumps(tmp_path / "data")
    found = ReplayBuffer(storage=ReadOnlyStorage(tmp_path / "data"))[:]
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert found["b"][0].shape == (4, 2)


def test_several_dimensions_are_sampled_and_cut_into_slices(tmp_path: Path) -> None:
    lanes = items().reshape(20, 3)
    lanes["next", "end"] = torch.zeros(20, 3, 1, dtype=torch.bool)
    lanes.memmap(tmp_path / "data")
    storage = ReadOnlyStorage(tmp_path / "data", ndim=2)
    assert storage.max_size == ITEMS
    rb = TensorDictReplayBuffer(
        storage=storage, sampler=SliceSampler(slice_len=4, end_key=("next", "end"))
    )
    sample = rb.sample(200)
    assert torch.equal(sample["obs"][:, 0], (sample["index"] * torch.tensor([3, 1])).sum(1))
    steps = sample["obs"][:, 0].view(-1, 4)
    assert (steps.diff(dim=1) == 3).all()
    assert len(steps[:, 0].unique()) > 20


def test_the_directory_of_a_living_buffer_is_refused(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "buffer")
    storage.set(range(4), items(4))
    with pytest.raises(
        BufferExistsError,
        match=r"buffer: .*call attach\(\) to use it, or open a save of it",
    ):
        ReadOnlyStorage(tmp_path / "buffer")


def test_a_directory_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"contains no data set .*memory-mapped TensorDict"):
        ReadOnlyStorage(tmp_path)


# -- no write reaches it ---------------------------------------------------------------------------


@pytest.mark.product(few=6)
@pytest.mark.parametrize(
    "change",
    [
        lambda rb: rb.extend(items(2)),
        lambda rb: rb.add(items(1)[0]),
        lambda rb: rb.empty(),
        lambda rb: rb.set_at_("obs", 0, 3),
        lambda rb: rb.set_("obs", 0),
        lambda rb: rb.__setitem__(3, items(1)[0]),
        lambda rb: rb.__setitem__("new", torch.zeros(ITEMS)),
        lambda rb: rb.write_all(items()),
        lambda rb: rb.storage.set(3, items(1)[0]),
        lambda rb: rb.storage.append(items(2)),
        lambda rb: rb.update_if_present(
            index=torch.tensor([3]), generation=rb.storage.tickets(torch.tensor([3])), patch={}
        ),
    ],
)
@pytest.mark.parametrize("writer", [ImmutableDatasetWriter, None])
def test_a_change_is_refused_and_the_files_stay_as_they_are(
    data: Path, change: Callable[[Any], object], writer: Any
) -> None:
    before = content_of(data)
    rb = TensorDictReplayBuffer(storage=ReadOnlyStorage(data), writer=writer and writer())
    with pytest.raises(RuntimeError, match=r"data set"):
        change(rb)
    assert (rb[:] == items()).all()
    assert content_of(data) == before


@pytest.mark.parametrize("ensemble", [False, True])
@pytest.mark.parametrize("part", ["", "storage"])
def test_a_save_does_not_take_the_place_of_the_data_set(
    tmp_path: Path, part: str, ensemble: bool
) -> None:
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    source.extend(items())
    source.dumps(tmp_path / "save")
    before = content_of(tmp_path / "save")
    rb: Any = buffer(tmp_path / "save" / part)
    if ensemble:
        rb = OfflineToOnlineReplayBuffer(rb, online_storage=LazyTensorStorage(4), batch_size=4)
    for dumps, path in ((rb.dumps, "save"), (rb.storage.dumps, "save/storage")):
        with pytest.raises(RuntimeError, match="contains the data set"):
            dumps(tmp_path / path)
    assert content_of(tmp_path / "save") == before
    rb.dumps(tmp_path / "elsewhere")


def test_a_store_into_a_view_reaches_neither_the_files_nor_another_reader(data: Path) -> None:
    before = content_of(data)
    one, other = buffer(data), buffer(data)
    one[:]["obs"].fill_(-1)
    assert (other[:] == items()).all()
    assert content_of(data) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_who_may_only_read_the_files_uses_them(data: Path) -> None:
    for path in [data, *data.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o444)
    for above in [*data.parents][:-1]:
        if above.stat().st_mode & 0o077 == 0:
            above.chmod(0o755)

    def body() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert (buffer(data)[:] == items()).all()

    assert ended(fork(body)) == 0


def test_the_pages_of_the_files_are_in_memory_once(data: Path, tmp_path: Path) -> None:
    large = TensorDict({"obs": torch.arange(2**20)}, [2**20])
    large.memmap(tmp_path / "large")
    storages = [ReadOnlyStorage(tmp_path / "large") for _ in range(3)]
    for storage in storages:
        assert int(storage[:]["obs"].sum()) == 2**19 * (2**20 - 1)
    assert private_bytes(tmp_path / "large" / "obs.memmap") == 0


def private_bytes(file: Path) -> int:
    """Returns the bytes that this process has copied on write in its maps of a file."""
    private, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            inside = rest[-1] == str(file)
        elif inside and name == "Anonymous:":
            private += int(rest[0]) * 1024
    return private


# -- its priorities --------------------------------------------------------------------------------


def test_rows_come_as_often_as_their_priorities_say(data: Path) -> None:
    rb = buffer(data)
    rb.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    assert rb.update_priority([5, 7], [1.0, 3.0]) == PriorityUpdate(2, 0)
    counts = torch.zeros(ITEMS)
    for _ in range(50):
        sample = rb.sample()
        counts += torch.bincount(sample["index"], minlength=ITEMS)
        assert torch.equal(sample["_weight"], torch.where(sample["index"] == 5, 1.0, 1 / 3))
    assert counts[5] + counts[7] == 20_000
    assert abs(counts[7] / 20_000 - 0.75) < 4 * (0.75 * 0.25 / 20_000) ** 0.5


def test_without_a_directory_each_opener_has_a_table_of_its_own(data: Path) -> None:
    one, other = buffer(data), buffer(data)
    one.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    one.update_priority(7, 1.0)
    assert one.sample()["index"].unique().tolist() == [7]
    assert len(other.sample()["index"].unique()) == ITEMS


def test_openers_of_one_directory_of_priorities_have_one_table(data: Path, tmp_path: Path) -> None:
    one, other = (buffer(data, priorities=tmp_path / "table") for _ in range(2))
    one.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    other.update_priority(7, 1.0)
    sample = one.sample()
    assert sample["index"].unique().tolist() == [7]
    assert other.update_tensordict_priority(
        sample.set("td_error", torch.ones(400))
    ) == PriorityUpdate(400, 0)


def test_the_table_is_there_when_everybody_was_killed(data: Path, tmp_path: Path) -> None:
    def learns() -> None:
        rb = buffer(data, priorities=tmp_path / "table")
        rb.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
        rb.update_priority(7, 1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(learns)) == -signal.SIGKILL
    assert buffer(data, priorities=tmp_path / "table").sample()["index"].unique().tolist() == [7]


@pytest.mark.product(few=10)
@pytest.mark.crash
@pytest.mark.parametrize("point", native_points("write"))
def test_who_dies_while_it_makes_the_table_leaves_it_to_the_next(
    data: Path, tmp_path: Path, point: str
) -> None:
    table = tmp_path / "table"

    def begins() -> None:
        _core.arm(point, after=ITEMS // 2 if point in ("write.mark", "write.commit") else 0)
        buffer(data, priorities=table)
        _core.disarm()

    assert ended(fork(begins)) in (0, -signal.SIGKILL)
    rb = buffer(data, priorities=table)
    assert len(rb) == ITEMS
    assert rb.sample()["index"].unique().tolist() == list(range(ITEMS))
    assert engine_of(rb).check().ok


def test_the_table_of_a_data_set_of_another_size_is_refused(data: Path, tmp_path: Path) -> None:
    buffer(data, priorities=tmp_path / "table")
    items(10).memmap(tmp_path / "short")
    with pytest.raises(
        SchemaMismatchError, match=r"has max_size 60.*but this storage was created with max_size 10"
    ):
        buffer(tmp_path / "short", priorities=tmp_path / "table")


def test_it_goes_to_another_process_with_its_table(data: Path, tmp_path: Path) -> None:
    rb = buffer(data, priorities=tmp_path / "table")
    rb.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    rb.update_priority(7, 1.0)
    again = pickle.loads(pickle.dumps(rb))
    assert again.sample()["index"].unique().tolist() == [7]
    assert (again[:] == items()).all()


# -- saves -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(data: Path, tmp_path: Path) -> Path:
    rb = buffer(data)
    rb.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    rb.update_priority(7, 1.0)
    rb.dumps(tmp_path / "save")
    return tmp_path / "save"


def test_a_save_has_the_priorities_and_no_item(data: Path, saved: Path) -> None:
    assert not [name for name in content_of(saved) if "obs" in name]
    rb = buffer(data)
    rb.loads(saved)
    assert rb.sample()["index"].unique().tolist() == [7]


def test_a_save_beside_another_data_set_is_refused(tmp_path: Path, saved: Path) -> None:
    items(10).memmap(tmp_path / "short")
    rb = buffer(tmp_path / "short")
    with pytest.raises(ValueError, match=r"of 60 items, but this storage has the data set"):
        rb.loads(saved)
    assert len(rb.sample()["index"].unique()) == 10


def test_a_state_has_the_priorities_and_no_item(data: Path) -> None:
    rb, other = buffer(data), buffer(data)
    rb.update_priority(torch.arange(ITEMS), torch.zeros(ITEMS))
    rb.update_priority(7, 1.0)
    state = rb.state_dict()
    assert state["_storage"]["path"] == str(data)
    other.load_state_dict(state)
    assert other.sample()["index"].unique().tolist() == [7]
