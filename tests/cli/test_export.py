"""``export`` writes the items of a live or dead buffer for other programs, oldest first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.cli import exits, main
from tests.kit.programs import Program

WRITES_AND_DIES = """
import os, signal, sys, torch
from tensordict import TensorDict
from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer
storage = LazyMemmapStorage(8, scratch_dir=sys.argv[1], shared_init=True)
rb = TensorDictReplayBuffer(storage=storage)
rb.extend(TensorDict({"a": torch.arange(12)}, [12]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def items(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    after = {"obs": number[:, None] + torch.tensor([0.25, 0.5]), "done": number % 3 == 0}
    return TensorDict({"number": number, "next": after}, [count])


@pytest.fixture
def buffer(tmp_path: Path) -> TensorDictPrioritizedReplayBuffer:
    """Makes a buffer with items 4 to 11; the earlier ones were overwritten."""
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
    rb.extend(items(0, 5))
    rb.extend(items(5, 7))
    return rb


def test_parquet_gives_back_what_was_written_the_oldest_first(
    buffer: TensorDictPrioritizedReplayBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "items.parquet"
    assert main(["export", str(tmp_path / "buffer"), str(file)]) == exits.DONE
    assert capsys.readouterr().out.startswith(f"{file}: 8 items, ")
    with TensorDictReplayBuffer.from_parquet(file) as read:
        assert (read[:] == items(4, 8)).all()
    buffer.close()


def test_hdf5_has_a_dataset_a_leaf(
    buffer: TensorDictPrioritizedReplayBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "items.h5"
    assert main(["export", str(tmp_path / "buffer"), str(file), "--json"]) == exits.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["items"], told["format"], told["bytes"]) == (8, "hdf5", file.stat().st_size)
    with h5py.File(file) as read:
        assert read["number"][:].tolist() == list(range(4, 12))
        assert read["next/obs"].shape == (8, 2)
        assert np.array_equal(read["next/done"][:], np.arange(4, 12) % 3 == 0)
    buffer.close()


def test_a_tensordict_is_mapped(
    buffer: TensorDictPrioritizedReplayBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "items"
    assert main(["export", str(tmp_path / "buffer"), str(target)]) == exits.DONE
    assert (TensorDict.load_memmap(target) == items(4, 8)).all()
    assert "8 items" in capsys.readouterr().out
    assert not list(tmp_path.glob(".items*"))
    buffer.close()


@pytest.mark.full
def test_the_items_of_the_dead_are_recovered_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Program.python(WRITES_AND_DIES, tmp_path / "buffer") as program:
        program.end()
    assert main(["export", str(tmp_path / "buffer"), str(tmp_path / "items")]) == exits.DONE
    assert TensorDict.load_memmap(tmp_path / "items")["a"].tolist() == list(range(4, 12))
    assert capsys.readouterr().out.startswith("recovered first: 1 client reaped\n")


def test_a_directory_that_is_not_there_is_named(
    buffer: TensorDictPrioritizedReplayBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "none" / "items.parquet"
    assert main(["export", str(tmp_path / "buffer"), str(target)]) == exits.REFUSED
    assert (
        capsys.readouterr().err
        == f"shmbuffer: {target.parent}: no such directory; create it first\n"
    )
    buffer.close()


def test_what_is_there_already_stays(
    buffer: TensorDictPrioritizedReplayBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "items.h5").write_text("precious")
    assert main(["export", str(tmp_path / "buffer"), str(tmp_path / "items.h5")]) == exits.REFUSED
    assert "items.h5: already exists; choose another name" in capsys.readouterr().err
    assert (tmp_path / "items.h5").read_text() == "precious"
    buffer.close()


def test_a_name_that_says_no_format_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "items.csv")]) == exits.USAGE
    assert "Pass --format with one of parquet, hdf5, tensordict" in capsys.readouterr().err


def test_items_of_any_size_and_none_at_all_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "buffer", tmp_path / "items"
    storage = LazyStackStorage(8, scratch_dir=path, max_bytes=1 << 16, shared_init=True)
    with TensorDictReplayBuffer(storage=storage) as rb:
        assert main(["export", str(path), str(target)]) == exits.REFUSED
        assert "there is nothing to export" in capsys.readouterr().err
        rb.extend([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        assert main(["export", str(path), str(target)]) == exits.REFUSED
        assert "save it with dumps()" in capsys.readouterr().err
    assert not target.exists()


def test_no_buffer_is_said_before_torch_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "items")]) == exits.NO_BUFFER
    assert str(tmp_path) in capsys.readouterr().err
