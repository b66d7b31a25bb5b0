"""Data sets that another user prepared, and a directory of conversions that another user owns.

No file leads out of the data set, no call waits for a file, and the conversions of another user are
not read.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReadOnlyStorage,
    TensorDictReplayBuffer,
    UnsafePathError,
    load_dataset,
    prefill_replay_buffer,
)
from tests.damage.hostile import ends_in_time
from tests.kit.programs import needs_root

ITEMS = 8
NOBODY = 65534


def items() -> TensorDict:
    inner = TensorDict({"reward": torch.arange(ITEMS)[:, None]}, [ITEMS])
    return TensorDict({"x": torch.arange(ITEMS), "next": inner}, [ITEMS])


def make_tensordict(path: Path) -> None:
    items().memmap(path)


def make_save(path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.extend(items())
    rb.dumps(path)


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def put_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


KINDS = {put_fifo: "a FIFO", put_link: "a symbolic link", put_device: "a character device"}
TRAPS = [put_fifo, put_link, pytest.param(put_device, marks=needs_root)]


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


def by_name(path: Path) -> Any:
    return load_dataset(path, batch_size=2)


def as_storage(path: Path) -> Any:
    return ReadOnlyStorage(path)


def as_prefill(path: Path) -> Any:
    return prefill_replay_buffer(
        TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS), batch_size=2), path
    )


def mixed(path: Path) -> Any:
    return OfflineToOnlineReplayBuffer(path, online_capacity=4, batch_size=2)


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("make", [make_tensordict, make_save])
def test_a_trap_in_the_place_of_a_file_of_a_directory_is_refused(
    tmp_path: Path, make: Callable[[Path], None], trap: Callable[[Path], None]
) -> None:
    make(tmp_path / "whole")
    names = [file.relative_to(tmp_path / "whole") for file in files_of(tmp_path / "whole")]
    assert Path("next/reward.memmap") in names or Path("storage/next/reward.memmap") in names

    def tries() -> None:
        for at, name in enumerate(names):
            path = tmp_path / f"data-{at}"
            shutil.copytree(tmp_path / "whole", path)
            (path / name).unlink()
            trap(path / name)
            for use in (by_name, as_storage, as_prefill, mixed):
                said = rf"{name}: this is {KINDS[trap]}, but a regular file was expected"
                with pytest.raises(UnsafePathError, match=said):
                    use(path)

    assert ends_in_time(tries) == 0


def test_a_directory_in_a_data_set_that_is_a_link_is_refused(tmp_path: Path) -> None:
    make_tensordict(tmp_path / "data")
    os.rename(tmp_path / "data" / "next", tmp_path / "elsewhere")
    (tmp_path / "data" / "next").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        UnsafePathError, match=r"data/next: .*a symbolic link, .* it was not opened"
    ):
        load_dataset(tmp_path / "data", batch_size=2)


def test_the_path_of_a_data_set_may_be_a_link(tmp_path: Path) -> None:
    make_tensordict(tmp_path / "data")
    (tmp_path / "link").symlink_to("data")
    rb = load_dataset(tmp_path / "link", batch_size=2)
    assert rb[:]["x"].tolist() == list(range(ITEMS))
    assert rb.storage.path == tmp_path / "data"  # type: ignore[attr-defined]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_in_the_place_of_the_priorities_is_refused(
    tmp_path: Path, trap: Callable[[Path], None]
) -> None:
    make_tensordict(tmp_path / "data")
    ReadOnlyStorage(tmp_path / "data", priorities=tmp_path / "table").close()
    names = {file.relative_to(tmp_path / "table") for file in files_of(tmp_path / "table")}
    names -= {Path("meta.json"), Path(".shmbuffer/made.json")}  # for other programs and for cleanup
    assert Path(".shmbuffer/slots") in names

    def tries() -> None:
        for at, name in enumerate([Path(), *sorted(names)]):
            path = tmp_path / f"table-{at}"
            if name != Path():
                shutil.copytree(tmp_path / "table", path)
                (path / name).unlink()
            trap(path / name)
            with pytest.raises(UnsafePathError, match=rf"{path / name}: .*this is {KINDS[trap]}"):
                ReadOnlyStorage(tmp_path / "data", priorities=path)

    assert ends_in_time(tries) == 0


# -- sources that are converted --------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ITEMS))
    rb.extend(items())
    rb.to_parquet(tmp_path / "x.parquet")
    return tmp_path / "x.parquet"


def load_parquet(path: Path, root: Path) -> TensorDictReplayBuffer:
    return load_dataset(f"parquet:{path}", root=root, batch_size=2)


@pytest.mark.parametrize("trap", [put_fifo, pytest.param(put_device, marks=needs_root)])
def test_a_trap_in_the_place_of_a_parquet_file_is_refused(
    tmp_path: Path, parquet: Path, trap: Callable[[Path], None]
) -> None:
    parquet.unlink()
    trap(parquet)

    def tries() -> None:
        with pytest.raises(UnsafePathError, match=rf"x\.parquet: this is {KINDS[trap]}"):
            load_parquet(parquet, tmp_path / "root")

    assert ends_in_time(tries) == 0
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.filterwarnings(
    "ignore::UserWarning:minari.utils"
)  # settings of Minari that are not in the data set
@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_trap_in_the_place_of_a_file_of_minari_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trap: Callable[[Path], None],
    data_format: str,
) -> None:
    minari, gym = pytest.importorskip("minari"), pytest.importorskip("gymnasium")
    numpy = pytest.importorskip("numpy")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    episode = minari.data_collector.EpisodeBuffer(
        id=0,
        observations=numpy.zeros((3, 2)),
        actions=numpy.zeros(2, numpy.int64),
        rewards=numpy.zeros(2),
        terminations=numpy.zeros(2, bool),
        truncations=numpy.ones(2, bool),
    )
    minari.create_dataset_from_buffers(
        "made/b-v0",
        [episode],
        observation_space=gym.spaces.Box(-1, 1, (2,), numpy.float64),
        action_space=gym.spaces.Discrete(2),
        data_format=data_format,
    )
    data = tmp_path / "minari" / "made" / "b-v0" / "data"
    names = [file.relative_to(data) for file in files_of(data)]
    assert len(names) >= 2

    def tries() -> None:
        for name in names:
            os.rename(data / name, tmp_path / "aside")
            trap(data / name)
            with pytest.raises(UnsafePathError, match=rf"{name}: this is {KINDS[trap]}"):
                load_dataset("minari:made/b-v0", root=tmp_path / "root", batch_size=2)
            os.replace(tmp_path / "aside", data / name)

    assert ends_in_time(tries) == 0
    assert not (tmp_path / "root").exists()
    rb = load_dataset("minari:made/b-v0", root=tmp_path / "root", batch_size=2)
    assert len(rb) == 2


# -- where conversions are kept --------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("foreign", ["", "parquet", "conversion", ".lock"])
def test_what_belongs_to_another_user_on_the_way_to_a_conversion_is_refused(
    tmp_path: Path, parquet: Path, foreign: str
) -> None:
    root = tmp_path / "root"
    conversion = load_parquet(parquet, root).storage.path  # type: ignore[attr-defined]
    path = {"conversion": conversion, ".lock": root / "parquet" / ".lock"}.get(
        foreign, root / foreign
    )
    if foreign == ".lock":
        shutil.rmtree(conversion)  # otherwise the lock is not needed
    os.chown(path, NOBODY, NOBODY)
    said = rf"{re.escape(str(path))}: belongs to uid {NOBODY}, but this process runs as uid 0"
    with pytest.raises(UnsafePathError, match=said):
        load_parquet(parquet, root)


@pytest.mark.parametrize("place", ["parquet", ".lock", "conversion", "record"])
def test_a_link_on_the_way_to_a_conversion_is_not_followed(
    tmp_path: Path, parquet: Path, place: str
) -> None:
    root = tmp_path / "root"
    conversion = load_parquet(parquet, root).storage.path  # type: ignore[attr-defined]
    path = {
        "parquet": root / "parquet",
        ".lock": root / "parquet" / ".lock",
        "conversion": conversion,
        "record": conversion / "shmbuffer.conversion.json",
    }[place]
    away = tmp_path / "away"
    if place == ".lock":
        shutil.rmtree(conversion)
        path.unlink()
    else:
        os.rename(path, away)
    path.symlink_to(away)
    with pytest.raises(UnsafePathError, match=rf"{path.name}: .*this is a symbolic link"):
        load_parquet(parquet, root)
    assert away.exists() == (place != ".lock")


def test_the_directory_of_conversions_may_be_a_link_of_this_user(
    tmp_path: Path, parquet: Path
) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "large disk")
    assert len(load_parquet(parquet, tmp_path / "root")) == ITEMS
    assert (tmp_path / "large disk" / "parquet").is_dir()
