"""A save replaces a whole directory in one step, or leaves it unchanged."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import BufferExistsError
from shmbuffer._native import _core
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves import publication
from shmbuffer.saves.file_tree import MANIFEST
from shmbuffer.saves.publication import publish, publish_file, settle
from shmbuffer.saves.work_directory import MARK, sweep
from tests.kit.programs import as_nobody, in_a_tmpfs, in_fork, needs_root


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def save(path: Path, files: dict[str, str], what: str = "directory") -> None:
    with publish(path, what) as directory:
        write(directory, files)


def tree(path: Path) -> dict[str, str]:
    """Returns the content of every file, including hidden ones, except the list of files."""
    return {
        str(file.relative_to(path)): file.read_text()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not str(file).endswith(MANIFEST)
    }


def break_off(path: Path) -> None:
    with publish(path) as directory:
        write(directory, {"a": "2"})
        raise OSError("the disk is full")


def save_late(path: Path) -> None:
    """Writes a save, during which a foreign file is put into the earlier save."""
    with publish(path) as directory:
        write(directory, {"a": "2"})
        write(path, {"notes": "mine"})


@pytest.fixture(params=["exchange", "no exchange"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs with and without a file system that can exchange two directories."""
    if request.param == "no exchange":
        monkeypatch.setattr(publication, "exchange", lambda *_: False)
    return bool(request.param == "exchange")


@pytest.fixture
def public(fast_path: Path) -> Path:
    """Makes a directory that other users can list; pytest's own directories are private."""
    fast_path.chmod(0o755)
    return fast_path


def test_a_directory_appears_with_all_its_files_and_their_list(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run"
    with publish(path, "buffer") as directory:
        write(directory, {"a": "1", "b/c": "2"})
        assert not path.exists()
    assert tree(path) == {"a": "1", "b/c": "2"}
    known = json.loads((path / MANIFEST).read_text())
    assert known == {"format": 1, "what": "buffer", "files": ["a", "b/c"]}
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
    assert until["synced"] >= {"a", "b", Path(MANIFEST).name, "next", "checkpoint"}
    assert tmp_path.name in until["published"], "and the name of the directory after it is there"


def test_a_save_replaces_the_whole_directory_of_an_earlier_one(
    tmp_path: Path, exchange: bool
) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "old/b": "2", "old/c/d": "3"})
    (path / "empty" / "folder").mkdir(parents=True)
    before = path.stat().st_ino
    save(path, {"a": "4", "new/e": "5"})
    assert tree(path) == {"a": "4", "new/e": "5"}
    assert sorted(os.listdir(path)) == [".shmbuffer", "a", "new"]
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_keeps_the_permissions_of_the_directory_but_for_others_to_write(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for text, mode in (("1", 0o750), ("2", 0o1777)):  # into an empty directory, then over a save
        path.chmod(mode)
        save(path, {"a": text})
        assert stat.S_IMODE(path.stat().st_mode) == mode & ~stat.S_IWOTH
    assert tree(path) == {"a": "2"}


@needs_root
def test_a_save_has_the_group_of_the_setgid_directory_that_it_is_in(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, 4242)
    tmp_path.chmod(0o2775)
    path = tmp_path / "run"
    for text in "12":  # the second save replaces the first
        save(path, {"a/b": text})
        for each in (path, path / "a", path / "a" / "b"):
            assert each.stat().st_gid == 4242, each
            assert bool(each.stat().st_mode & stat.S_ISGID) == each.is_dir(), each


def a_file(path: Path) -> str:
    (path / "b" / "notes.txt").write_text("mine")
    return "b/notes.txt"


def a_link_in_the_place_of_a_file(path: Path) -> str:
    (path / "a").unlink()
    (path / "a").symlink_to("b/c")
    return "a"


def a_link_in_the_place_of_a_folder(path: Path) -> str:
    (path / "b").rename(path.parent / "moved")
    (path / "b").symlink_to("../moved")
    return "b"


def no_list(path: Path) -> str:
    shutil.rmtree((path / MANIFEST).parent)
    return "a"


def a_list_of_another_kind(path: Path) -> str:
    (path / MANIFEST).write_text(json.dumps({"format": 1, "what": "sampler", "files": ["a"]}))
    return "a"


FOREIGN = (
    *(a_file, a_link_in_the_place_of_a_file, a_link_in_the_place_of_a_folder),
    *(no_list, a_list_of_another_kind),
)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_directory_with_anything_that_no_save_of_this_kind_made_is_refused_before_it_is_written(
    tmp_path: Path, foreign: Callable[[Path], str]
) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "2"})
    name = foreign(path)
    before, beside = tree(path), sorted(os.listdir(tmp_path))
    says = rf"run: .*, but ({name}) in this directory does not belong to a save of a directory; "
    refused = pytest.raises(BufferExistsError, match=says + r"move it .* Nothing was written")
    with refused, publish(path):
        pytest.fail("something is going to be written")
    assert tree(path) == before
    assert sorted(os.listdir(tmp_path)) == beside


def test_a_file_that_comes_in_while_a_save_is_written_stays(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1"})
    with pytest.raises(BufferExistsError, match="notes in this directory does not"):
        save_late(path)
    assert tree(path) == {"a": "1", "notes": "mine"}
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_that_comes_in_while_the_save_is_replaced_stays(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "run", publication.exchange

    def late(*names: Any) -> bool:
        (path / "notes").write_text("mine")
        monkeypatch.setattr(publication, "exchange", replace)
        return replace(*names)

    save(path, {"a": "1"})
    monkeypatch.setattr(publication, "exchange", late)
    with pytest.raises(BufferExistsError, match="files into the earlier save while"):
        save(path, {"a": "2"})
    assert tree(path) == {"a": "1", "notes": "mine"}
    assert os.listdir(tmp_path) == ["run"]


@needs_root
@pytest.mark.parametrize(
    ("mount", "says"),
    [("", "run: is a mount point"), ("b", "run: .* but b in this directory does not belong")],
)
def test_a_mount_point_is_refused(tmp_path: Path, mount: str, says: str) -> None:
    """Uses a real mount in a mount namespace that ends with the child."""
    path = tmp_path / "run"
    save(path, {"a": "1", "b/c": "1"})

    def saves() -> None:
        with pytest.raises(BufferExistsError, match=says + ".*Nothing was written"):
            save(path, {"a": "2"})
        assert (path / mount).is_mount()

    in_a_tmpfs(path / mount, b"mode=755", saves)
    assert tree(path) == {"a": "1", "b/c": "1"}
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_that_fails_or_writes_nothing_leaves_the_earlier_one(
    tmp_path: Path, exchange: bool
) -> None:
    path = tmp_path / "run"
    for before in ({}, {"a": "1"}):
        save(path, before)
        save(path, {})
        with pytest.raises(OSError, match="disk is full"):
            break_off(path)
        assert tree(path) == before
        assert os.listdir(tmp_path) == ["run"] * bool(before)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(NotADirectoryError, match="run: a save is a directory"):
        save(tmp_path / "run", {"a": "1"})
    assert (tmp_path / "run").read_text() == "mine"


def test_a_path_through_links_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "chain").symlink_to("./link/../link/")
    for text, name in enumerate(("link", "chain")):
        save(tmp_path / name, {"a": str(text)})
        assert (tmp_path / name).is_symlink()
        assert tree(tmp_path / "real") == {"a": str(text)}


def killed_between(path: Path) -> None:
    """Leaves the earlier save of `path` in the work directory of a killed process."""

    def victim() -> None:
        publication.exchange = lambda *_: False  # type: ignore[assignment]
        _core.arm("save.moved away")
        save(path, {"a": "2"})

    assert in_fork(victim) == -signal.SIGKILL
    assert not path.exists()


@pytest.mark.parametrize("call", [settle, lambda path: save(path, {}), break_off])
def test_the_next_process_moves_the_earlier_save_back_where_directories_cannot_be_exchanged(
    tmp_path: Path, call: Callable[[Path], None]
) -> None:
    path = tmp_path / "run"
    save(path, {"a": "1"})
    killed_between(path)
    try:
        call(path)
    except OSError:
        assert call is break_off
    assert tree(path) == {"a": "1"}
    assert os.listdir(tmp_path) == ["run"]


@needs_root
def test_another_user_moves_no_save_back(public: Path) -> None:
    path = public / "run"
    save(path, {"a": "1"})
    killed_between(path)

    def theirs() -> None:
        as_nobody()
        settle(path)
        assert not path.exists()

    assert in_fork(theirs) == 0
    settle(path)
    assert tree(path) == {"a": "1"}


@needs_root
def test_a_save_in_a_directory_that_may_not_be_listed_is_no_error(public: Path) -> None:
    public.chmod(0o1733)

    def saves() -> None:
        as_nobody()
        for text in "12":
            save(public / "run", {"a": text})
            with publish_file(public / "one") as file:
                file.write_text(text)

    assert in_fork(saves) == 0
    assert tree(public) == {"run/a": "2", "one": "2"}


def test_leftovers_of_dead_saves_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run"
    kept = [".run.notes", ".run.shmbuffer-save", ".running.1.shmbuffer-save", "run.shmbuffer-save"]
    for name in [".run.0a1b.shmbuffer-save", ".run.ff.shmbuffer-save", *kept]:
        write(tmp_path / name, {"checkpoint/a": "half", "earlier/a": "old", "owner": "1"})
    (tmp_path / ".run.empty.shmbuffer-save").mkdir()
    write(tmp_path / ".run.foreign.shmbuffer-save", {"notes": "mine"})
    path.mkdir()
    save(path, {"a": "1"})
    assert sorted(os.listdir(tmp_path)) == sorted(["run", ".run.foreign.shmbuffer-save", *kept])
    assert tree(path) == {"a": "1"}


def test_what_a_save_cannot_remove_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(OSError, match="the disk is full"):
            break_off(path)
    assert len(os.listdir(tmp_path)) == 1
    save(path, {"a": "1"})
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("call", "error"),
    [("open", errno.ENOSPC), ("flock", errno.ENOLCK), ("pwrite", errno.ENOSPC)],
)
def test_a_work_directory_that_cannot_be_locked_says_where_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    module = fcntl if call == "flock" else os
    real = getattr(module, call)

    def broken(*arguments: Any, **options: Any) -> Any:
        fd, name = arguments[0], arguments[0]
        if call != "open":
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name != "owner":
            return real(*arguments, **options)
        raise OSError(error, os.strerror(error))

    path = tmp_path / "run"
    save(path, {"a": "1"})
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(module, call, broken)
        with pytest.raises(OSError, match=r"/.*owner") as raised:
            save(path, {"a": "2"})
        del raised
        assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == ["run"]
    assert tree(path) == {"a": "1"}


@pytest.mark.parametrize("where", ["checkpoint/b", "run/b"])
def test_a_directory_that_cannot_be_listed_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its files would be missing from the list, or removed although they are foreign."""
    path, real = tmp_path / "run", os.scandir
    save(path, {"a": "1", "b/c": "1"})

    def scandir(folder: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{folder}").endswith(f"/{where}"):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), folder)
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(OSError, match="Too many open files in system"):
            save(path, {"a": "2", "b/c": "2"})
    assert tree(path) == {"a": "1", "b/c": "1"}
    save(path, {"a": "2", "b/c": "2"})
    assert os.listdir(tmp_path) == ["run"]


@contextmanager
def another_save(path: Path) -> Iterator[Callable[[], int]]:
    """Starts another process that saves; yields a function that ends it and returns its status."""
    (told, tell), (hear, say) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with publish(path) as directory:
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
        yield end
    finally:
        for fd in (told, tell, hear, say):
            os.close(fd)


def test_a_living_save_is_left_alone_and_the_last_one_wins(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "run"
    with another_save(path) as end:
        save(path, {"a": "mine", "b": "1"})
        settle(path)
        assert tree(path) == {"a": "mine", "b": "1"}
        assert end() == 0
    assert tree(path) == {"a": "theirs"}
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_waits_for_another_one_that_is_being_put_into_the_same_place(
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
    """Another save to the same path finds the directory before it is locked."""
    call, left = getattr(*step), [1]

    def sweep_behind(*args: Any, **options: Any) -> Any:
        found = call(*args, **options)
        if left and any(name.endswith(MARK) for name in os.listdir(tmp_path)):
            left.clear()
            with Directory.open(tmp_path, any_owner=True) as above:
                sweep(above, "run")
            assert os.listdir(tmp_path) == []
        return found

    monkeypatch.setattr(*step, sweep_behind)
    save(tmp_path / "run", {"a": "1"})
    assert not left
    assert tree(tmp_path / "run") == {"a": "1"}
    assert os.listdir(tmp_path) == ["run"]


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
