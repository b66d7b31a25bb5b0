"""Exports are complete or absent, follow no links, and can be read by their target programs."""

from __future__ import annotations

import math
import os
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import EmptyBufferError, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.saves import parquet_file
from shmbuffer.saves.export import export
from tests.crash.harness import ended, fork

h5py = pytest.importorskip("h5py")
pq = pytest.importorskip("pyarrow.parquet")

KINDS = ["parquet", "hdf5", "tensordict"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def buffer(count: int = 10, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10, **options))
    rb.extend(rows(0, count))
    return rb


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"id": number, "next": {"obs": number[:, None] + torch.zeros(2)}}, [count])


def ids(path: Path, kind: str) -> list[int]:
    """Returns the numbers of the items in an export, read by the program that it is made for."""
    if kind == "parquet":
        return list(pq.read_table(path)["id"].to_pylist())
    if kind == "hdf5":
        with h5py.File(path) as file:
            assert len(file["next/obs"]) == len(file["id"])
            return list(file["id"][:].tolist())
    found = TensorDict.load_memmap(path)
    assert found.shape == found["next", "obs"].shape[:1]
    return list(found["id"].tolist())


@pytest.fixture
def overwriting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a callback after the first two items of an export were read."""
    in_order = parquet_file.in_order_of_age
    monkeypatch.setattr(parquet_file, "_BATCH_BYTES", 1)

    def after_two(call: Any) -> None:
        def slowly(*args: Any) -> Any:
            for at, tensors in enumerate(in_order(*args)):
                if at == 2:
                    call()
                yield tensors

        monkeypatch.setattr(parquet_file, "in_order_of_age", slowly)

    return after_two


@every_kind
def test_an_export_writes_through_no_link_that_others_have_planted(
    tmp_path: Path, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("file", "meta.json"):
        (victim / name).write_text("precious")
    places = tmp_path / "places"
    places.mkdir()
    guesses = (f".items.{os.getpid()}", f".items.{os.getpid()}.kept", f"items.{os.getpid()}")
    for guess in guesses:
        (places / guess).symlink_to(victim if kind == "tensordict" else victim / "file")
    assert export(buffer().storage, places / "items", kind) == 10
    assert ids(places / "items", kind) == list(range(10))
    assert {path.name: path.read_text() for path in victim.iterdir()} == {
        "file": "precious",
        "meta.json": "precious",
    }
    assert {path.name for path in places.iterdir()} == {"items", *guesses}
    assert all((places / guess).is_symlink() for guess in guesses)


@every_kind
def test_an_export_takes_no_directory_of_the_user(tmp_path: Path, kind: str) -> None:
    mine = tmp_path / f".items.{os.getpid()}"
    mine.mkdir()
    (mine / "file").write_text("precious")
    export(buffer().storage, tmp_path / "items", kind)
    assert (mine / "file").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"items", mine.name}


@every_kind
def test_users_outside_the_group_cannot_write_to_an_export(tmp_path: Path, kind: str) -> None:
    before = os.umask(0)
    try:
        export(buffer().storage, tmp_path / "items", kind)
    finally:
        os.umask(before)
    for path in (tmp_path / "items", *(tmp_path / "items").rglob("*")):
        assert not path.stat().st_mode & stat.S_IWOTH


@every_kind
def test_items_that_are_overwritten_meanwhile_are_left_out(
    tmp_path: Path, kind: str, overwriting: Any
) -> None:
    rb = buffer()
    overwriting(lambda: rb.extend(rows(10, 5)))
    assert export(rb.storage, tmp_path / "items", kind) == 8
    assert ids(tmp_path / "items", kind) == [0, 1, 2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", ["hdf5", "tensordict"])
def test_nothing_is_left_if_every_item_was_overwritten(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "in_order_of_age", lambda rows: iter(()))
    with pytest.raises(EmptyBufferError, match="items: all items were overwritten by other"):
        export(buffer().storage, tmp_path / "items", kind)
    assert not list(tmp_path.iterdir())


@every_kind
def test_an_export_that_is_killed_leaves_nothing_that_the_next_does_not_remove(
    tmp_path: Path, kind: str, overwriting: Any
) -> None:
    rb = buffer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_file, "in_order_of_age", parquet_file.in_order_of_age)
        overwriting(lambda: os.kill(os.getpid(), signal.SIGKILL))
        killed = fork(lambda: export(rb.storage, tmp_path / "items", kind) and None)
        assert ended(killed) == -signal.SIGKILL
    assert not (tmp_path / "items").exists()
    assert len(list(tmp_path.iterdir())) == 1
    export(rb.storage, tmp_path / "items", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["items"]


@pytest.mark.product(few=25)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 0)])
@pytest.mark.parametrize("kind", ["hdf5", "tensordict"])
def test_every_dtype_is_read_bit_for_bit_or_refused_by_name(
    tmp_path: Path, kind: str, dtype: str, shape: tuple[int, ...]
) -> None:
    torch_dtype, path = getattr(torch, dtype), tmp_path / "items"
    content = torch.randint(
        0,
        2 if dtype == "bool" else 60,
        (9 * math.prod(shape) * torch_dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    leaf = content.view(torch_dtype).view(9, *shape)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend(TensorDict({"x": leaf, "id": torch.arange(9)}, [9]))
    if not DTYPES[dtype].in_numpy and (kind == "hdf5" or dtype.startswith("float8")):
        with pytest.raises(
            TypeError,
            match=rf"items: 'x' is {dtype}, which \w+.* does not support; export it to Parq",
        ):
            export(rb.storage, path, kind)
        assert not list(tmp_path.iterdir())
        return
    export(rb.storage, path, kind)
    if kind == "hdf5":
        with h5py.File(path) as file:
            array = file["x"][...]
        assert (array.dtype, array.shape) == (leaf.numpy().dtype, (9, *shape))
        assert array.tobytes() == content.numpy().tobytes()
    else:
        found = TensorDict.load_memmap(path)["x"]
        assert (found.dtype, found.shape) == (torch_dtype, (9, *shape))
        assert found.contiguous().view(-1).view(torch.uint8).tolist() == content.tolist()


@pytest.mark.parametrize("kind", ["hdf5", "tensordict"])
def test_lanes_are_dimensions_of_an_export(tmp_path: Path, kind: str) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    rb.extend(rows(0, 40).reshape(4, 10))
    assert export(rb.storage, tmp_path / "items", kind) == 10
    if kind == "tensordict":
        assert (TensorDict.load_memmap(tmp_path / "items") == rb[:].transpose(0, 1)).all()
    else:
        with h5py.File(tmp_path / "items") as file:
            assert np.array_equal(file["id"][...], rb[:]["id"].T.numpy())


def test_a_single_tensor_is_a_dataset_of_hdf5(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(torch.arange(4))
    with pytest.raises(TypeError, match=r"a single tensor .* export the buffer to HDF5"):
        export(rb.storage, tmp_path / "items", "tensordict")
    export(rb.storage, tmp_path / "items", "hdf5")
    with h5py.File(tmp_path / "items") as file:
        assert file["data"][:].tolist() == [0, 1, 2, 3]
