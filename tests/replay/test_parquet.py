"""Items as columns of a Parquet file: bit for bit, one column for each leaf, complete or absent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    FormatError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    UnsafePathError,
    load_dataset,
)
from shmbuffer.extras import MissingExtra
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.saves import parquet_file
from tests.crash.harness import ended, fork
from tests.kit.items import Transition

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ITEMS = 30


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    step = {"obs": number[:, None] + torch.zeros(3), "done": number[:, None] % 3 == 0}
    return TensorDict(
        {
            "obs": number[:, None] + torch.zeros(3),
            "frame": (number[:, None, None] + torch.arange(12).view(3, 4)).to(torch.uint8),
            "id": number,
            "next": TensorDict(step, [count]),
        },
        [count],
    )


def buffer(capacity: int = ITEMS, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, **options))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


# -- out and in ------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    assert rb.to_parquet(tmp_path / "x.parquet") == ITEMS
    again = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet", batch_size=7)
    assert (again[:] == rb[:]).all()
    assert {key: leaf.dtype for key, leaf in again[:].items(True, True)} == {
        key: leaf.dtype for key, leaf in rb[:].items(True, True)
    }
    assert len(again.sample()) == 7


@pytest.mark.product(few=25)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (4, 0)])
def test_every_dtype_comes_back_bit_for_bit(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * 9
    random = torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8)
    if dtype == "bool":
        random %= 2
    leaf = random.view(kind).view(9, *shape)
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend({"x": leaf, "id": torch.arange(9)})
    rb.to_parquet(tmp_path / "x.parquet")
    again = ReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]["x"]
    assert (again.dtype, again.shape) == (kind, (9, *shape))
    assert bits(again) == bits(leaf)


def test_a_single_item_is_written_whatever_its_dtype(tmp_path: Path) -> None:
    leaf = torch.tensor([1 + 2j])
    rb = buffer()
    rb.extend(TensorDict({"x": leaf}, [1]))
    assert rb[:]["x"].view(torch.float32).tolist() == [1.0, 2.0]
    rb.to_parquet(tmp_path / "x.parquet")
    assert torch.equal(TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]["x"], leaf)


def test_a_column_is_what_other_programs_read(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert {field.name: str(field.type) for field in table.schema} == {
        "frame": "fixed_size_binary[12]",
        "id": "int64",
        "next.done": "bool",
        "next.obs": "fixed_size_list<element: float not null>[3]",
        "obs": "fixed_size_list<element: float not null>[3]",
    }
    assert table["id"].to_pylist() == list(range(ITEMS))
    assert table["obs"][7].as_py() == [7.0, 7.0, 7.0]
    assert table["next.done"].to_pylist() == [number % 3 == 0 for number in range(ITEMS)]


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(ITEMS).view(ITEMS, 1).expand(-1, 2).clone(),
        (torch.arange(ITEMS), {"a": [torch.zeros(ITEMS, 2)]}),
        Transition(torch.rand(ITEMS, 3), torch.arange(ITEMS), batch_size=[ITEMS]),
    ],
    ids=["tensor", "tree", "tensorclass"],
)
def test_an_item_keeps_its_form(tmp_path: Path, data: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.extend(data)
    rb.to_parquet(tmp_path / "x.parquet")
    again = ReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]
    assert type(again) is type(rb[:])
    torch.testing.assert_close(
        torch.utils._pytree.tree_leaves(again), torch.utils._pytree.tree_leaves(rb[:])
    )


def test_lanes_are_part_of_a_row(tmp_path: Path) -> None:
    rb = buffer(40, ndim=2)
    rb.extend(rows(0, 40).reshape(4, 10))
    assert rb.to_parquet(tmp_path / "x.parquet") == 10
    again = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")
    assert again.storage.ndim == 2
    assert torch.equal(again[:]["id"], rb[:]["id"])


def test_a_ring_that_went_round_is_written_from_the_oldest_item_on(tmp_path: Path) -> None:
    rb = buffer(10)
    rb.extend(rows(0, 8))
    rb.extend(rows(8, 6))
    rb.to_parquet(tmp_path / "x.parquet")
    again = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")
    assert again[:]["id"].tolist() == list(range(4, 14))


def test_places_without_an_item_are_left_out(tmp_path: Path) -> None:
    rb = buffer(10)
    rb.storage.set([1, 4, 7], rows(0, 3))
    assert rb.to_parquet(tmp_path / "x.parquet") == 3
    assert TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]["id"].tolist() == [
        0,
        1,
        2,
    ]


def test_an_item_that_is_written_over_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = buffer(10)
    rb.extend(rows(0, 10))
    monkeypatch.setattr(parquet_file, "_BATCH_BYTES", 1)
    in_order = parquet_file.in_order_of_age

    def slowly(*args: Any) -> Any:
        for at, tensors in enumerate(in_order(*args)):
            if at == 2:
                rb.extend(rows(10, 5))
            yield tensors

    monkeypatch.setattr(parquet_file, "in_order_of_age", slowly)
    assert rb.to_parquet(tmp_path / "x.parquet") == 8
    again = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")
    assert again[:]["id"].tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


def test_batches_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    monkeypatch.setattr(parquet_file, "_BATCH_BYTES", 7 * 45)
    rb.to_parquet(tmp_path / "x.parquet")
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [
        7,
        7,
        7,
        7,
        2,
    ]
    assert (TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:] == rb[:]).all()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4", "snappy"])
def test_it_can_be_compressed(tmp_path: Path, compression: str) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet", compression=compression)
    group = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0)
    assert group.column(0).compression == compression.upper().replace("NONE", "UNCOMPRESSED")
    assert (TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:] == rb[:]).all()


@pytest.mark.parametrize(
    "storage",
    [
        lambda path: LazyMemmapStorage(40, scratch_dir=path),
        lambda path: lambda count: LazyMemmapStorage(count, scratch_dir=path),
    ],
)
def test_it_is_read_into_any_storage(tmp_path: Path, storage: Callable[[Path], Any]) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    again = TensorDictPrioritizedReplayBuffer.from_parquet(
        tmp_path / "x.parquet", storage=storage(tmp_path / "buffer"), alpha=0.6, beta=0.4
    )
    assert (again[:] == rb[:]).all()
    assert again.shared
    again.close()


# -- files of other programs -----------------------------------------------------------------------


def test_lists_structs_and_numbers_of_another_program_become_items(tmp_path: Path) -> None:
    flat = pa.array(np.arange(24, dtype=np.float64))
    table = pa.table(
        {
            "obs": pa.FixedSizeListArray.from_arrays(flat, 4),
            "grid": pa.FixedSizeListArray.from_arrays(
                pa.FixedSizeListArray.from_arrays(flat, 2), 2
            ),
            "next": pa.StructArray.from_arrays(
                [pa.array([1.0] * 6, pa.float32()), pa.array([True, False] * 3)], ["reward", "done"]
            ),
            "next.obs": pa.array(range(6), pa.int8()),
            "raw": pa.array([b"ab"] * 6, pa.binary(2)),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4)
    data = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]
    assert torch.equal(data["obs"], torch.arange(24.0, dtype=torch.float64).view(6, 4))
    assert torch.equal(data["grid"], torch.arange(24.0, dtype=torch.float64).view(6, 2, 2))
    assert data["next", "reward"].tolist() == [1.0] * 6
    assert data["next", "done"].tolist() == [True, False] * 3
    assert data["next", "obs"].tolist() == list(range(6))
    assert data["raw"].tolist() == [[97, 98]] * 6


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a", "b"]), r"column 'x' has the type string, which is not supported"),
        (pa.array([["a"], ["b"]]), r"column 'x' has the type list<.*, which is not supported"),
        (pa.array([[1], [1, 2]]), r"column 'x' has a list of 2 in row 1, but the .* has 1\."),
        (pa.array([[], [1], [1]]), r"column 'x' has a list of 1 in row 1, but the .* has 0\."),
        (
            pa.array([[[1], [2]], [[3], []]]),
            r"column 'x' has a list of 0 in row 1, but the .* has 1\.",
        ),
        (pa.array([None, [1]]), r"column 'x' has 1 rows without a value"),
        (pa.array([[1], None]), r"column 'x' has 1 rows without a value"),
        (pa.array([[1], [None]]), r"column 'x' has 1 rows without a value"),
        (pa.array([1, None]), r"column 'x' has 1 rows without a value"),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), r"column 'x' has 1 rows without"),
        (pa.array([[1, None], [1, 2]], pa.list_(pa.int64(), 2)), r"column 'x' has 1 rows without"),
    ],
)
def test_a_column_that_is_no_part_of_an_item_is_named(
    tmp_path: Path, column: Any, said: str
) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    with pytest.raises(SchemaMismatchError, match=rf"x\.parquet: {said}"):
        TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_one_length_are_the_shape_of_an_entry(tmp_path: Path, kind: Any) -> None:
    number = torch.arange(24.0, dtype=torch.float64)
    table = pa.table(
        {
            "observation.state": pa.array(number.view(8, 3).tolist(), kind(pa.float64())),
            "image": pa.array(number.view(8, 3, 1).tolist(), kind(kind(pa.uint8()))),
            "none": pa.array([[]] * 8, kind(pa.int32())),
            "id": range(8),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    data = TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:]
    assert torch.equal(data["observation", "state"], number.view(8, 3))
    assert torch.equal(data["image"], number.view(8, 3, 1).to(torch.uint8))
    assert (data["none"].shape, data["none"].dtype) == ((8, 0), torch.int32)
    assert data["id"].tolist() == list(range(8))


def test_the_row_of_a_list_of_another_length_is_counted_from_the_start_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "_BATCH_BYTES", 1)
    for part, lengths in enumerate([[2, 2], [2, 2, 2, 3]]):
        column = pa.array([[0] * length for length in lengths])
        pq.write_table(pa.table({"x": column}), tmp_path / f"{part}.parquet")
    with pytest.raises(
        SchemaMismatchError, match=r"1\.parquet: column 'x' has a list of 3 in row 3"
    ):
        TensorDictReplayBuffer.from_parquet(tmp_path)


def test_a_name_that_a_sample_uses_is_refused_and_can_be_changed(tmp_path: Path) -> None:
    file, columns = tmp_path / "x.parquet", ("index", "_weight", "priority_weight", "index_lease")
    names = {name: f"stored_{name.lstrip('_')}" for name in columns}
    for name, new in names.items():
        pq.write_table(pa.table({"x": [0.5, 1.5], name: [100, 101]}), file)
        said = rf"x\.parquet: column '{name}': a sample .* rename=\{{'{name}': '{new}'\}}"
        with pytest.raises(SchemaMismatchError, match=said):
            TensorDictReplayBuffer.from_parquet(file)
        with pytest.raises(SchemaMismatchError, match=said):
            load_dataset(f"parquet:{file}", root=tmp_path / "root")
        read = TensorDictReplayBuffer.from_parquet(file, rename={name: new}, batch_size=2)
        assert read[:][new].tolist() == [100, 101]
        assert set(read.sample()[new].tolist()) <= {100, 101}
    pq.write_table(pa.table({"x": [0.5], "index.of": [1]}), file)
    with pytest.raises(
        SchemaMismatchError, match=r"column 'index\.of': a sample already has an entry 'index'"
    ):
        TensorDictReplayBuffer.from_parquet(file)


def test_a_data_set_is_converted_for_each_renaming(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "index": [7], "c": [3]}), tmp_path / "x.parquet")
    name, root = f"parquet:{tmp_path / 'x.parquet'}", tmp_path / "root"
    for new in ({"index": "at"}, {"index": "at", "a": "c", "c": "a"}, {"index": "next.at"}):
        data = load_dataset(name, root=root, rename=new)[:]
        key = tuple(new["index"].split("."))
        assert (data[key].item(), data[new.get("a", "a")].item()) == (7, 1)


def test_a_renaming_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1], "b": [2]}), file)
    read = TensorDictReplayBuffer.from_parquet
    with pytest.raises(ValueError, match=r"rename= contains the column 'z', but the file has"):
        read(file, rename={"z": "y"})
    with pytest.raises(SchemaMismatchError, match=r"x\.parquet: column 'b' occurs twice"):
        read(file, rename={"a": "b"})
    with pytest.raises(SchemaMismatchError, match=r"x\.parquet: column '\.\./a': .* leads out"):
        read(file, rename={"a": "../a"})
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(file)
    with pytest.raises(ValueError, match=r"x\.parquet: was written by to_parquet.* pass rename="):
        read(file, rename={"id": "a"})
    with pytest.raises(ValueError, match="rename= is only supported for the columns of Parquet"):
        load_dataset(tmp_path, rename={"id": "a"})


def test_columns_of_which_one_would_lie_in_the_other_are_named(tmp_path: Path) -> None:
    columns = {"action": [1.0], "action.joint": [2.0]}
    for table in (pa.table(columns), pa.table(dict(reversed(columns.items())))):
        pq.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(SchemaMismatchError, match=r"'action' is a tensor, but 'action\.joint'"):
            TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")
        read = TensorDictReplayBuffer.from_parquet(
            tmp_path / "x.parquet", rename={"action": "action.all"}
        )
        assert read[:]["action", "all"].tolist() == [1.0]


# -- folders of part files -------------------------------------------------------------------------


def write_parts(folder: Path, names: Sequence[str]) -> None:
    """Writes two items into each part file, numbered in the order of ``names``."""
    for at, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [2 * at, 2 * at + 1]}), folder / name)


def test_the_part_files_of_a_folder_are_one_data_set_in_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    write_parts(data, [f"chunk-{at // 4:03}/part.{at}.parquet" for at in range(12)])
    for ignored in (".part.crc.parquet", "_metadata.parquet", "_temporary/0/x.parquet", "notes"):
        (data / ignored).parent.mkdir(parents=True, exist_ok=True)
        (data / ignored).write_text("no Parquet")
    assert TensorDictReplayBuffer.from_parquet(data)[:]["x"].tolist() == list(range(24))
    first = load_dataset(f"parquet:{data}", root=tmp_path / "root")
    assert first[:]["x"].tolist() == list(range(24))
    pq.write_table(pa.table({"x": [24]}), data / "chunk-002" / "part.12.parquet")
    second = load_dataset(f"parquet:{data}", root=tmp_path / "root")
    assert second[:]["x"].tolist() == list(range(25))


def test_digits_that_are_no_numbers_are_names_like_others(tmp_path: Path) -> None:
    write_parts(tmp_path, ["m²/part.0.parquet", "m²/part.9.parquet", "m²/part.10.parquet"])
    write_parts(tmp_path, ["m²/²7²/part.11.parquet"])
    read = TensorDictReplayBuffer.from_parquet(tmp_path / "m²")
    assert sorted(read[:]["x"].tolist()) == [0, 0, 1, 1, 2, 3, 4, 5]


def test_a_part_file_without_rows_has_no_items(tmp_path: Path) -> None:
    for at, items in enumerate([[], [[1, 2], [3, 4]], []]):
        column = pa.array(items, pa.list_(pa.int64()))
        pq.write_table(pa.table({"x": column}), tmp_path / f"{at}.parquet")
    assert TensorDictReplayBuffer.from_parquet(tmp_path)[:]["x"].tolist() == [[1, 2], [3, 4]]


def test_what_we_wrote_in_parts_is_read_in_its_form(tmp_path: Path) -> None:
    rb = buffer()
    for at in range(2):
        rb.empty()
        rb.extend(rows(10 * at, 10))
        rb.to_parquet(tmp_path / f"{at}.parquet")
    assert (TensorDictReplayBuffer.from_parquet(tmp_path)[:] == rows(0, 20)).all()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"x": [1.5]}, r"leaf 'x' is int64\[\], but this file has float64\[\]"),
        ({"y": [1]}, r"leaf 'x' \(int64\[\]\) is missing in this file"),
        ({"x": [1], "y": [1]}, r"leaf 'y' \(int64\[\]\) is not a leaf of a\.parquet"),
    ],
)
def test_part_files_of_different_columns_are_refused(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(other), tmp_path / "b.parquet")
    with pytest.raises(SchemaMismatchError, match=rf"b\.parquet: {said}"):
        TensorDictReplayBuffer.from_parquet(tmp_path)


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    read = TensorDictReplayBuffer.from_parquet
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}: there is no file \*\.parquet"):
        read(tmp_path)
    write_parts(tmp_path, ["year=2026/x.parquet"])
    with pytest.raises(SchemaMismatchError, match=r"the subfolder 'year=2026' is the value of a"):
        read(tmp_path)
    assert read(tmp_path / "year=2026")[:]["x"].tolist() == [0, 1]


def test_a_part_file_that_is_a_fifo_or_a_link_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    read = TensorDictReplayBuffer.from_parquet
    for path in (tmp_path, tmp_path / "a.parquet"):
        with pytest.raises(UnsafePathError, match=r"a\.parquet"):
            read(path)
    (tmp_path / "a.parquet").unlink()
    write_parts(tmp_path / "elsewhere", ["b.parquet"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.parquet").symlink_to(tmp_path / "elsewhere" / "b.parquet")
    with pytest.raises(UnsafePathError, match=r"b\.parquet"):
        read(tmp_path / "folder")
    assert read(tmp_path / "folder" / "b.parquet")[:]["x"].tolist() == [0, 1]


# -- what others make of ours, and what they make ours of ------------------------------------------


@pytest.mark.parametrize(
    ("known", "made_up"),
    [
        ('"dtype": "int64", "shape": []', '"dtype": "int64", "shape": [1000]'),
        ('"dtype": "int64", "shape": []', '"dtype": "float64", "shape": []'),
        ('"dtype": "float32", "shape": [3]', '"dtype": "float32", "shape": [3000]'),
        ('"dtype": "uint8", "shape": [3, 4]', '"dtype": "uint8", "shape": [3, 4096]'),
    ],
)
def test_no_memory_beyond_a_column_is_read_whatever_the_file_says_of_it(
    tmp_path: Path, known: str, made_up: str
) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    form = table.schema.metadata[b"shmbuffer"].decode()
    assert known in form
    changed = {b"shmbuffer": form.replace(known, made_up).encode()}
    pq.write_table(table.replace_schema_metadata(changed), tmp_path / "x.parquet")
    with pytest.raises(SchemaMismatchError, match=r"x\.parquet: column .* per row was expected"):
        TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("reader", ["pandas", "duckdb"])
def test_other_programs_read_every_dtype(tmp_path: Path, reader: str) -> None:
    library = pytest.importorskip(reader)
    number = torch.arange(12)
    data = {}
    for name in sorted(DTYPES):
        leaf = (number % 2 if name == "bool" else number).to(getattr(torch, name))
        data |= {f"{name}_one": leaf, f"{name}_many": leaf.view(12, 1, 1).expand(12, 1, 2).clone()}
    rb = buffer(12)
    rb.extend(TensorDict(data, [12]))
    rb.to_parquet(tmp_path / "x.parquet")
    if reader == "pandas":
        found = library.read_parquet(tmp_path / "x.parquet").to_dict("list")
    else:
        with library.connect() as connection:
            result = connection.execute("select * from read_parquet(?)", [f"{tmp_path}/x.parquet"])
            names = [column[0] for column in result.description]
            found = dict(zip(names, zip(*result.fetchall(), strict=True), strict=True))
    assert set(found) == set(data)
    for name in ("bool", "float16", "float32", "float64", "int8", "int64", "uint16", "uint64"):
        one, many = data[f"{name}_one"].tolist(), data[f"{name}_many"].flatten(1).tolist()
        assert list(found[f"{name}_one"]) == one
        assert [list(row) for row in found[f"{name}_many"]] == many
    assert list(found["uint8_one"]) == list(range(12))
    assert [bytes(row) for row in found["uint8_many"]] == [bytes([at, at]) for at in range(12)]


def test_a_column_of_ours_that_somebody_dropped_is_named(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    pq.write_table(table.drop_columns(["next.obs"]), tmp_path / "y.parquet")
    with pytest.raises(
        SchemaMismatchError, match=r"y.parquet: the file has no column for the leaf"
    ):
        TensorDictReplayBuffer.from_parquet(tmp_path / "y.parquet")


def test_a_file_is_a_data_set_by_its_name(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    name = f"parquet:{tmp_path / 'x.parquet'}"
    mixed = [
        OfflineToOnlineReplayBuffer(name, online_capacity=5, batch_size=9, root=tmp_path / "root")
        for _ in range(2)
    ]
    assert (mixed[0].offline_buffer[:] == rb[:]).all()
    assert mixed[0].offline_buffer.storage.path == mixed[1].offline_buffer.storage.path
    rb.extend(rows(50, 3))
    rb.to_parquet(tmp_path / "x.parquet")
    newer = OfflineToOnlineReplayBuffer(
        name, online_capacity=5, batch_size=9, root=tmp_path / "root"
    )
    assert newer.offline_buffer[:]["id"].tolist() == [*range(3, ITEMS), 50, 51, 52]
    assert (mixed[0].offline_buffer[:]["id"] == torch.arange(ITEMS)).all()


# -- whole or not at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [ListStorage(3), LazyTensorStorage(3)])
def test_what_has_no_columns_is_refused_and_no_file_is_made(tmp_path: Path, storage: Any) -> None:
    with pytest.raises(TypeError, match=r"x\.parquet: only tensors .*dumps\(\)"):
        ReplayBuffer(storage=storage).to_parquet(tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_entries_whose_columns_would_have_one_name_are_refused(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, [2]))
    with pytest.raises(SchemaMismatchError, match=r"several entries would have the column name"):
        rb.to_parquet(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(FormatError, match=f"{path}: not a Parquet file"):
        TensorDictReplayBuffer.from_parquet(path)


def test_a_writer_that_is_killed_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    rb.to_parquet(tmp_path / "x.parquet")
    monkeypatch.setattr(parquet_file, "_BATCH_BYTES", 1)
    in_order = parquet_file.in_order_of_age

    def until_killed(*args: Any) -> Any:
        for at, tensors in enumerate(in_order(*args)):
            if at == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            yield tensors

    monkeypatch.setattr(parquet_file, "in_order_of_age", until_killed)
    assert ended(fork(lambda: rb.to_parquet(tmp_path / "x.parquet") and None)) == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 2
    assert (TensorDictReplayBuffer.from_parquet(tmp_path / "x.parquet")[:] == rb[:]).all()
    monkeypatch.undo()
    rb.to_parquet(tmp_path / "x.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_without_pyarrow_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = buffer()
    rb.extend(rows(0, ITEMS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (rb.to_parquet, TensorDictReplayBuffer.from_parquet):
        with pytest.raises(MissingExtra, match=r"needs pyarrow, .* pip install .*\[parquet\]"):
            call(tmp_path / "x.parquet")  # type: ignore[operator]
