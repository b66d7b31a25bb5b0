"""Names of leaves and columns that lead out of a directory are refused before any library call.

tensordict 0.12 uses a name as a path without a check. These tests would write to `outside` if it
were given one of these names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ReadOnlyStorage,
    SchemaMismatchError,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
    load_dataset,
)
from shmbuffer.saves.export import export
from tests.replay.test_publication import tree

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = ["/OUTSIDE/leaf", "../outside/leaf", "a/../../outside/leaf", "..", "x" * 250, "a\0b"]
names = pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory to which no test may write, which is checked at the end."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "meta.json").write_text("precious")
    yield outside
    assert not list(outside.iterdir())
    assert (tmp_path / "meta.json").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} <= {"outside", "meta.json", "inside"}


def inside(outside: Path) -> Path:
    (outside.parent / "inside").mkdir(exist_ok=True)
    return outside.parent / "inside"


def named(name: str, outside: Path) -> str:
    return name.replace("/OUTSIDE", str(outside))


def held(name: str, *above: str) -> TensorDictReplayBuffer:
    """Returns a buffer over the caller's tensors, which are not in files with these names."""
    key = (*above, name, "x")
    step = {"done": torch.ones(3, 1, dtype=torch.bool), "reward": torch.zeros(3, 1)}
    data = TensorDict({key: torch.arange(3.0), "next": step}, [3])
    return TensorDictReplayBuffer(storage=TensorStorage(data))


def _load_by_name(file: Path) -> Any:
    return load_dataset(f"parquet:{file}", root=file.parent / "cache")


@pytest.mark.parametrize("name", [name for name in NAMES if "\0" not in name], ids=range(5))
@pytest.mark.parametrize("load", [TensorDictReplayBuffer.from_parquet, _load_by_name])
def test_a_column_chooses_no_path(outside: Path, name: str, load: Callable[[Path], Any]) -> None:
    file, name = inside(outside) / "data.parquet", named(name, outside)
    pq.write_table(pa.table({"id": [1, 2, 3], name: [1.0, 2.0, 3.0]}), file)
    with pytest.raises(SchemaMismatchError) as raised:
        load(file)
    assert str(raised.value).startswith(f"{file}: column {name!r}: the key")
    assert str(raised.value).endswith("; rename it")
    assert not list(file.parent.glob("cache/**/*.memmap"))


@names
def test_what_a_file_of_ours_says_of_its_leaves_chooses_no_path(outside: Path, name: str) -> None:
    folder, name = inside(outside), named(name, outside)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(TensorDict({"leaf": torch.arange(3)}, [3]))
    rb.to_parquet(folder / "data.parquet")
    table = pq.read_table(folder / "data.parquet")
    metadata = table.schema.metadata[b"shmbuffer"].decode()
    form = metadata.replace('"leaf"', json.dumps(name)).replace(
        f'"kind": {json.dumps(name)}', '"kind": "leaf"'
    )
    pq.write_table(
        table.replace_schema_metadata({b"shmbuffer": form.encode()}), folder / "data.parquet"
    )
    with pytest.raises(SchemaMismatchError, match=r"data\.parquet: column .*; rename it"):
        TensorDictReplayBuffer.from_parquet(folder / "data.parquet")


@names
@pytest.mark.parametrize("kind", ["parquet", "hdf5", "tensordict"])
def test_a_leaf_that_is_exported_chooses_no_path(outside: Path, name: str, kind: str) -> None:
    pytest.importorskip("h5py")
    folder, name = inside(outside), named(name, outside)
    with pytest.raises(SchemaMismatchError, match=r"items: leaf .*: the key .*; rename it"):
        export(held(name).storage, folder / "items", kind)
    assert not list(folder.iterdir())


class _Hooked(TensorStorageCheckpointer):
    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        self._save_hooks = [hook]


@names
@pytest.mark.parametrize("way", ["plain", "flat", "h5", "hook"])
def test_a_leaf_that_is_saved_chooses_no_path(outside: Path, name: str, way: str) -> None:
    pytest.importorskip("h5py")
    folder, name = inside(outside), named(name, outside)
    rb = held(name, "a") if way != "hook" else held("fine")
    rb.storage.checkpointer = {
        "plain": TensorStorageCheckpointer,
        "flat": FlatStorageCheckpointer,
        "h5": H5StorageCheckpointer,
        "hook": lambda: _Hooked(
            lambda data, path: TensorDict({name: data["fine", "x"]}, data.shape)
        ),
    }[way]()
    with pytest.raises(SchemaMismatchError, match=r"the key .*; rename it"):
        rb.dumps(folder / "save")
    assert not (folder / "save").exists()


@pytest.mark.parametrize("name", ["..", "../outside", "/OUTSIDE"])
def test_a_data_set_in_files_is_read_from_its_directory_alone(outside: Path, name: str) -> None:
    folder, name = inside(outside), named(name, outside)
    TensorDict({"a": {"x": torch.arange(3)}}, [3]).memmap(folder / "data")
    meta = json.loads((folder / "data" / "meta.json").read_text())
    meta[name] = meta.pop("a")
    (folder / "data" / "meta.json").write_text(json.dumps(meta))
    before = tree(folder)
    with pytest.raises(SchemaMismatchError, match=r"data/meta\.json: leaf .* leads out of the dir"):
        ReadOnlyStorage(folder / "data")
    assert tree(folder) == before


def test_a_name_with_a_slash_that_stays_in_its_directory_is_a_name(outside: Path) -> None:
    folder = inside(outside)
    pq.write_table(pa.table({"walker/joints": [1.0, 2.0]}), folder / "data.parquet")
    rb = TensorDictReplayBuffer.from_parquet(folder / "data.parquet")
    rb.dumps(folder / "save")
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(2))
    again.loads(folder / "save")
    assert again[:]["walker/joints"].tolist() == [1.0, 2.0]
    export(rb.storage, folder / "items", "tensordict")
    assert [path.name for path in folder.glob("items/*.memmap")] == ["walker%2Fjoints.memmap"]


@pytest.mark.parametrize("name", ["/tmp/x.h5", "../x.h5", "a/x.h5", "..", ""])
def test_a_file_of_episodes_lies_in_the_directory_of_its_save(name: str) -> None:
    with pytest.raises(ValueError, match="must be a file name without folders"):
        H5StorageCheckpointer(checkpoint_file=name)
