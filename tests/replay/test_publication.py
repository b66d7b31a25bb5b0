"""A directory is seen whole or not at all, and what is not ours in it stays."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import BufferInUseError, ReadOnlyError
from shmbuffer._native import _core
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves import publication
from shmbuffer.saves.file_tree import MANIFEST
from shmbuffer.saves.publication import finish, publish, publish_file
from shmbuffer.saves.work_directory import MARK, sweep
from tests.kit.programs import as_nobody, in_a_tmpfs, in_fork, needs_root


def save(path: Path, files: dict[str, str], **options: Any) -> None:
    with publish(path, **options) as directory:
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)


def tree(path: Path) -> dict[str, str]:
    """Every file, also hidden ones, but the list."""
    return {
        str(file.relative_to(path)): file.read_text()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }


def break_off(path: Path, within: bool) -> None:
    with publish(path, within=within) as directory:
        (directory / "a").write_text("2")
        raise OSError("the disk is full")


@pytest.fixture(params=["exchange", "no exchange"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without a file system that can exchange two directories."""
    if request.param == "no exchange":
        monkeypatch.setattr(publication, "exchange", lambda *_: False)
    return str(request.param)


def test_a_directory_appears_with_all_its_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run"
    with publish(path) as directory:
        (directory / "a").write_text("1")
        assert not path.exists()
    assert tree(path) == {"a": "1"}
    assert json.loads((path / MANIFEST).read_text()) == {"format": 1, "files": ["a"]}
    assert os.listdir(path.parent) == ["run"]


def test_every_file_is_on_the_disk_before_the_save_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    until: dict[str, set[str]] = {}
    sync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def step(name: str) -> None:
        until[name] = set(synced)
        synced.clear()

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(publication, "_step", step)
    save(tmp_path / "run", {"a": "1", "next/b": "2"})
    assert until["synced"] >= {"a", "b", MANIFEST, "next", "checkpoint"}
    assert tmp_path.name in until["published"], "and the name of the directory after it is there"


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o750)
    save(path, {"a": "1", "b/c": "2"})
    assert tree(path) == {"a": "1", "b/c": "2"}
    assert path.stat().st_mode & 0o777 == 0o750


def test_a_save_that_replaces_a_directory_keeps_its_permissions_but_for_others_to_write(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for text in "12":  # in place of an empty directory, and of a save
        path.chmod(0o1777)
        save(path, {"a": text})
        assert stat.S_IMODE(path.stat().st_mode) == 0o1775


@needs_root
@pytest.mark.parametrize("within", [False, True])
def test_a_save_has_the_group_of_the_setgid_directory_that_it_is_in(
    tmp_path: Path, within: bool
) -> None:
    os.chown(tmp_path, -1, 4242)
    tmp_path.chmod(0o2775)
    path = tmp_path / "run"
    for text in "12":  # the second takes the place of the first
        save(path, {"a/b": text}, within=within)
        assert tree(path) == {"a/b": text}
        for each in (path, path / "a", path / "a" / "b"):
            found = each.stat()
            assert found.st_gid == 4242, each
            assert bool(found.st_mode & stat.S_ISGID) == each.is_dir(), each


def test_files_of_an_earlier_save_are_replaced_and_what_has_no_successor_goes(
    tmp_path: Path, exchange: str
) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "old/b": "2", "old/c/d": "3"})
    path.chmod(0o700)
    inode = path.stat().st_ino
    save(path, {"a": "4", "new/e": "5"})
    assert tree(path) == {"a": "4", "new/e": "5"}
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path.stat().st_ino != inode) == (exchange == "exchange")
    assert os.listdir(tmp_path) == ["run"]


def test_foreign_files_stay(tmp_path: Path, exchange: str) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "2"})
    (path / "notes.txt").write_text("mine")
    (path / "b" / "model.pt").write_text("mine too")
    (path / "link").symlink_to("/nowhere")
    save(path, {"a": "3", "d": "4"})
    assert tree(path) == {"a": "3", "d": "4", "notes.txt": "mine", "b/model.pt": "mine too"}
    assert os.readlink(path / "link") == "/nowhere"
    save(path, {"a": "5"})
    assert tree(path) == {"a": "5", "notes.txt": "mine", "b/model.pt": "mine too"}


def test_a_file_that_appears_while_a_save_runs_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1"})
    with publish(path) as directory:
        (directory / "a").write_text("2")
        (path / "notes.txt").write_text("mine")
    assert tree(path) == {"a": "2", "notes.txt": "mine"}
    assert os.listdir(tmp_path) == ["run"]


def test_parts_that_are_saved_one_by_one_join(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1"}, merge=True)
    save(path, {"b/c": "2"}, merge=True)
    save(path, {"a": "3"}, merge=True)
    assert tree(path) == {"a": "3", "b/c": "2"}
    save(path, {"d": "4"})  # a whole one takes the place of them all
    assert tree(path) == {"d": "4"}


def test_named_files_of_a_save_without_a_list_go_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "x").mkdir(parents=True)
    (path / "x" / "old").write_text("1")
    (path / "y").write_text("2")
    save(path, {"a": "3"}, stale=("x/old", "z"))
    assert tree(path) == {"a": "3", "y": "2"}
    assert not (path / "x").exists()


def test_nothing_happens_if_nothing_is_written(tmp_path: Path) -> None:
    save(tmp_path / "run", {})
    assert os.listdir(tmp_path) == []
    save(tmp_path / "run", {"a": "1"})
    save(tmp_path / "run", {})
    assert tree(tmp_path / "run") == {"a": "1"}


def test_an_error_in_between_leaves_the_earlier_save(tmp_path: Path, exchange: str) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1"})
    for within in (False, True):
        with pytest.raises(OSError, match="disk is full"):
            break_off(path, within)
    assert tree(path) == {"a": "1"}
    assert os.listdir(tmp_path) == ["run"]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(NotADirectoryError, match="run is not a directory"):
        save(tmp_path / "run", {"a": "1"})
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("kind", ["directory", "file above", "link above"])
def test_a_foreign_object_in_the_place_of_a_file_is_refused_before_anything_changes(
    tmp_path: Path, kind: str
) -> None:
    path, away = tmp_path / "run", tmp_path / "away"
    away.mkdir()
    save(path, {"a": "1"})
    if kind == "directory":
        (path / "b" / "c").mkdir(parents=True)
    elif kind == "file above":
        (path / "b").write_text("mine")
    else:
        (path / "b").symlink_to(away)
    with pytest.raises(FileExistsError, match="Nothing was changed"):
        save(path, {"a": "2", "b/c": "3"})
    assert tree(path)["a"] == "1"
    assert os.listdir(away) == []


@needs_root
@pytest.mark.parametrize("before", ["files of somebody else", "a save"])
def test_a_mount_point_in_the_place_of_a_directory_is_refused_before_anything_changes(
    tmp_path: Path, before: str
) -> None:
    """By a real mount, in a mount namespace that ends with the child."""
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "1"})
    if before != "a save":
        (path / "notes").write_text("mine")

    def saves() -> None:
        with pytest.raises(FileExistsError) as raised:
            save(path, {"a": "2", "b/c": "2"})
        assert f"{path}/b is on another file system" in str(raised.value)
        assert str(raised.value).endswith(
            "unmount it, or save to another directory. Nothing was changed"
        )
        finish(path)
        assert (path / "a").read_text() == "1"
        assert (path / "b").is_mount()

    in_a_tmpfs(path / "b", b"mode=755", saves)
    assert os.listdir(tmp_path) == ["run"]
    assert not (path / MARK).exists()
    save(path, {"a": "2", "b/c": "2"})
    assert {"a": "2", "b/c": "2"}.items() <= tree(path).items()


def test_a_path_through_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", {"a": "1"})
    save(tmp_path / "link", {"a": "2"})
    assert (tmp_path / "link").is_symlink()
    assert tree(tmp_path / "real") == {"a": "2"}
    (tmp_path / "chain").symlink_to("./link/../link/")
    save(tmp_path / "chain", {"a": "3"})
    save(tmp_path / "chain" / "..", {"b": "4"})
    assert tree(tmp_path) == {"real/a": "3", "b": "4"}


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "x/../../outside", "..", ""])
def test_a_list_from_elsewhere_removes_nothing_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("mine")
    path = tmp_path / "run"
    save(path, {"a": "1"})
    (path / MANIFEST).write_text(json.dumps({"format": 1, "files": ["a", name, 7]}))
    save(path, {"b": "2"}, within=True)
    assert tree(path) == {"b": "2"}
    assert (tmp_path / "outside").read_text() == "mine"


def unfinished(path: Path, files: dict[str, str], remove: list[str]) -> None:
    """What a process leaves that dies once its save within ``path`` is complete."""
    work = path / ".shmbuffer-save"
    for name, text in files.items():
        (work / "checkpoint" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "checkpoint" / name).write_text(text)
    (work / "owner").write_text("1")
    (work / "complete.json").write_text(json.dumps({"remove": remove}))


def test_a_complete_save_is_finished_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "b": "2"})
    unfinished(path, {"a": "3", "c/d": "4"}, ["b", "../outside"])
    (tmp_path / "outside").write_text("mine")
    finish(path)
    assert tree(path) == {"a": "3", "c/d": "4"}
    assert (tmp_path / "outside").exists()
    finish(path)
    assert tree(path) == {"a": "3", "c/d": "4"}


def test_a_plan_from_elsewhere_leads_nowhere_through_a_link(tmp_path: Path) -> None:
    path, away = tmp_path / "run", tmp_path / "away"
    away.mkdir()
    save(path, {"a": "1"})
    (path / "c").symlink_to(away)
    unfinished(path, {"c/d": "4"}, [])
    with pytest.raises(FileExistsError, match="a file or a link"):
        finish(path)
    assert os.listdir(away) == []


@needs_root
def test_a_save_that_cannot_be_finished_here_says_so() -> None:
    public = Path(tempfile.mkdtemp())  # pytest's own directories are closed to others
    try:
        path = public / "run"
        save(path, {"a": "1"})
        unfinished(path, {"a": "3"}, [])
        for each in [public, path, *path.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)

        def load() -> None:
            as_nobody()
            publication._WAIT_S = 0.0
            with pytest.raises(ReadOnlyError, match="an interrupted save still has to move"):
                finish(path)

        assert in_fork(load) == 0
        assert tree(path)["a"] == "1"
        finish(path)
        assert tree(path) == {"a": "3"}
    finally:
        shutil.rmtree(public)


@needs_root
def test_a_save_in_a_directory_that_may_not_be_listed_is_no_error() -> None:
    public = Path(tempfile.mkdtemp())
    public.chmod(0o1733)

    def saves() -> None:
        as_nobody()
        for text in "12":
            save(public / "run", {"a": text})
            with publish_file(public / "one") as file:
                file.write_text(text)

    try:
        assert in_fork(saves) == 0
        assert tree(public) == {"run/a": "2", "one": "2"}
    finally:
        shutil.rmtree(public)


@needs_root
@pytest.mark.parametrize(
    ("point", "passing", "is_seen"),
    [
        ("save.written", 0, False),
        ("save.complete", 0, False),
        ("save.shown", 0, False),
        ("save.shown", 1, True),
        ("save.moved", 0, True),
    ],
)
def test_other_users_load_the_earlier_save_until_files_of_the_next_are_moved(
    point: str, passing: int, is_seen: bool
) -> None:
    """The owner is killed there."""
    public = Path(tempfile.mkdtemp())  # pytest's own directories are closed to others
    public.chmod(0o755)
    path = public / "run"

    def killed() -> None:
        _core.arm(point, after=passing)
        save(path, {"a": "2", "b/c": "2"}, merge=True)

    def load() -> None:
        as_nobody()
        publication._WAIT_S = 0.0
        if is_seen:
            with pytest.raises(ReadOnlyError, match="load it once as its owner"):
                finish(path)
        else:
            finish(path)
            assert (path / "a").read_text() == "1"
        with pytest.raises(PermissionError):
            os.listdir(path / MARK)
        with pytest.raises(PermissionError):
            os.lstat(path / MARK / "checkpoint" / "a")

    try:
        save(path, {"a": "1"})
        assert in_fork(killed) == -signal.SIGKILL
        assert in_fork(load) == 0
        finish(path)
        assert tree(path)["a"] == ("1" if point == "save.written" else "2")
        if point != "save.written":
            assert not (path / MARK).exists()
    finally:
        shutil.rmtree(public)


def test_leftovers_of_dead_saves_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run"
    kept = [".run.notes", ".run.shmbuffer-save", ".running.1.shmbuffer-save", "run.shmbuffer-save"]
    for name in [".run.0a1b.shmbuffer-save", ".run.ff.shmbuffer-save", *kept]:
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "checkpoint" / "a").write_text("half")
        (tmp_path / name / "owner").write_text("1")
    (tmp_path / ".run.empty.shmbuffer-save").mkdir()
    (tmp_path / ".run.foreign.shmbuffer-save").mkdir()
    (tmp_path / ".run.foreign.shmbuffer-save" / "notes").write_text("mine")
    save(path, {"a": "1"})
    assert sorted(os.listdir(tmp_path)) == sorted(["run", ".run.foreign.shmbuffer-save", *kept])
    assert tree(path) == {"a": "1"}


def test_the_next_save_removes_leftovers_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(OSError, match="the disk is full"):
            break_off(path, within=False)
    assert len(os.listdir(tmp_path)) == 1
    save(path, {"a": "1"})
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("call", "error"),
    [("open", errno.ENOSPC), ("flock", errno.ENOLCK), ("pwrite", errno.ENOSPC)],
)
def test_a_work_directory_that_cannot_be_taken_says_where_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, within: bool
) -> None:
    """Also where there is no room for the few bytes of its owner."""
    module = fcntl if call == "flock" else os
    real = getattr(module, call)

    def broken(*arguments: Any, **options: Any) -> Any:
        if call == "open" and arguments[0] != "owner":
            return real(*arguments, **options)
        raise OSError(error, os.strerror(error))

    path = tmp_path / "run"
    save(path, {"a": "1"}, within=within)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(module, call, broken)
        with pytest.raises(OSError, match=r"/.*owner") as raised:
            save(path, {"a": "2"}, within=within)
        del raised
        assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == ["run"]
    assert tree(path) == {"a": "1"}
    save(path, {"a": "2"}, within=within)
    assert tree(path) == {"a": "2"}


def test_a_work_directory_that_cannot_be_looked_at_is_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a complete save, or files that are still to go."""
    path = tmp_path / "run"
    save(path, {"a": "1"})
    (path / "theirs").write_text("2")
    with monkeypatch.context() as patch:

        def unseen(path: Any, **_: Any) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

        def stale(directory: Path) -> None:
            (directory / "a").write_text("2")
            patch.setattr(os, "stat", unseen)
            raise OSError("the disk is full")

        with pytest.raises(OSError, match="the disk is full"), publish(path) as directory:
            stale(directory)
    assert (path / ".shmbuffer-save" / "owner").exists()
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3", "theirs": "2"}


def unlistable(name: str) -> Callable[..., Any]:
    """`os.scandir`, but for directories of that name: no descriptor is left."""
    real = os.scandir

    def scandir(folder: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{folder}").endswith(f"/{name}"):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), folder)
        return real(folder)

    return scandir


@pytest.mark.parametrize("within", [False, True])
def test_a_directory_that_cannot_be_listed_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """Its files would be in no list, not synced, and not moved to their places."""
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "1"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", unlistable("checkpoint/b"))
        with pytest.raises(OSError, match="Too many open files in system"):
            save(path, {"a": "2", "b/c": "2"}, within=within)
    left = {name: text for name, text in tree(path).items() if not name.startswith(".")}
    assert left == {"a": "1", "b/c": "1"}
    save(path, {"a": "2", "b/c": "2"}, within=within)
    assert tree(path) == {"a": "2", "b/c": "2"}
    assert os.listdir(tmp_path) == ["run"]


def test_foreign_files_that_cannot_be_listed_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "1"})
    (path / "b" / "theirs").write_text("3")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", unlistable("run/b"))
        with pytest.raises(OSError, match="Too many open files in system"):
            save(path, {"a": "2"})
    assert tree(path) == {"a": "1", "b/c": "1", "b/theirs": "3"}


@contextmanager
def another_save(path: Path, *, within: bool) -> Iterator[tuple[int, Callable[[], int]]]:
    """Another process that is saving: its pid, and what lets it end and gives its exit status."""
    (told, tell), (hear, say) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with publish(path, within=within) as directory:
                (directory / "a").write_text("theirs")
                os.write(tell, b".")
                os.read(hear, 1)
            status = 0
        finally:
            os._exit(status)

    def end() -> int:
        os.write(say, b".")
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    try:
        assert os.read(told, 1) == b"."
        yield pid, end
    finally:
        for fd in (told, tell, hear, say):
            os.close(fd)


def test_a_living_save_is_left_alone_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with another_save(path, within=False) as (_, end):
        save(path, {"a": "mine", "b": "1"})
        assert tree(path) == {"a": "mine", "b": "1"}
        assert end() == 0
    assert tree(path) == {"a": "theirs"}
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_that_comes_to_its_place_while_another_does_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, paused = tmp_path / "run", threading.Event()
    save(path, {"a": "old"})
    other = threading.Thread(target=lambda: (save(path, {"b": "theirs"}), paused.set()))
    real_exchange, real_sleep = publication.exchange, time.sleep

    def begin_another(*names: Any) -> bool:
        if other.ident is None:
            other.start()
            assert paused.wait(50)
        return real_exchange(*names)

    def sleep(seconds: float) -> None:
        paused.set()
        real_sleep(seconds)

    monkeypatch.setattr(publication, "exchange", begin_another)
    monkeypatch.setattr(publication.time, "sleep", sleep)
    save(path, {"a": "mine"})
    other.join()
    assert tree(path) == {"b": "theirs"}
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("step", [(os, "mkdir"), (os, "fchmod")], ids=["folder", "owner"])
def test_a_work_directory_that_is_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    """Another save to the same place comes upon it before it is locked."""
    call, left = getattr(*step), [1]

    def sweep_behind(*args: Any, **options: Any) -> Any:
        found = call(*args, **options)
        if left and any(name.endswith(MARK) for name in os.listdir(tmp_path)):
            left.clear()
            with Directory.open(tmp_path, anybodys=True) as above:
                sweep(above, "run")
            assert os.listdir(tmp_path) == []
        return found

    monkeypatch.setattr(*step, sweep_behind)
    save(tmp_path / "run", {"a": "1"})
    assert not left
    assert tree(tmp_path / "run") == {"a": "1"}
    assert os.listdir(tmp_path) == ["run"]


def test_two_saves_within_one_directory_at_a_time_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with another_save(path, within=True) as (pid, end):
        with pytest.raises(BufferInUseError, match=f"process {pid} is saving here") as caught:
            save(path, {"a": "mine"}, within=True)
        assert caught.value.pids == [pid]
        assert end() == 0
    assert tree(path) == {"a": "theirs"}


def test_the_exchange_is_the_kernels(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "a").write_text("1")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        if not publication.exchange(folder, "one", folder, "other"):
            pytest.skip("this file system cannot exchange two directories")
        assert os.listdir(other) == ["a"]
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/missing"):
            publication.exchange(folder, "one", folder, "missing")
    finally:
        os.close(folder)


def test_a_kernel_without_the_call_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Old)
    path = tmp_path / "run"
    save(path, {"a": "1"})
    save(path, {"b": "2"})
    assert tree(path) == {"b": "2"}
