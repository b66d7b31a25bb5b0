"""A save that another user prepared, and files that other users put beside one.

Nothing outside of the save is read, emptied, moved, overwritten or removed. No save or load waits
for a file that never ends.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest

from shmbuffer import (
    BufferExistsError,
    CorruptBufferError,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    UnsafePathError,
)
from shmbuffer.saves import publication
from shmbuffer.saves.file_tree import MANIFEST
from shmbuffer.saves.publication import publish, publish_file, settle
from shmbuffer.torchrl.compat.storage_files import METADATA
from tests.damage.hostile import ROOT_TRAPS, TRAPS
from tests.damage.saves import KINDS, content, end, rows, steps
from tests.kit.programs import as_nobody, in_fork, needs_root
from tests.replay.test_publication import save, tree, write

WORK = ".shmbuffer-save"


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Path]:
    """A directory outside with files that may not be changed; it is checked at the end."""
    away = tmp_path / "away"
    write(away, {"precious": "mine", "below/precious": "mine too"})
    yield away
    assert tree(away) == {"precious": "mine", "below/precious": "mine too"}


@pytest.fixture
def public(fast_path: Path) -> Path:
    """A directory to which every user can write. Those of pytest are closed to other users."""
    fast_path.chmod(0o777)
    return fast_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a save."""
    path = tmp_path / "runs" / "run"
    save(path, {"a": "1", "b/c": "2"})
    return path


@pytest.mark.parametrize("trap", ["a link", "a FIFO", "a directory", "a socket"])
def test_what_is_in_the_place_of_an_owner_file_is_not_opened(
    path: Path, away: Path, trap: str
) -> None:
    beside = path.parent / ".run.0a1b.shmbuffer-save"
    write(beside, {"checkpoint/a": "theirs", "owner": "1"})
    TRAPS[trap](beside / "owner", away.parent / "victim")
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}
    assert (beside / "checkpoint" / "a").exists()


def test_a_work_directory_that_is_a_link_is_no_work_directory(path: Path, away: Path) -> None:
    theirs = away.parent / "theirs"
    write(theirs, {"checkpoint/a": "theirs", "earlier/a": "theirs", "owner": "1"})
    (path.parent / ".run.0a1b.shmbuffer-save").symlink_to(theirs)
    save(path, {"a": "3"})
    shutil.rmtree(path)
    settle(path)
    assert not path.exists()
    assert set(tree(theirs)) == {"checkpoint/a", "earlier/a", "owner"}


def test_links_in_a_work_directory_are_not_followed_when_it_is_swept(
    path: Path, away: Path
) -> None:
    work = path.parent / ".run.0a1b.shmbuffer-save"
    write(work, {"checkpoint/a": "theirs", "owner": "1"})
    (work / "checkpoint" / "b").symlink_to(away)
    (work / "earlier").symlink_to(away)
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}


@pytest.mark.parametrize("name", ["../../away/precious", "/AWAY/precious", "lnk/precious", ".."])
def test_a_list_of_files_removes_nothing_outside(path: Path, away: Path, name: str) -> None:
    known = ["a", "b/c", name.replace("/AWAY", str(away)), 7]
    content = {"format": 1, "what": "directory", "files": known}
    (path / MANIFEST).write_text(json.dumps(content))
    if name.startswith("lnk"):
        (path / "lnk").symlink_to(away)
        with pytest.raises(BufferExistsError, match="lnk in this directory does not"):
            save(path, {"d": "3"})
    else:
        save(path, {"d": "3"})
        assert tree(path) == {"d": "3"}


@pytest.mark.parametrize("trap", ["a link", "a FIFO", "a directory", "an empty file"])
def test_a_list_that_is_no_regular_file_of_ours_is_no_list(
    path: Path, away: Path, trap: str
) -> None:
    TRAPS[trap](path / MANIFEST, away.parent / "victim")
    with pytest.raises(BufferExistsError, match=r"does not belong to a save.*Nothing was written"):
        save(path, {"a": "3"})
    assert {"a": "1", "b/c": "2"}.items() <= tree(path).items()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("kind", ["rows, with everything", "records", "list", "rows for TorchRL"])
def test_a_save_is_read_by_those_that_the_umask_allows_and_written_by_no_other_user(
    tmp_path: Path, umask: int, kind: str
) -> None:
    before = os.umask(umask)
    try:
        path = KINDS[kind].saved(tmp_path / "run")
    finally:
        os.umask(before)
    for each in (path, *path.rglob("*")):
        allowed = (0o777 if each.is_dir() else 0o666) & ~umask & ~stat.S_IWOTH
        assert stat.S_IMODE(each.stat().st_mode) == allowed, each


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_no_other_user_can_look_into_a_work_directory(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with publish(tmp_path / "run") as directory:
            (directory / "a").write_text("1")
            (work,) = tmp_path.glob(f"*{WORK}")
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            assert stat.S_IMODE((work / "owner").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_nothing_is_left_where_every_directory_is_open_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems without permissions show all directories like this. The save is refused."""
    path, mkdir, chmod = tmp_path / "run", os.mkdir, os.chmod
    save(path, {"a": "1"})

    def open_to_others(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        chmod(name, 0o777, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", open_to_others)
        patch.setattr(os, "chmod", lambda *_, **__: None)
        with pytest.raises(UnsafePathError, match=f"{WORK}: all users can write to this directory"):
            save(path, {"a": "2"})
    assert os.listdir(tmp_path) == ["run"]
    assert tree(path) == {"a": "1"}


def test_a_save_writes_to_its_work_directory_even_if_its_name_is_replaced(
    path: Path, away: Path
) -> None:
    """Another user who can write to the parent directory may replace the name."""
    with publish(path) as directory:
        (work,) = path.parent.glob(f".run.*{WORK}")
        work.rename(work.with_name("gone"))
        (work / "checkpoint").mkdir(parents=True)
        (work / "checkpoint" / "a").symlink_to(away / "precious")
        (work / "checkpoint" / "below").symlink_to(away / "below")
        (work / "owner").symlink_to(away / "precious")
        write(directory, {"a": "3", "below/precious": "4"})
    assert tree(path) == {"a": "3", "below/precious": "4"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_that_takes_the_place_of_the_earlier_save_is_put_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """The directory appears between the check of the earlier save and the exchange."""
    theirs, exchange, left = path.parent / "theirs", publication.exchange, [True]
    write(theirs, {"d/precious": "mine"})

    def late(*names: Any) -> bool:
        if left and left.pop():
            path.rename(path.with_name("was"))
            theirs.rename(path)
        return exchanges and exchange(*names)

    monkeypatch.setattr(publication, "exchange", late)
    with pytest.raises(BufferExistsError, match="into the earlier save while"):
        save(path, {"a": "3"})
    assert tree(path) == {"d/precious": "mine"}
    assert tree(path.with_name("was")) == {"a": "1", "b/c": "2"}
    assert sorted(os.listdir(path.parent)) == ["run", "was"]


def test_a_link_next_to_a_single_file_is_not_written_through(tmp_path: Path, away: Path) -> None:
    target = tmp_path / "run.h5"
    (tmp_path / f".run.h5.0a1b{WORK}").symlink_to(away / "precious")
    with publish_file(target) as file:
        file.write_text("1")
    assert target.read_text() == "1"
    target.unlink()
    target.symlink_to(away / "precious")
    with publish_file(target) as file:
        file.write_text("2")
    assert target.read_text() == "2"
    assert not target.is_symlink()
    assert [each.name for each in tmp_path.glob(f".*{WORK}")] == [f".run.h5.0a1b{WORK}"]


@needs_root
def test_files_of_another_user_next_to_a_save_are_ignored_and_kept(public: Path) -> None:
    path, mine = public / "run", public / "precious"
    mine.write_text("mine")

    def plant() -> None:
        as_nobody()
        os.umask(0)
        for owner in ("a link", "a file"):
            work = public / f".run.{owner}.shmbuffer-save"
            write(work, {"earlier/a": "theirs", "owner": "1"})
            if owner == "a link":
                (work / "owner").unlink()
                (work / "owner").symlink_to(mine)

    assert in_fork(plant) == 0
    before = tree(public)
    settle(path)
    assert not path.exists()
    for text in "12":
        save(path, {"a": text})
    assert tree(public) == before | {"run/a": "2"}


@needs_root
def test_a_save_of_another_user_can_be_loaded_and_is_not_replaced(public: Path) -> None:
    path = public / "run"

    def theirs() -> None:
        as_nobody()
        KINDS["rows with a pass"].saved(path)

    assert in_fork(theirs) == 0
    rb = KINDS["rows with a pass"].make()
    rb.loads(path)
    assert len(rb) == 6
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    for call in (rb.dumps, lambda path: rb.dumps(path, layout="torchrl")):
        with pytest.raises(UnsafePathError, match=r"run.*: belongs to uid .*of your own"):
            call(path)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    assert os.listdir(public) == ["run"]
    end(rb)


@needs_root
@pytest.mark.parametrize("by_a_link_of_ours", [False, True])
def test_a_link_of_another_user_in_a_shared_directory_is_not_followed(
    public: Path, away: Path, by_a_link_of_ours: bool
) -> None:
    public.chmod(0o1777)
    path = way = public / "run"

    def plant() -> None:
        as_nobody()
        path.symlink_to(away)

    assert in_fork(plant) == 0
    if by_a_link_of_ours:
        way = public / "ours"
        way.symlink_to("./../" + public.name + "/run/")
    for call in (lambda: settle(way), lambda: save(way, {"precious": "2"})):
        with pytest.raises(UnsafePathError, match=r"this is a link of uid 65534 .*not followed"):
            call()
    os.chown(public, 65534, -1)  # the owner may decide about files in their own directory
    settle(way)


NOT_LOADED = {Path(MANIFEST).name, "made.json", "meta.json"}
"""Names of files that other programs and the next save read, but no load."""


def load_with_traps(saved: Path, victim: Path, kind: str, trap: str, log: Path) -> None:
    """Loads a save with a trap in the place of each file. It must be called in a child.

    The log names each file before its load runs, and has the unexpected results at the end.
    """
    target, wrong, unread = None, [], set()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for file in sorted(str(one.relative_to(saved)) for one in saved.rglob("*") if one.is_file()):
        copy = saved.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        (TRAPS | ROOT_TRAPS)[trap](copy / file, victim)
        if target is None:
            target = KINDS[kind].filled(20)
            before = content(target)
        log.write_text(file)
        signal.alarm(120)  # ends the child even during a system call
        try:
            target.loads(copy)
        except (UnsafePathError, CorruptBufferError) as error:
            if str(copy / file) not in str(error) or content(target) != before:
                wrong.append(f"{file}: {error}")
        else:
            unread.add(file)
            end(target)
            target = None
        finally:
            signal.alarm(0)
    if target is not None:
        end(target)
    log.write_text(json.dumps({"wrong": wrong, "unread": sorted(unread)}))


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "trap",
    [
        *("a link", "a link to itself", "a FIFO", "a directory", "a socket"),
        pytest.param("a device", marks=needs_root),  # /dev/zero, which has no end
    ],
)
def test_what_replaces_a_file_of_a_save_is_refused_at_once_and_the_buffer_keeps_its_items(
    tmp_path: Path, kind: str, trap: str
) -> None:
    KINDS[kind].saved(tmp_path / "saved")
    log, most = tmp_path / "log", resource.getrlimit(resource.RLIMIT_AS)[1]

    def child() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + 2**32  # a call that reads a device to its end fails
        resource.setrlimit(resource.RLIMIT_AS, (room, most))
        load_with_traps(tmp_path / "saved", tmp_path / "victim", kind, trap, log)

    assert in_fork(child) == 0, log.read_text()
    found = json.loads(log.read_text())
    assert found["wrong"] == []
    needed = {file for file in found["unread"] if Path(file).name not in NOT_LOADED}
    assert needed == KINDS[kind].unread


def test_a_save_reads_no_file_outside_of_its_directory(tmp_path: Path) -> None:
    """The names of the tensors of a PyTree come from its metadata."""
    outside = tmp_path / "outside"
    outside.with_suffix(".memmap").write_bytes(bytes(48))
    kind = KINDS["pytree for TorchRL"]
    kind.saved(tmp_path / "saved")
    for name in (str(outside), "...outside"):
        about = {"device": "cpu", "dtype": "torch.int64", "shape": [6]}
        metadata = {"is_pytree": True, "len": 6, "metadata": {name: about}}
        (tmp_path / "saved" / "storage" / METADATA).write_text(json.dumps(metadata))
        with pytest.raises(CorruptBufferError, match=f"{METADATA}: .*outside.* not the name of a"):
            kind.make().loads(tmp_path / "saved")


@pytest.mark.parametrize("way", ["external storage", "an external link", "a virtual dataset"])
def test_an_hdf5_file_of_a_save_takes_no_data_from_other_files(tmp_path: Path, way: str) -> None:
    kind = KINDS["episodes in HDF5"]
    kind.saved(tmp_path / "saved")
    file = tmp_path / "saved" / "storage" / "checkpoint.h5"
    with h5py.File(file, "r+") as content:
        if way == "external storage":
            os.mkfifo(tmp_path / "fifo")
            content.create_dataset("x", (8,), "u1", external=[(tmp_path / "fifo", 0, 8)])
        elif way == "an external link":
            content["x"] = h5py.ExternalLink(tmp_path / "other.h5", "/x")
        else:
            layout = h5py.VirtualLayout((8,), "u1")
            layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (8,))
            content.create_virtual_dataset("x", layout)
    with pytest.raises(UnsafePathError, match=r"checkpoint.h5: the data of /x are in another file"):
        kind.make().loads(tmp_path / "saved")


def test_the_path_of_a_save_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    (tmp_path / "link.h5").symlink_to(tmp_path / "storage.h5")
    for checkpointer in (None, FlatStorageCheckpointer(), H5StorageCheckpointer()):
        rb, other = rows(checkpointer=checkpointer), rows(checkpointer=checkpointer)
        rb.extend(steps(1))
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "link")
        assert content(other) == content(rb)
        (tmp_path / "link to it").symlink_to(tmp_path / "saved" / "storage")
        again = rows(checkpointer=checkpointer)
        again.storage.checkpointer.loads(again.storage, tmp_path / "link to it")
        assert content(again) == content(rb)
        (tmp_path / "link to it").unlink()
    rb.storage.checkpointer.dumps(rb.storage, tmp_path / "storage.h5")
    again.storage.checkpointer.loads(again.storage, tmp_path / "link.h5")
    assert content(again) == content(rb)
