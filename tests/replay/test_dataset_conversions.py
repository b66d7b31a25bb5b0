"""Conversions of data sets are reused for the files they were made from, and for no others."""

from __future__ import annotations

import json
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
    CorruptBufferError,
    LazyTensorStorage,
    ReadOnlyStorage,
    TensorDictReplayBuffer,
    load_dataset,
)
from shmbuffer.datasets import converted as conversions
from shmbuffer.saves.parquet_file import File
from tests.crash.harness import ended, fork

pytest.importorskip("pyarrow")

ITEMS = 8
TIME = 10**18


def write(path: Path, first: int) -> Path:
    """Writes a file whose time, size and schema do not depend on its content."""
    path.parent.mkdir(exist_ok=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.extend(TensorDict({"x": torch.arange(ITEMS) + first}, [ITEMS]))
    rb.to_parquet(path, compression="none")
    os.utime(path, ns=(TIME, TIME))
    return path


def load(path: Path, root: Path, **options: Any) -> TensorDictReplayBuffer:
    return load_dataset(f"parquet:{path}", root=root, batch_size=2, **options)


def firsts(path: Path, root: Path) -> int:
    return int(load(path, root)[:]["x"][0])


def conversions_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "parquet").iterdir() if path.name != ".lock")


def test_files_of_one_name_and_time_are_not_taken_for_one_another(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = [write(tmp_path / name / "t.parquet", at) for at, name in enumerate("ab")]
    assert files[0].stat().st_size == files[1].stat().st_size
    assert [firsts(file, root) for file in files * 2] == [0, 1, 0, 1]
    assert len(conversions_in(root)) == 2


def replace(file: Path, tmp_path: Path) -> None:
    os.replace(write(tmp_path / "new" / "t.parquet", 50), file)


def rewrite(file: Path, tmp_path: Path) -> None:
    content = write(tmp_path / "new" / "t.parquet", 50).read_bytes()
    assert len(content) == file.stat().st_size
    file.write_bytes(content)
    os.utime(file, ns=(TIME, TIME))


def exchange(file: Path, tmp_path: Path) -> None:
    file.parent.rename(tmp_path / "old")
    write(tmp_path / "new" / "t.parquet", 50).parent.rename(file.parent)


@pytest.mark.parametrize("change", [replace, rewrite, exchange])
def test_a_file_with_other_content_and_its_former_time_is_converted_again(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    file = write(tmp_path / "a" / "t.parquet", 0)
    assert firsts(file, tmp_path / "root") == 0
    change(file, tmp_path)
    assert firsts(file, tmp_path / "root") == 50


def test_a_file_is_known_by_every_path_that_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a" / "t.parquet", 7)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "x.parquet").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    paths = [file, tmp_path / "link" / "t.parquet", tmp_path / "x.parquet", Path("a/t.parquet")]
    assert [firsts(path, tmp_path / "root") for path in paths] == [7] * 4
    assert len(conversions_in(tmp_path / "root")) == 1


def test_a_name_of_any_length_and_any_characters_has_a_conversion(tmp_path: Path) -> None:
    file = write(tmp_path / "a" / "t.parquet", 3)
    for name in ("é" * 127, "a b%2F", ".hidden"):
        file = file.rename(file.parent / name)
        assert firsts(file, tmp_path / "root") == 3


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, batches = write(tmp_path / "a" / "t.parquet", 0), File.batches

    def broken(self: File, rows: int) -> Any:
        yield next(batches(self, 3))
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(File, "batches", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            load(file, tmp_path / "root")
    assert conversions_in(tmp_path / "root") == []
    assert firsts(file, tmp_path / "root") == 0


def test_what_a_killed_conversion_leaves_is_swept_by_the_next_of_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, batches = write(tmp_path / "a" / "t.parquet", 0), File.batches

    def until_killed(self: File, rows: int) -> Any:
        yield next(batches(self, 3))
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(File, "batches", until_killed)
        assert ended(fork(lambda: load(file, tmp_path / "root") and None)) == -signal.SIGKILL
    (left,) = conversions_in(tmp_path / "root")
    assert left.endswith(".shmbuffer-save")
    assert firsts(write(tmp_path / "b" / "u.parquet", 5), tmp_path / "root") == 5
    assert [name.split("-")[0] for name in conversions_in(tmp_path / "root")] == ["u.parquet"]
    assert firsts(file, tmp_path / "root") == 0


def test_a_source_that_changes_while_it_is_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, batches = write(tmp_path / "a" / "t.parquet", 0), File.batches

    def overtaken(self: File, rows: int) -> Any:
        yield from batches(self, rows)
        replace(file, tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(File, "batches", overtaken)
        with pytest.raises(
            ValueError, match=r"t\.parquet: the files changed while .*load the data set again"
        ):
            load(file, tmp_path / "root")
    assert conversions_in(tmp_path / "root") == []
    assert firsts(file, tmp_path / "root") == 50


def test_a_conversion_of_another_format_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a" / "t.parquet", 0)
    path = load(file, tmp_path / "root").storage.path  # type: ignore[attr-defined]
    monkeypatch.setattr(conversions, "_FORMAT", conversions._FORMAT + 1)
    assert load(file, tmp_path / "root").storage.path != path  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"losses": 3}'])
def test_a_damaged_conversion_is_named_with_what_mends_it(
    tmp_path: Path, content: str | None
) -> None:
    file = write(tmp_path / "a" / "t.parquet", 0)
    path = load(file, tmp_path / "root").storage.path  # type: ignore[attr-defined]
    record = path / "shmbuffer.conversion.json"
    assert json.loads(record.read_text())["source"] == str(file)
    record.unlink()
    if content is not None:
        record.write_text(content)
    with pytest.raises(CorruptBufferError, match=rf"{path}: .* is damaged .*remove this directory"):
        load(file, tmp_path / "root")
    shutil.rmtree(path)
    assert firsts(file, tmp_path / "root") == 0


def test_conversions_are_kept_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a" / "t.parquet", 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, root in (
        ("", tmp_path / "home" / ".cache"),
        (str(tmp_path / "c"), tmp_path / "c"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        rb = load_dataset(f"parquet:{file}", batch_size=2)
        assert rb.storage.path.parent == root / "shmbuffer" / "parquet"  # type: ignore[attr-defined]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"t\.parquet: there is no such file; check the"):
        load(tmp_path / "t.parquet", tmp_path / "root")


def test_a_column_under_a_key_of_a_sample_is_left_out_with_a_warning_or_refused(
    tmp_path: Path,
) -> None:
    rows = TensorDict({"x": torch.arange(3), "index": torch.arange(3) + 100}, [3])
    rows.memmap(tmp_path / "data")
    said = r"data: Column 'index' is left out because a sample has a key of its own .*; rename"
    with pytest.warns(UserWarning, match=said) as warned:
        rb = load_dataset(tmp_path / "data", batch_size=2)
    assert len(warned) == 1
    assert sorted(rb[:].keys()) == ["x"]
    with pytest.warns(UserWarning, match=said):
        ReadOnlyStorage(tmp_path / "data")
    for load_strictly in (ReadOnlyStorage, load_dataset):
        with pytest.raises(ValueError, match=said):
            load_strictly(tmp_path / "data", strict=True)
