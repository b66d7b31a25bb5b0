"""Every storage holds items by index; the place of the bytes makes no other difference."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SchemaMismatchError,
    Storage,
    TensorStorage,
)
from tests.kit.items import items
from tests.kit.rings import engine_of

pytestmark = pytest.mark.product(few=4)


def test_an_index_of_any_shape_gives_items_in_that_shape(make: Any) -> None:
    storage = make(10)
    storage.set(range(4), items(0, 4))
    found = storage.get(torch.tensor([[0, 1, 2], [3, 2, 1]]))
    assert found.batch_size == torch.Size([2, 3])
    assert found["b", "c"].shape == (2, 3, 3)
    mask = torch.tensor([True, False, False, True])
    assert storage.get(mask)["a"].tolist() == [0, 3]
    with pytest.raises(IndexError, match="mask"):
        storage.get(torch.tensor([True, False]))
    with pytest.raises(IndexError, match="not an index"):
        storage.get([0.5])


def test_an_unshared_item_may_be_changed_through_a_view(make_private: Any) -> None:
    storage = make_private(10)
    storage.set(range(4), items(0, 4))
    storage.get(1)["a"].fill_(100)
    storage.get(slice(2, 4))["a"].fill_(200)
    assert storage.get(slice(None))["a"].tolist() == [0, 100, 200, 200]


def test_views_of_a_memmap_storage_are_memory_mapped_tensors() -> None:
    storage = LazyMemmapStorage(10)
    storage.set(range(4), items(0, 4))
    assert type(storage.get(0)["a"]) is MemoryMappedTensor
    assert type(storage.get(slice(0, 2))["b", "c"]) is MemoryMappedTensor
    plain = LazyTensorStorage(10)
    plain.set(range(4), items(0, 4))
    assert type(plain.get(0)["a"]) is torch.Tensor


def test_the_file_of_an_entry_is_found_as_in_torchrls_tutorial(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "replay")
    rb = ReplayBuffer(storage=storage)
    rb.extend(items(0, 4))
    for key in ("a", ("b", "c")):
        entry = rb._storage._storage[key]
        assert Path(entry.filename).is_relative_to(tmp_path / "replay")
        assert Path(entry.filename).exists()
        assert torch.equal(entry[:4], items(0, 4)[key])
        public = TensorDict.load_memmap(tmp_path / "replay")[key]
        assert public.filename == entry.filename
    in_memory = LazyTensorStorage(10)
    in_memory.set(range(4), items(0, 4))
    assert (in_memory._storage == items(0, 4)).all()
    storage.close()


def test_a_new_key_adds_a_column_where_nobody_else_looks(make_private: Any) -> None:
    storage = make_private(10)
    storage.set(range(4), items(0, 4))
    more = items(0, 4).set("target", torch.arange(4) * 10)
    storage.set(range(4), more)
    storage.set(5, more[3])
    assert storage.get(slice(None))["target"].tolist() == [0, 10, 20, 30, 30]
    assert storage.get(slice(None))["a"].tolist() == [0, 1, 2, 3, 3]
    with pytest.raises(RuntimeError, match=r"only this process can access.*another process"):
        pickle.dumps(storage)


def test_a_new_key_is_refused_where_others_look(directory: Any) -> None:
    storage = directory(10)
    storage.set(range(4), items(0, 4))
    with pytest.raises(SchemaMismatchError, match="target"):
        storage.set(range(4), items(0, 4).set("target", torch.arange(4)))


def test_the_capacity_counts_elements_and_is_rounded_up_to_whole_slots(make: Any) -> None:
    storage = make(100, ndim=2)
    assert storage.max_size == 100
    storage.set(range(2), torch.zeros(2, 3))
    assert storage.max_size == 102
    assert storage.shape == torch.Size([34, 3])
    assert len(storage) == 6
    assert storage.get(0).shape == (3,)
    assert storage.flatten().shape == (6,)


def test_a_state_that_does_not_fit_is_refused(make: Any) -> None:
    storage = make(6)
    rb = ReplayBuffer(storage=storage)
    rb.extend(items(0, 8))
    state = storage.state_dict()
    assert state["_len"] == 6
    assert make(6).state_dict() == {"initialized": False, "_len": 0}
    with pytest.raises(ValueError, match="storage of"):
        make(5).load_state_dict(state)
    third = make(6)
    third.set(0, torch.zeros(3))
    with pytest.raises(SchemaMismatchError):
        third.load_state_dict(state)
    assert len(third) == 1


def test_the_storage_can_be_defined_before_anything_is_written(make: Any) -> None:
    storage = make(10)
    storage.define(items(0, 1)[0])
    assert storage.initialized
    assert len(storage) == 0
    storage.define(items(0, 3))
    with pytest.raises(SchemaMismatchError):
        storage.define(torch.zeros(3))
    storage.set(range(2), items(0, 2))
    assert len(storage) == 2


@pytest.mark.parametrize("cls", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_size_below_one_is_refused(cls: type[Storage]) -> None:
    with pytest.raises(ValueError, match="max_size"):
        cls(0)


def test_an_attached_sampler_hears_of_every_write(make: Any) -> None:
    heard = []

    class Ear:
        def mark_update(self, index: torch.Tensor) -> None:
            heard.append(index.tolist())

    storage, ear = make(4), Ear()
    storage.attach(ear)
    storage.attach(ear)
    storage.set(range(2), items(0, 2))
    rb = ReplayBuffer(storage=storage)
    rb.extend(items(0, 3))
    storage.detach(ear)
    rb.extend(items(0, 1))
    assert heard == [[0, 1], [0, 1, 2]]


# -- the caller's tensors --------------------------------------------------------------------------


def test_a_tensor_storage_with_lanes() -> None:
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(12).reshape(4, 3), ndim=2), batch_size=50)
    assert len(rb) == 12
    data, info = rb.sample(return_info=True)
    slots, lanes = info["index"]
    assert torch.equal(data, slots * 3 + lanes)


# -- a list ----------------------------------------------------------------------------------------


# -- files -----------------------------------------------------------------------------------------


def test_a_storage_in_a_directory_says_which(tmp_path: Path) -> None:
    with LazyBuffer(tmp_path / "items") as rb:
        assert repr(rb.storage).endswith(f", max_size=10, scratch_dir={str(tmp_path / 'items')!r})")
    assert "scratch_dir" not in repr(LazyMemmapStorage(10))


def LazyBuffer(path: Path, **options: Any) -> ReplayBuffer:  # noqa: N802 - a buffer's constructor
    return ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=path, **options), batch_size=2)


def test_existsok_takes_over_a_bare_tensordict_directory_as_empty(tmp_path: Path) -> None:
    items(0, 10).memmap(tmp_path)
    with LazyBuffer(tmp_path, existsok=True) as rb:
        assert len(rb) == 0
        rb.extend(items(50, 52))
        assert rb[:]["a"].tolist() == [50, 51]
    loaded = TensorDict.load_memmap(tmp_path)
    assert loaded["a"].tolist() == [50, 51, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_directory_of_another_size_is_refused(directory: Any) -> None:
    directory(10).set(range(2), items(0, 2))
    with pytest.raises(SchemaMismatchError, match="max_size 10"):
        directory(11)
    with pytest.raises(SchemaMismatchError, match="ndim 1"):
        directory(10, ndim=2)


def test_a_storage_pickles_to_its_path_and_opens_the_same_items(directory: Any) -> None:
    storage = directory(10)
    storage.set(range(4), items(0, 4))
    copied = pickle.dumps(storage)
    assert len(copied) < 2000
    other = pickle.loads(copied)
    assert other.scratch_dir == storage.scratch_dir
    storage.set(4, items(4, 5)[0])
    assert other.get(slice(None))["a"].tolist() == [0, 1, 2, 3, 4]
    other.close()


def test_shared_memory_of_a_tensor_storage_is_a_temporary_directory() -> None:
    storage = LazyTensorStorage(10, shared_init=True)
    path = engine_of(storage).path
    storage.set(range(2), items(0, 2))
    other = pickle.loads(pickle.dumps(storage))
    assert other.get(1)["a"] == 1
    other.close()
    assert path.is_dir()
    assert storage.cleanup() is True
    assert not path.exists()
    assert storage.cleanup() is False
    storage.close()


def test_cleanup_removes_our_files_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "notes.txt").write_text("keep")
    storage = LazyMemmapStorage(10, scratch_dir=path)
    assert storage.cleanup() is False
    storage.set(range(2), items(0, 2))
    assert storage.cleanup() is True
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    assert storage.cleanup() is False
    storage.close()


@pytest.mark.parametrize("owned", [True, False])
def test_cleanup_of_a_directory_removed_elsewhere_says_so(tmp_path: Path, owned: bool) -> None:
    """The storage used to report that it had removed the directory."""
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "mine", auto_cleanup=owned)
    storage.set(range(2), items(0, 2))
    shutil.rmtree(tmp_path / "mine")
    assert storage.cleanup() is False
    storage.close()


def test_anonymous_memory_has_nothing_to_clean_up(make_private: Any) -> None:
    storage = make_private(10)
    storage.set(range(2), items(0, 2))
    assert storage.cleanup() is False
    assert len(storage) == 2


def test_only_storages_with_a_directory_or_a_place_for_one_have_a_scratch_dir(
    tmp_path: Path,
) -> None:
    storage = LazyTensorStorage(10)
    for _ in range(2):  # before and after the first write
        assert not hasattr(storage, "scratch_dir")
        with pytest.raises(AttributeError, match="its items are in memory; use a LazyMemmapSt"):
            storage.scratch_dir  # noqa: B018
        storage.set(range(2), items(0, 2))
    assert LazyMemmapStorage(10).scratch_dir is None
    assert LazyMemmapStorage(10, scratch_dir=tmp_path / "rb").scratch_dir == tmp_path / "rb"
    shared = LazyTensorStorage(10, shared_init=True)
    shared.set(range(2), items(0, 2))
    assert shared.scratch_dir is not None
    shared.close()
