"""Checkpoints of episode data store every observation once and restore all items in order."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferExistsError,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    SchemaMismatchError,
    TED2Flat,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.replay import programs
from tests.replay.conftest import MakeStorage
from tests.replay.episodes import Step, same, stream

pytestmark = pytest.mark.product(few=4)

CHECKPOINTERS = [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


@pytest.fixture(params=CHECKPOINTERS)
def checkpointer(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


def buffer(storage: Any, checkpointer: Any, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage, checkpointer=checkpointer(), batch_size=4, **options
    )


def write(rb: TensorDictReplayBuffer, data: TensorDict, size: int, dim: int = 0) -> None:
    for part in data.split(size, dim):
        rb.extend(part)


def items(rb: TensorDictReplayBuffer) -> TensorDict:
    return rb[:].exclude("index").clone()


@pytest.mark.product("make checkpointer", few=3)
@pytest.mark.parametrize("count", [1, 7, 10, 13, 20, 34])
def test_a_fresh_buffer_gets_every_item_in_its_place(
    make: MakeStorage, checkpointer: Callable[..., Any], count: int, tmp_path: Path
) -> None:
    rb = buffer(make(10), checkpointer)
    write(rb, stream(count, seed=count), 3)
    rb.dumps(tmp_path / "saved")
    other = buffer(make(10), checkpointer)
    other.loads(tmp_path / "saved")
    assert len(other) == len(rb) == min(count, 10)
    same(items(other), items(rb))
    assert other.write_count == rb.write_count == count
    more = stream(6, seed=99)
    for one in (rb, other):
        write(one, more, 2)
    same(items(other), items(rb))


@pytest.mark.product("make checkpointer", few=3)
@pytest.mark.parametrize("steps", [3, 5, 9])
def test_lanes_come_back(
    make: MakeStorage, checkpointer: Callable[..., Any], steps: int, tmp_path: Path
) -> None:
    rb = buffer(make(15, ndim=2), checkpointer)
    written = stream(steps, (3,), seed=steps).transpose(0, 1)  # [lanes, time], as collectors give
    write(rb, written, 1, dim=1)
    rb.dumps(tmp_path / "saved")
    other = buffer(make(15, ndim=2), checkpointer)
    other.loads(tmp_path / "saved")
    assert len(other) == min(15, 3 * steps)
    same(items(other), items(rb))
    if steps < 6:
        same(items(other), written.contiguous())


def test_a_learner_that_never_wrote_saves_where_trajectories_end(
    directory: MakeStorage, checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    collector = buffer(directory(10), checkpointer)
    write(collector, stream(14, seed=1, ends=0.0), 2)
    learner = buffer(directory(10), checkpointer)
    assert learner.sample().batch_size == (4,)
    learner.dumps(tmp_path / "saved")
    other = buffer(LazyTensorStorage(10), checkpointer)
    other.loads(tmp_path / "saved")
    same(items(other), items(collector))


@pytest.mark.product(few=1)
def test_items_of_two_collectors_are_not_mixed_up(
    directory: MakeStorage, checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    streams = [stream(12, seed=seed, ends=0.1) for seed in (1, 2)]
    collectors = [buffer(directory(20), checkpointer) for _ in streams]
    for step in range(12):
        for rb, data in zip(collectors, streams, strict=True):
            rb.extend(data[step : step + 1])
    collectors[0].dumps(tmp_path / "saved")
    other = buffer(LazyTensorStorage(20), checkpointer)
    other.loads(tmp_path / "saved")
    expected = torch.stack(streams, 1).reshape(24)
    found = items(other)
    same(torch.cat([found[4:], found[:4]]), expected[4:])


def test_priorities_come_back_with_the_items(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    def make() -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            eps=0.0,
            storage=LazyTensorStorage(10),
            checkpointer=checkpointer(),
        )

    rb, other = make(), make()
    rb.extend(stream(13, seed=3))
    priority = torch.zeros(10)
    priority[6] = 1.0
    rb.update_priority(torch.arange(10), priority)
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert other.sample(50)["index"].unique().tolist() == [6]
    assert torch.equal(other.sample(1)["action"], rb[6]["action"][None])


@pytest.mark.product(few=1)
def test_a_larger_buffer_takes_the_items_too(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    rb = buffer(LazyTensorStorage(10), checkpointer)
    data = stream(13, seed=4)
    rb.extend(data)
    rb.dumps(tmp_path / "saved")
    for storage in (LazyTensorStorage(25), LazyMemmapStorage(25)):
        fresh = buffer(storage, checkpointer)
        fresh.loads(tmp_path / "saved")
        same(items(fresh), data[3:])
    used = buffer(LazyTensorStorage(25), checkpointer)
    used.extend(stream(2, seed=5))
    used.loads(tmp_path / "saved")
    same(items(used), data[3:])


@pytest.mark.product(few=3)
def test_a_buffer_that_has_items_forgets_them(
    make: MakeStorage, checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    rb, other = (buffer(make(10), checkpointer) for _ in range(2))
    rb.extend(stream(4, seed=6))
    other.extend(stream(9, seed=7))
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    same(items(other), items(rb))


def test_names_of_flags_and_rewards_reach_the_hooks(tmp_path: Path) -> None:
    data = stream(8, seed=8)
    data["next", "gain"] = data["next", "reward"].clone()
    data["next", "won"] = data["next", "done"].clone()
    data["won"] = data["done"].clone()
    done_keys = ["done", "terminated", "truncated", "won"]
    for kind in CHECKPOINTERS:
        names = {"done_keys": done_keys, "reward_keys": ["reward", "gain"]}
        rb = buffer(LazyTensorStorage(8), lambda kind=kind, names=names: kind(**names))
        rb.extend(data)
        rb.dumps(tmp_path / kind.__name__)
        fresh = buffer(LazyTensorStorage(8), lambda kind=kind, names=names: kind(**names))
        fresh.loads(tmp_path / kind.__name__)
        same(items(fresh), data)
    files = {file.name for file in (tmp_path / "FlatStorageCheckpointer/storage").glob("*.memmap")}
    assert {"gain.memmap", "won.memmap"} < files


def test_the_files_hold_every_observation_once(tmp_path: Path) -> None:
    data = stream(13, seed=9)
    ends = int(data["next", "done"][3:-1].sum()) + 1
    rb = buffer(LazyTensorStorage(10), FlatStorageCheckpointer)
    rb.extend(data)
    rb.dumps(tmp_path / "flat")
    meta = json.loads((tmp_path / "flat/storage/meta.json").read_text())
    assert meta["observation"]["shape"] == [10 + ends, 4]
    assert meta["reward"]["shape"] == [10, 1]
    assert "next" not in meta
    rb = buffer(LazyTensorStorage(10), NestedStorageCheckpointer)
    rb.extend(data)
    rb.dumps(tmp_path / "nested")
    meta = json.loads((tmp_path / "nested/storage/meta.json").read_text())
    assert meta["observation"]["is_nested"] is True
    assert meta["observation"]["shape"][0] == ends
    rb = buffer(LazyTensorStorage(10), H5StorageCheckpointer)
    rb.extend(data)
    rb.dumps(tmp_path / "h5")
    with h5py.File(tmp_path / "h5/storage/checkpoint.h5") as file:
        groups = [name for name in file if name.startswith("traj_")]
        assert len(groups) == ends
        assert sum(len(file[name]["observation"]) for name in groups) == 10 + ends
        assert int(file["_len"][()]) == 10


def test_an_hdf5_file_has_the_name_and_the_options_that_were_given(tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        return buffer(
            LazyTensorStorage(10),
            lambda: H5StorageCheckpointer(
                checkpoint_file="items.h5",
                h5_kwargs={"compression": "gzip"},
                shift_key=("ring", "shift"),
                done_key=("next", "terminated"),
            ),
        )

    rb, other = make(), make()
    rb.extend(stream(7, seed=10))
    rb.dumps(tmp_path / "saved")
    with h5py.File(tmp_path / "saved/storage/items.h5") as file:
        assert file["traj_0/observation"].compression == "gzip"
        assert int(file["ring/shift"][()]) == 7
    other.loads(tmp_path / "saved")
    same(items(other), items(rb))


def test_a_storage_goes_to_one_file_where_the_path_says_so(tmp_path: Path) -> None:
    storage, other = LazyTensorStorage(10), LazyTensorStorage(10)
    for one in (storage, other):
        one.checkpointer = H5StorageCheckpointer()
    data = stream(13, seed=11)
    TensorDictReplayBuffer(storage=storage).extend(data)
    storage.dumps(tmp_path / "items.h5")
    assert [file for file in tmp_path.iterdir() if file.is_file()] == [tmp_path / "items.h5"]
    with h5py.File(tmp_path / "items.h5") as file:
        assert int(file["_len"][()]) == 10
    other.loads(tmp_path / "items.h5")
    assert len(other) == 10
    same(other.get(slice(None)).clone(), storage.get(slice(None)).clone())


@pytest.mark.product(few=1)
def test_saving_again_replaces_the_save(checkpointer: Callable[..., Any], tmp_path: Path) -> None:
    rb, other = (buffer(LazyTensorStorage(10), checkpointer) for _ in range(2))
    data = stream(17, seed=12)
    for part in data.split(4):
        rb.extend(part)
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
        same(items(other), items(rb))


def test_the_hooks_alone_do_the_same_on_any_buffer(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    rb.extend(stream(13, seed=13))
    rb.register_save_hook(TED2Flat())
    rb.dumps(tmp_path / "saved")
    other = buffer(LazyTensorStorage(10), FlatStorageCheckpointer)
    other.loads(tmp_path / "saved")
    same(items(other), items(rb))


def test_an_error_of_a_load_hook_names_the_save(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    rb = buffer(LazyTensorStorage(10), checkpointer)
    rb.extend(stream(5, seed=14))
    rb.dumps(tmp_path / "saved")

    def refusing(data: Any, out: Any) -> Any:
        raise error

    other = buffer(LazyTensorStorage(10), checkpointer)
    other.register_load_hook(refusing)
    for error in (ValueError("no such entry"), SchemaMismatchError("no such entry")):
        with pytest.raises(type(error), match=f"^{tmp_path}/saved/storage: no such entry$"):
            other.loads(tmp_path / "saved")


def test_an_hdf5_file_of_another_program_is_not_written_over(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(10), H5StorageCheckpointer)
    rb.extend(stream(5, seed=14))
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "checkpoint.h5").symlink_to(tmp_path / "precious")
    with pytest.raises(BufferExistsError, match=r"save/checkpoint\.h5: already exists"):
        H5StorageCheckpointer().dumps(rb.storage, tmp_path / "save")
    assert (tmp_path / "precious").read_text() == "mine"


def test_data_that_are_no_episodes_are_refused_and_the_last_save_stays(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    rb = buffer(LazyTensorStorage(10), checkpointer)
    rb.extend(stream(5, seed=14))
    rb.dumps(tmp_path / "saved")
    plain = buffer(LazyTensorStorage(10), checkpointer)
    plain.extend(TensorDict({"x": torch.arange(5)}, batch_size=[5]))
    with pytest.raises(ValueError, match=r"done_key=\('next', 'done'\).*no entry with.*have x"):
        plain.dumps(tmp_path / "saved")
    plain = buffer(LazyTensorStorage(10), checkpointer)
    plain.loads(tmp_path / "saved")
    same(items(plain), items(rb))


@pytest.mark.product(few=3)
def test_a_root_without_flags_stays_so_and_takes_the_next_write(
    make: MakeStorage, checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    data = stream(13, seed=15).exclude("done", "terminated", "truncated")
    rb, other = (buffer(make(10), checkpointer) for _ in range(2))
    rb.extend(data)
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    same(items(other), items(rb))
    other.extend(data[:3])
    assert len(other) == 10


def test_a_tensorclass_comes_back_as_its_class(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    data = Step.from_tensordict(
        stream(13, seed=16).exclude("camera", "collector", "terminated", "truncated")
    )
    rb, other = (buffer(LazyTensorStorage(10), checkpointer) for _ in range(2))
    rb.extend(data)
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert isinstance(rb[:], Step)
    assert isinstance(other[:], Step)
    same(other[:].to_tensordict(), rb[:].to_tensordict())


def test_the_live_files_of_a_storage_are_not_written_over(
    checkpointer: Callable[..., Any], tmp_path: Path
) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "saved/storage", shared_init=True)
    rb = buffer(storage, checkpointer)
    rb.extend(stream(13, seed=17))
    before = items(rb)
    with pytest.raises(RuntimeError, match=r"save to another directory"):
        rb.dumps(tmp_path / "saved")
    same(items(rb), before)
    rb.dumps(tmp_path / "elsewhere")
    storage.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(10), H5StorageCheckpointer)
    rb.extend(stream(5, seed=18))
    rb.dumps(tmp_path / "saved")
    (tmp_path / "saved/storage/checkpoint.h5").unlink()
    with pytest.raises(FileNotFoundError, match=r"storage/checkpoint\.h5: no such file"):
        rb.loads(tmp_path / "saved")
    assert len(rb) == 5


def test_without_h5py_the_error_says_what_to_install() -> None:
    # a forkserver process has not loaded shmbuffer
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=programs.make_checkpointers_without_h5py, args=(there,))
    process.start()
    there.close()
    assert "pip install shmbuffer[h5]" in here.recv()
    process.join(50)
    here.close()
