"""Allocation, opening, syncing and removal of files: a file is complete or not recognized."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmbuffer import (
    BufferClosedError,
    BufferExistsError,
    BufferNotFoundError,
    BufferUnlinkedError,
    CorruptBufferError,
    DurabilityError,
    ReadOnlyError,
    SpaceError,
    UnsafePathError,
)
from shmbuffer._native import _core
from shmbuffer.memory.clients import locks
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.region import Directory
from tests.kit.programs import Program, as_nobody, in_a_tmpfs, in_fork, needs_root

NOBODY = 65534


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.open(tmp_path / "buffer", create=True) as opened:
        yield opened


@pytest.fixture
def public() -> Iterator[Path]:
    """Makes a directory that every user can reach but only its owner can write."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def failing(number: int) -> Callable[..., None]:
    """Returns a system call that fails."""

    def call(*arguments: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


# Opening a directory.


def test_a_missing_directory_is_made_with_its_parents_when_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs" / "one" / "buffer"
    with Directory.open(path, create=True) as directory:
        assert directory.created
        assert directory.path == path
        assert mode(path) == 0o700
    with Directory.open(path, create=True) as again:
        assert not again.created
        assert again.identity == directory.identity


def test_a_missing_directory_is_not_made_otherwise(tmp_path: Path) -> None:
    with pytest.raises(
        BufferNotFoundError, match=r"gone: does not exist; .* create the buffer first"
    ):
        Directory.open(tmp_path / "gone")


def test_a_relative_path_is_kept_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Directory.open("buffer", create=True) as directory:
        monkeypatch.chdir("/")
        assert directory.path == tmp_path / "buffer"
        assert directory.still_there()


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty, but is ''"):
        Directory.open("", create=True)


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_link_is_not_opened(tmp_path: Path, create: bool, slash: str) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(UnsafePathError, match="this is a symbolic"):
        Directory.open(f"{tmp_path}/link{slash}", create=create)


def test_a_broken_link_does_not_make_a_directory_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(UnsafePathError, match="a symbolic link"):
        Directory.open(tmp_path / "link", create=True)
    assert os.listdir(tmp_path) == ["link"]


def test_a_link_above_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with Directory.open(tmp_path / "link" / "buffer", create=True) as directory:
        assert directory.path == tmp_path / "link" / "buffer"
    assert (tmp_path / "disk" / "buffer").is_dir()


@pytest.mark.parametrize("below", ["", "buffer", "runs/buffer"])
def test_a_file_is_not_a_directory(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UnsafePathError,
        match=r"this is (a regular|something below a) file",
    ):
        Directory.open(tmp_path / "file" / below, create=True)


@pytest.mark.parametrize("permissions", [0o700, 0o755, 0o775, 0o1777])
def test_a_directory_that_others_can_read_is_accepted(tmp_path: Path, permissions: int) -> None:
    tmp_path.chmod(permissions)
    Directory.open(tmp_path).close()


def test_a_directory_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(
        UnsafePathError, match=r"all users can write to this directory \(mode 0o777\).*chmod o-w"
    ):
        Directory.open(tmp_path)


@needs_root
def test_the_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(
        UnsafePathError, match="belongs to uid 65534, but this process runs as uid 0"
    ):
        Directory.open(path)


@needs_root
def test_a_directory_that_cannot_be_made_or_read_is_an_error_that_says_so(public: Path) -> None:
    (public / "closed").mkdir(0o000)
    os.chown(public / "closed", NOBODY, NOBODY)

    def attempt() -> None:
        as_nobody()
        with pytest.raises(ReadOnlyError, match="buffer: permission denied; choose a directory"):
            Directory.open(public / "buffer", create=True)
        with pytest.raises(ReadOnlyError, match="closed: permission denied"):
            Directory.open(public / "closed")

    assert in_fork(attempt) == 0


@needs_root
def test_a_read_only_file_system_can_be_read(tmp_path: Path) -> None:
    """Uses EROFS from a real mount, in a mount namespace that ends with the program."""
    with Program.python(
        """
        import os, subprocess, sys
        from shmbuffer.errors import ReadOnlyError
        from shmbuffer.memory.system.region import Directory
        path = sys.argv[1]
        subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
        open(f"{path}/file", "w").close()
        os.chmod(path, 0o700)
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        with Directory.open(path, create=True) as directory:
            assert directory.read("file", limit=9) == b""
            for refused in (
                lambda: directory.create("new", 0),
                lambda: directory.open_file("file"),
                lambda: directory.unlink("file"),
                lambda: directory.rename("file", "new"),
                lambda: directory.write_atomic("file", b"new"),
            ):
                try:
                    refused()
                except ReadOnlyError as error:
                    print(error)
        """,
        tmp_path,
        before=("unshare", "--mount"),
    ) as process:
        output, errors = process.communicate()
        if "unshare failed" in errors:
            pytest.skip(errors)
        assert output.count("read-only file system; choose a directory where you can write") == 5
        assert process.returncode == 0, errors


def test_a_refused_directory_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    monkeypatch.setattr(filesystem, "require_safe", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        Directory.open(tmp_path / "buffer", create=True)
    assert os.listdir(tmp_path) == []
    assert descriptors() == before


@needs_root
def test_permissions_do_not_depend_on_the_umask(public: Path) -> None:
    os.chown(public, NOBODY, NOBODY)

    def attempt() -> None:
        as_nobody()  # root may open a directory without permissions, which would prove nothing
        for umask in (0o777, 0o000):
            os.umask(umask)
            path = public / f"umask{umask}"
            with Directory.open(path, create=True) as directory:
                directory.create("next/obs.memmap", 1).close()
                directory.write_atomic("meta.json", b"{}")
            assert mode(path) == mode(path / "next") == 0o700
            assert mode(path / "next/obs.memmap") == mode(path / "meta.json") == 0o600

    assert in_fork(attempt) == 0


def test_a_closed_directory_says_so(directory: Directory) -> None:
    directory.close()
    directory.close()
    assert directory.file.fd == -1
    for use in (
        lambda: directory.create("file", 1),
        lambda: directory.listdir(),
        lambda: directory.exists("file"),
        directory.free_bytes,
        directory.still_there,
    ):
        with pytest.raises(
            BufferClosedError, match="buffer: the directory was closed; open it again"
        ):
            use()


# Names.


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "a/../b", "../b", "a//b", "a/", "./a", "a\0b", "a/./b"]
)
def test_a_name_that_leads_elsewhere_is_refused(directory: Directory, name: str) -> None:
    for use in (
        lambda: directory.create(name, 1),
        lambda: directory.open_file(name),
        lambda: directory.unlink(name),
        lambda: directory.rename("file", name),
        lambda: directory.write_atomic(name, b""),
    ):
        with pytest.raises(
            UnsafePathError, match="is not a valid name of a file in this directory"
        ):
            use()
    assert os.listdir(directory.path.parent) == ["buffer"]
    assert directory.listdir() in ([], ["file"])


@pytest.mark.parametrize("part", ["a", "a/b"])
def test_a_link_on_the_way_to_a_file_is_not_followed(
    directory: Directory, tmp_path: Path, part: str
) -> None:
    (tmp_path / "outside" / "b").mkdir(parents=True)
    (tmp_path / "outside" / "c").touch()
    (directory.path / part).parent.mkdir(exist_ok=True)
    (directory.path / part).symlink_to(tmp_path / "outside")
    for use in (
        lambda: directory.create(f"{part}/new", 1),
        lambda: directory.create(f"{part}/b/new", 1),
        lambda: directory.open_file(f"{part}/c"),
        lambda: directory.unlink(f"{part}/c"),
        lambda: directory.exists(f"{part}/c"),
        lambda: directory.listdir(part),
        lambda: directory.rmdir(f"{part}/b"),
        lambda: directory.write_atomic(f"{part}/c", b"new"),
    ):
        with pytest.raises(UnsafePathError, match=f"{part}: this is a symbolic link"):
            use()
    assert sorted(os.listdir(tmp_path / "outside")) == ["b", "c"]
    assert os.listdir(tmp_path / "outside" / "b") == []


@needs_root
def test_a_subdirectory_of_another_user_is_refused(directory: Directory) -> None:
    (directory.path / "next").mkdir()
    os.chown(directory.path / "next", NOBODY, NOBODY)
    with pytest.raises(UnsafePathError, match="next: belongs to uid 65534"):
        directory.create("next/obs.memmap", 1)


# Creating files.


@pytest.mark.parametrize("name", ["obs.memmap", "next/obs.memmap", "a/b/c/obs.memmap"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001])
def test_a_new_file_is_private_and_full_of_zeros(
    directory: Directory, name: str, nbytes: int
) -> None:
    path = directory.path / name
    with directory.create(name, nbytes) as file:
        assert not os.get_inheritable(file.fd)
        assert os.pread(file.fd, nbytes + 1, 0) == bytes(nbytes)
        assert mode(path) == 0o600
        assert path.parent == directory.path or mode(path.parent) == 0o700
        assert os.pwrite(file.fd, b"x", 0) == 1


def test_room_is_reserved_unless_that_is_declined(directory: Directory) -> None:
    for reserve, blocks in ((True, 2048), (False, 0)):
        with directory.create(f"reserve={reserve}", 2**20, reserve=reserve) as file:
            found = os.fstat(file.fd)
        assert found.st_size == 2**20
        assert found.st_blocks >= blocks
        assert reserve or found.st_blocks == 0


def test_a_file_is_never_made_over_another_one(directory: Directory) -> None:
    (directory.path / "file").write_text("mine")
    with pytest.raises(BufferExistsError, match="file: already exists"):
        directory.create("file", 1)
    assert (directory.path / "file").read_text() == "mine"


def test_a_link_is_not_written_through(directory: Directory, tmp_path: Path) -> None:
    (directory.path / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BufferExistsError, match="already exists"):
        directory.create("file", 1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_size_cannot_be_negative(directory: Directory) -> None:
    with pytest.raises(
        ValueError, match="file: the file size must not be negative, but is -1 bytes"
    ):
        directory.create("file", -1)


def test_a_full_disk_is_an_error_with_both_numbers_and_nothing_is_left(
    directory: Directory,
) -> None:
    before = descriptors()
    with pytest.raises(
        SpaceError,
        match=r"file: 1048576\.0 TiB \(1152921504606846976 bytes\) are needed,"
        r" and .* are free; free some space, make the buffer smaller",
    ) as info:
        directory.create("file", 2**60)
    assert info.value.errno == errno.ENOSPC
    assert info.value.parts["needed_bytes"] == 2**60
    assert 0 < info.value.parts["free_bytes"] < 2**60
    assert directory.listdir() == []
    assert descriptors() == before


@needs_root
def test_a_full_tmpfs_is_an_error_and_gives_back_what_was_taken(tmp_path: Path) -> None:
    with Program.python(
        """
        import os, subprocess, sys
        from shmbuffer.errors import SpaceError
        from shmbuffer.memory.clients import locks
        from shmbuffer.memory.system import filesystem
        from shmbuffer.memory.system.region import Directory
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", sys.argv[1]], check=True)
        os.chmod(sys.argv[1], 0o700)
        with Directory.open(sys.argv[1]) as directory:
            directory.create("first", 600_000).close()
            free = directory.free_bytes()
            # Once by our own look at the room, once by the answer of the kernel.
            for room in (filesystem.free_bytes, lambda fd: filesystem.UNLIMITED):
                filesystem.free_bytes, saved = room, filesystem.free_bytes
                try:
                    directory.create("second", 600_000)
                except SpaceError as error:
                    print(error)
                filesystem.free_bytes = saved
                assert directory.listdir() == ["first"]
                assert directory.free_bytes() == free
            directory.create("sparse", 600_000, reserve=False).close()
        """,
        tmp_path,
        before=("unshare", "--mount"),
    ) as process:
        output, errors = process.communicate()
        if "unshare failed" in errors:
            pytest.skip(errors)
        assert process.returncode == 0, errors
        assert output.count("second: 600000 bytes are needed") == 2


def test_the_limit_of_a_process_on_its_files_is_named(directory: Directory) -> None:
    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for reserve in (True, False):
            with pytest.raises(SpaceError, match=r"20000 bytes are needed, .* raise `ulimit -f`"):
                directory.create("file", 20_000, reserve=reserve)
        with pytest.raises(
            SpaceError, match=r"meta\.json: 20000 bytes are needed, .* raise `ulimit -f`"
        ):
            directory.write_atomic("meta.json", bytes(20_000))
        assert directory.listdir() == []

    assert in_fork(attempt) == 0


def test_a_handled_error_keeps_no_variables_alive(directory: Directory) -> None:
    class Large: ...

    def caller() -> weakref.ref[Large]:
        large = Large()
        with contextlib.suppress(BufferNotFoundError):
            directory.open_file("nothing")
        return weakref.ref(large)

    gc.disable()  # the test must not depend on the garbage collector
    try:
        assert caller()() is None
    finally:
        gc.enable()


@needs_root
def test_a_disk_that_takes_no_more_names_is_explained(tmp_path: Path) -> None:
    def run() -> None:
        with Directory.open(tmp_path) as directory:
            for make in (lambda: directory.make("folder"), lambda: directory.create("f/file", 1)):
                with pytest.raises(SpaceError) as caught:
                    make()
                assert re.fullmatch(
                    ".*: there is not enough space, and .* are free; but the disk is "
                    "reported as full: check `df -i`, or choose another disk",
                    str(caught.value),
                ), str(caught.value)

    in_a_tmpfs(tmp_path, b"nr_inodes=1", run)


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EDQUOT, "your quota is used up"), (errno.ENOSPC, "as full: check `df -i`")],
)
def test_a_disk_that_is_full_in_another_way_is_explained(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    with pytest.raises(SpaceError, match=f"1 bytes are needed, and .* are free; but .*{message}"):
        directory.create("file", 1)
    assert directory.listdir() == []


def test_nothing_is_made_in_a_directory_that_was_removed(directory: Directory) -> None:
    directory.path.rmdir()
    for use in (
        lambda: directory.create("file", 1),
        lambda: directory.create("next/file", 1),
        lambda: directory.write_atomic("file", b""),
    ):
        with pytest.raises(BufferUnlinkedError, match="was removed while it was in use"):
            use()
    assert not directory.unlink("file")
    assert not directory.exists("file")


# Opening files.


def test_a_file_of_the_right_size_is_opened(directory: Directory) -> None:
    directory.create("next/obs.memmap", 10).close()
    with directory.open_file("next/obs.memmap", nbytes=10) as file:
        assert not os.get_inheritable(file.fd)
        assert os.pwrite(file.fd, b"x", 9) == 1
    with (
        directory.open_file("next/obs.memmap", writable=False) as file,
        pytest.raises(OSError, match="Bad file descriptor"),
    ):
        os.pwrite(file.fd, b"x", 0)


@pytest.mark.parametrize("found", [0, 1, 8191, 8193, 4096, 2**20])
def test_a_file_of_another_size_is_refused_and_never_extended(
    directory: Directory, found: int
) -> None:
    directory.create("obs.memmap", 8192).close()
    os.truncate(directory.path / "obs.memmap", found)
    before = descriptors()
    with pytest.raises(
        CorruptBufferError,
        match=rf"obs\.memmap: the file has {found} bytes instead of 8192, because",
    ) as info:
        directory.open_file("obs.memmap", nbytes=8192)
    assert info.value.parts == {
        "path": directory.path / "obs.memmap",
        "expected": 8192,
        "found": found,
    }
    assert (directory.path / "obs.memmap").stat().st_size == found
    assert descriptors() == before


def test_a_missing_file_is_not_found(directory: Directory) -> None:
    for name, missing in (("obs.memmap", r"obs\.memmap"), ("next/obs.memmap", "next")):
        with pytest.raises(BufferNotFoundError, match=f"{missing}: does not exist; check the path"):
            directory.open_file(name)
        with pytest.raises(FileNotFoundError):
            directory.read(name, limit=1)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a symbolic link", lambda path: path.symlink_to("/dev/zero")),
        ("a symbolic link", lambda path: path.symlink_to("nowhere")),
        ("a FIFO", os.mkfifo),
        ("a directory", Path.mkdir),
        ("a socket", a_socket),
        pytest.param(
            "a character device",
            lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
            marks=needs_root,
        ),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_only_a_regular_file_is_opened(
    directory: Directory, kind: str, make: Callable[[Path], None], writable: bool
) -> None:
    make(directory.path / "obs.memmap")
    before = descriptors()
    with pytest.raises(
        UnsafePathError, match=rf"obs\.memmap: this is {kind}, but a regular file was expected"
    ):
        directory.open_file("obs.memmap", writable=writable)
    assert descriptors() == before


def test_a_file_with_a_second_name_is_refused(directory: Directory, tmp_path: Path) -> None:
    directory.create("obs.memmap", 1).close()
    os.link(directory.path / "obs.memmap", tmp_path / "second")
    with pytest.raises(UnsafePathError, match=r"obs\.memmap: the file has 2 names \(hard links\)"):
        directory.open_file("obs.memmap")


@needs_root
def test_the_file_of_another_user_is_refused(directory: Directory) -> None:
    directory.create("obs.memmap", 1).close()
    os.chown(directory.path / "obs.memmap", NOBODY, NOBODY)
    with pytest.raises(UnsafePathError, match=r"obs\.memmap: belongs to uid 65534, but"):
        directory.open_file("obs.memmap")


@needs_root
def test_a_file_without_permissions_is_an_error_that_says_so(public: Path) -> None:
    os.chown(public, NOBODY, NOBODY)

    def attempt() -> None:
        as_nobody()
        with Directory.open(public) as directory:
            directory.create("file", 1).close()
            (public / "file").chmod(0o400)
            directory.open_file("file", writable=False).close()
            with pytest.raises(ReadOnlyError, match="file: permission denied; choose a directory"):
                directory.open_file("file")

    assert in_fork(attempt) == 0


def test_a_file_that_was_unlinked_stays_usable(directory: Directory) -> None:
    with directory.create("file", 4096) as file, mmap.mmap(file.fd, 4096) as shared:
        assert directory.unlink("file")
        shared[:4] = b"data"
        assert os.pread(file.fd, 4, 0) == b"data"


def test_a_lock_file_is_made_once_and_its_content_is_kept(directory: Directory) -> None:
    name = ".shmbuffer/init.lock"
    with directory.open_lock(name) as first:
        os.write(first.fd, b"whatever")
        with directory.open_lock(name) as second:
            assert os.path.sameopenfile(first.fd, second.fd)
            assert os.read(second.fd, 100) == b"whatever"


# Whole small files.


def test_a_small_file_is_read_as_a_whole(directory: Directory) -> None:
    directory.write_atomic("meta.json", b"12345")
    assert directory.read("meta.json", limit=5) == b"12345"
    with pytest.raises(
        CorruptBufferError, match="the file has 5 bytes instead of at most 4"
    ) as info:
        directory.read("meta.json", limit=4)
    assert info.value.parts["expected"] == 4


def test_a_small_file_is_replaced_as_a_whole(directory: Directory) -> None:
    for data in (b"first", b"", b"x" * 100_000):
        directory.write_atomic("next/meta.json", data)
        assert directory.read("next/meta.json", limit=10**6) == data
    assert directory.listdir("next") == ["meta.json"]


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_writer_that_is_killed_leaves_the_old_file_and_a_name_that_can_be_listed(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    directory.write_atomic("a/meta.json", b"old")
    directory.write_atomic("a/other.json", b"old")
    monkeypatch.setattr(os, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    assert in_fork(lambda: directory.write_atomic("a/meta.json", b"new")) == -signal.SIGKILL
    monkeypatch.undo()
    assert directory.read("a/meta.json", limit=9) == b"old"
    (left,) = directory.leftovers("a/meta.json")
    assert re.fullmatch(r"a/meta\.json\.[0-9a-f]{16}\.tmp", left)
    assert directory.leftovers("a/other.json") == []
    assert directory.unlink(left)
    assert directory.leftovers("a/meta.json") == []


def test_a_write_that_fails_leaves_the_old_file_alone(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_atomic("meta.json", b"old")
    before = descriptors()
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC))
    with pytest.raises(SpaceError, match=r"meta\.json: 3 bytes are needed"):
        directory.write_atomic("meta.json", b"new")
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(
        DurabilityError, match=r"meta\.json.*\.tmp: could not be written to the disk"
    ):
        directory.write_atomic("meta.json", b"new")
    assert directory.read("meta.json", limit=9) == b"old"
    assert directory.listdir() == ["meta.json"]
    assert descriptors() == before


def test_writers_at_the_same_time_leave_one_whole_file(directory: Directory) -> None:
    def write(letter: bytes) -> None:
        for _ in range(20):
            directory.write_atomic("meta.json", letter * 10_000)
            data = directory.read("meta.json", limit=10_000)
            assert data == data[:1] * 10_000

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert directory.listdir() == ["meta.json"]


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_atomic("meta.json", b"old")
    real = os.open
    news = [b"newer", b"new"]

    def replaced(path: str, *arguments: int, dir_fd: int) -> int:
        fd = real(path, *arguments, dir_fd=dir_fd)
        if path == "meta.json" and news:
            directory.write_atomic("meta.json", news.pop())
        return fd

    before = descriptors()
    monkeypatch.setattr(os, "open", replaced)
    assert directory.read("meta.json", limit=9) == b"newer"
    assert news == []
    assert descriptors() == before


@pytest.mark.parametrize("call", ["fstat", "read"])
def test_a_system_that_fails_says_where_and_no_descriptor_stays(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    directory.write_atomic("a/meta.json", b"{}")
    before = descriptors()
    real = getattr(os, call)

    def broken(fd: int, *arguments: int) -> object:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("meta.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(OSError, match=r"Input/output error: '/.*/a/meta\.json'"):
            directory.read("a/meta.json", limit=9)
        assert descriptors() == before
    assert directory.read("a/meta.json", limit=9) == b"{}"


def test_a_descriptor_is_closed_once_and_with_its_owner(directory: Directory) -> None:
    """The number may belong to another file by then."""
    before = descriptors()
    file = directory.create("file", 1)
    number = file.fd
    file.close()
    other = os.open(directory.path, os.O_RDONLY)
    assert other == number
    file.close()
    del file
    assert stat.S_ISDIR(os.fstat(other).st_mode)
    os.close(other)
    directory.open_file("file")
    directory.open_lock("file")
    assert descriptors() == before


def test_a_descriptor_lets_go_of_what_it_had_and_a_lock_does_not(directory: Directory) -> None:
    before = descriptors()
    with _core.Descriptor() as file, locks.Lock() as lock:
        for _ in range(2):
            assert directory.open_lock("file", into=file).fd == file.fileno()
            assert descriptors() == before + 1
        directory.open_lock("file", into=lock)
        with pytest.raises(ValueError, match=r"while the descriptor holds a lock\. Close it"):
            lock.take(os.open, directory.path, os.O_RDONLY)
        with pytest.raises(TypeError):
            file.take(str)
        with pytest.raises(TypeError, match="needs a function that opens the file"):
            file.take()  # type: ignore[call-arg]
        assert descriptors() == before + 2
    assert descriptors() == before


def test_a_directory_that_cannot_be_looked_at_was_not_removed(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing(errno.EIO))
        with pytest.raises(OSError, match=r"Input/output error: '/"):
            directory.still_there()
    assert directory.still_there()


# Moving and removing names.


def test_names_are_listed_and_looked_at(directory: Directory) -> None:
    directory.create("b/c", 5).close()
    (directory.path / "a").symlink_to("nowhere")
    assert directory.listdir() == ["a", "b"]
    assert directory.listdir("b") == ["c"]
    assert directory.exists("a")
    assert directory.exists("b/c")
    assert not directory.exists("b/d")
    assert not directory.exists("d/c")
    assert directory.stat("b/c").st_size == 5
    assert stat.S_ISLNK(directory.stat("a").st_mode)
    with pytest.raises(BufferNotFoundError, match="d: does not exist"):
        directory.stat("d")
    with pytest.raises(FileNotFoundError):
        directory.listdir("d")
    with pytest.raises(UnsafePathError, match="c: this is a regular"):
        directory.listdir("b/c")


def test_a_directory_is_listed_by_several_threads_at_once(directory: Directory) -> None:
    names = [f"{number:03}" for number in range(300)]
    for name in names:
        directory.create(name, 0).close()
    found: list[bool] = []

    def look() -> None:
        found.extend(directory.listdir() == names for _ in range(50))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(found)


def test_a_file_is_moved_and_directories_are_made_for_it(directory: Directory) -> None:
    directory.create("new/obs", 3).close()
    directory.create("next/obs", 2).close()
    directory.rename("new/obs", "next/obs")
    assert directory.stat("next/obs").st_size == 3
    directory.rename("next/obs", "a/b/obs")
    assert directory.stat("a/b/obs").st_size == 3
    with pytest.raises(BufferNotFoundError, match="new/obs: does not exist"):
        directory.rename("new/obs", "next/obs")


def test_a_file_is_removed_once(directory: Directory) -> None:
    directory.create("next/obs", 0).close()
    assert directory.unlink("next/obs")
    assert not directory.unlink("next/obs")
    assert not directory.unlink("nowhere/obs")
    with pytest.raises(UnsafePathError, match="next: this is a dir"):
        directory.unlink("next")


def test_a_link_is_removed_and_not_what_it_leads_to(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (directory.path / "link").symlink_to(tmp_path / "target")
    assert directory.unlink("link")
    assert (tmp_path / "target").exists()


def test_a_directory_is_removed_only_if_it_is_empty(directory: Directory) -> None:
    directory.create("next/obs", 0).close()
    assert not directory.rmdir("next")
    directory.unlink("next/obs")
    assert directory.rmdir("next")
    assert not directory.rmdir("next")
    directory.create("file", 0).close()
    with pytest.raises(UnsafePathError, match="file: this is a reg"):
        directory.rmdir("file")


def test_a_directory_knows_whether_its_path_still_leads_to_it(directory: Directory) -> None:
    path, moved = directory.path, directory.path.with_name("moved")
    assert directory.still_there()
    path.rename(moved)
    assert not directory.still_there()
    path.mkdir()
    assert not directory.still_there()
    path.rmdir()
    path.symlink_to(moved)
    assert not directory.still_there()
    path.unlink()
    moved.rename(path)
    assert directory.still_there()
    path.rmdir()
    path.mkdir()
    assert not directory.still_there()


# The disk.


def test_a_sync_that_fails_is_never_taken_for_a_success(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory.create("obs.memmap", 1)
    directory.sync_file(file.fd)
    directory.sync()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(
        DurabilityError,
        match=r"obs\.memmap: could not be written to the disk \(Input/output error\);",
    ) as info:
        directory.sync_file(file.fd)
    assert info.value.errno == errno.EIO
    with pytest.raises(DurabilityError, match="buffer: could not be written to the disk"):
        directory.sync()
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    directory.sync()  # not all file systems sync directories


def test_nothing_is_left_open(directory: Directory) -> None:
    before = descriptors()
    for _ in range(3):
        directory.create("a/b/c", 1).close()
        directory.write_atomic("a/b/d", b"")
        directory.read("a/b/d", limit=1)
        directory.listdir("a/b")
        directory.sync("a/b")
        directory.rename("a/b/c", "a/b/d")
        directory.unlink("a/b/d")
        directory.rmdir("a/b")
    assert descriptors() == before


# -- directories below -----------------------------------------------------------------------------


def test_a_directory_below_is_made_with_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with Directory.open(tmp_path) as directory:
            assert directory.make("a")
            assert not directory.make("a", mode=0o755)
            with directory.folder("a") as below:
                assert (below.path, below.created) == (tmp_path / "a", False)
                assert stat.S_IMODE(os.fstat(below.file.fd).st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o777])
def test_a_directory_below_a_setgid_one_is_setgid_and_has_its_group(
    tmp_path: Path, umask: int
) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(umask)
    try:
        with Directory.open(tmp_path) as directory:
            for permissions in (0o700, 0o755):
                assert directory.make(f"{permissions:o}", mode=permissions)
                found = (tmp_path / f"{permissions:o}").stat()
                assert stat.S_IMODE(found.st_mode) == stat.S_ISGID | permissions
                assert found.st_gid == tmp_path.stat().st_gid
    finally:
        os.umask(before)


def test_a_link_below_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with (
        Directory.open(tmp_path) as directory,
        pytest.raises(UnsafePathError, match=r"link: .*symbolic link"),
    ):
        directory.folder("link")


def test_a_file_is_moved_into_another_directory(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "one" / "a").write_text("1")
    with Directory.open(tmp_path / "one") as one, Directory.open(tmp_path / "other") as other:
        one.rename("a", "b/c", into=other)
    assert (tmp_path / "other" / "b" / "c").read_text() == "1"


@needs_root
def test_in_a_directory_of_anybody_only_our_own_folders_are_opened(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path, 65534, 65534)
    os.chown(tmp_path / "theirs", 65534, 65534)
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafePathError, match="belongs to uid 65534"):
        Directory.open(tmp_path)
    with Directory.open(tmp_path, any_owner=True) as directory:
        assert directory.listdir() == ["ours", "theirs"]
        directory.folder("ours").close()
        with pytest.raises(UnsafePathError, match="theirs: belongs to uid 65534"):
            directory.folder("theirs")
