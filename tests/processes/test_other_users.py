"""Users who may inspect a directory: root, and users who may read its files. Nothing changes."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferInUseError,
    CorruptBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    ReadOnlyError,
    SpaceError,
    TensorDictPrioritizedReplayBuffer,
    UnsafePathError,
)
from shmbuffer.cli import exits, main
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.attaching import open_copy
from shmbuffer.memory.clients import locks
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import private_copy as copying
from shmbuffer.memory.system.private_copy import private_copy
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import copied_buffer
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.copied_buffer import copy_buffer
from shmbuffer.memory.upkeep.inspect import inspect
from tests.cli.contents import contents
from tests.crash.harness import SETTINGS, ended, fork, read_all, schema, write
from tests.service import items

OWNER, COLLEAGUE, GROUP = 65534, 65533, 4242

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
READING = [
    pytest.param(verb, id=verb[0])
    for verb in (
        ("inspect",),
        ("list",),
        ("ps",),
        ("top", "--once"),
        ("check",),
        ("plot", "--json"),
        ("export",),
    )
]


def be(user: int) -> None:
    os.setgroups([GROUP] if user == COLLEAGUE else [])
    os.setgid(user)
    os.setuid(user)


def by(user: int, body: Callable[[], None]) -> None:
    """Runs ``body`` in a process of that user, which has to succeed."""

    def run() -> None:
        be(user)
        body()

    assert ended(fork(run)) == 0


def give(path: Path, owner: int = OWNER, group: int = GROUP) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, owner, group, follow_symlinks=False)


def allow_group(path: Path) -> None:
    """Changes permissions like `chmod -R g+rX`."""
    for one in (path, *path.rglob("*")):
        one.chmod(stat.S_IMODE(one.stat().st_mode) | (0o050 if one.is_dir() else 0o040))


def facts(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns mode, owner, size and times of all files, to compare them later."""
    found = {str(one): one.lstat() for one in (path, *path.rglob("*"))}
    return {
        name: (one.st_mode, one.st_uid, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
        for name, one in found.items()
    }


@pytest.fixture
def public(fast_path: Path) -> Path:
    fast_path.chmod(0o755)
    return fast_path


@pytest.fixture
def theirs(public: Path) -> Path:
    """A buffer of another user, which is not in use."""
    path = public / "theirs"
    with items.create(path, 8) as engine:
        items.write(engine, range(12))
    give(path)
    return path


@contextmanager
def writing(path: Path, *, checksum: bool = True) -> Iterator[None]:
    """Runs a process of another user that writes all the time to a full ring."""
    options = replace(SETTINGS, capacity=4096, checksum=checksum)
    ready, told = os.pipe()

    def fill(engine: Engine) -> Ring:
        ring = engine.define(replace(schema(), capacity=options.capacity))
        write(ring, range(options.capacity))
        return ring

    def body() -> None:
        be(OWNER)
        with Engine.open(path, options) as engine:
            ring = fill(engine)
            os.write(told, b"x")
            for number in itertools.count(options.capacity):
                write(ring, [number])

    # Lazy imports are done here, because the other user may not read this environment.
    with Engine.open(path, options) as engine:
        fill(engine)
    shutil.rmtree(path)
    path.mkdir()
    os.chown(path, OWNER, OWNER)
    pid = fork(body)
    os.close(told)  # so that the death of the writer is noticed
    try:
        assert os.read(ready, 1) == b"x", "the writer failed; its traceback is above"
        yield
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def command(verb: tuple[str, ...], path: Path, out: Path) -> list[str]:
    return [*verb, str(path), *([str(out)] if verb == ("export",) else [])]


@only_root
@pytest.mark.parametrize("verb", READING)
def test_root_reads_the_buffer_of_another_user_and_changes_nothing(
    verb: tuple[str, ...], theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, known = contents(theirs), facts(theirs)
    assert main(command(verb, theirs, tmp_path / "out")) == exits.DONE
    captured = capsys.readouterr()
    assert str(theirs) in captured.out or verb == ("export",)
    assert captured.err == ""
    assert (contents(theirs), facts(theirs)) == (before, known)


@only_root
@pytest.mark.parametrize("verb", READING)
def test_a_buffer_that_another_user_writes_is_read_without_a_lock(
    verb: tuple[str, ...],
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, flock = public / "live", fcntl.flock

    def watched(fd: int, operation: int) -> None:
        assert not os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)), "a lock was tried"
        flock(fd, operation)

    with writing(path):
        monkeypatch.setattr(fcntl, "flock", watched)
        # New files would be found, such as a lock file of this process.
        known = sorted(contents(path))
        assert main(command(verb, path, tmp_path / "out")) == exits.DONE
        assert sorted(contents(path)) == known
    assert capsys.readouterr().err == ""


@only_root
def test_items_are_whole_in_a_copy_of_a_ring_that_is_written_meanwhile(public: Path) -> None:
    # Without checksums, only the slot words show changes.
    for checksum in (False, True):
        path = public / f"live {checksum}"
        with writing(path, checksum=checksum):
            seen = 0
            for _ in range(20):
                engine, _ = open_copy(path)
                with engine:
                    ring = engine.ring()
                    assert ring is not None
                    assert engine.report is not None
                    assert (engine.report.reason, engine.report.checksum_failed) == ("in use", 0)
                    seen += len(read_all(ring))
            assert seen


@only_root
def test_a_check_of_a_buffer_in_use_leaves_out_what_a_lock_would_be_needed_for(
    public: Path,
) -> None:
    path = public / "live"
    with writing(path):
        report = check(path)
    assert (report.ok, report.alive) == (True, True)
    assert any("a copy was checked without a lock" in note for note in report.notes)


@only_root
def test_a_check_finds_damage_in_the_buffer_of_another_user(theirs: Path) -> None:
    leaf = theirs / "number.memmap"
    leaf.write_bytes(b"\xff" + leaf.read_bytes()[1:])
    report = check(theirs)
    assert report.problems == ["slot 0: the bytes do not match their checksum"]
    assert (report.items, report.alive) == (8, False)


@only_root
def test_items_that_are_overwritten_while_they_are_copied_are_left_out(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = public / "theirs"
    with items.create(path, 8) as engine:
        items.write(engine, range(8))
        take_out = copied_buffer._empty_changed

        def overwritten(*copy: object) -> int:
            items.write(engine, [8, 9])
            return take_out(*copy)  # type: ignore[arg-type]

        monkeypatch.setattr(copied_buffer, "_empty_changed", overwritten)
        give(path)
        other, changed = open_copy(path)
        with other:
            assert changed == 2
            assert items.read(other) == [2, 3, 4, 5, 6, 7]
        assert "2 items were skipped" in str(check(path))
        give(path, 0, 0)


@only_root
def test_a_buffer_that_is_defined_anew_while_it_is_copied_is_an_error(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out = copied_buffer._empty_changed

    def recovered(*copy: object) -> int:
        give(theirs, 0, 0)
        Engine.open(theirs, None, existing="recover").close()
        give(theirs)
        return take_out(*copy)  # type: ignore[arg-type]

    monkeypatch.setattr(copied_buffer, "_empty_changed", recovered)
    with (
        Directory.open(theirs, reading=True) as directory,
        pytest.raises(BufferInUseError, match=r"recovered or redefined .*; call again"),
    ):
        copy_buffer(Files(directory))


@only_root
@pytest.mark.parametrize("kind", ["rows", "next stored once", "records"])
def test_root_sees_what_the_owner_sees(kind: str, public: Path) -> None:
    path = public / "theirs"
    options = {"scratch_dir": path, "shared_init": True}
    storage: LazyMemmapStorage | LazyStackStorage
    if kind == "records":
        storage = LazyStackStorage(64, max_bytes=2**16, **options)
    else:
        storage = LazyMemmapStorage(64, share_next=kind != "rows", **options)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=4)
    obs = torch.arange(200.0).view(50, 4)
    data = TensorDict({"obs": obs, "next": {"obs": obs + 4, "done": obs[:, 0] > 1e6}}, [50])
    for row in data:
        rb.add(row)
    rb.publish({"w": torch.arange(3.0)}, step=5)
    rb.sample()
    keys = ("counters", "schema", "records", "sharing", "weights", "consumers", "priorities")
    own = inspect(path, priorities=True)
    give(path)
    seen = inspect(path, priorities=True)
    assert {key: seen[key] for key in keys} == {key: own[key] for key in keys}
    assert [client["alive"] for client in seen["clients"]] == [True]
    assert seen["partials"] is None
    report = check(path)
    assert (report.problems, report.items, report.verified) == ([], 50, 50)
    give(path, 0, 0)
    rb.close()


@only_root
def test_a_colleague_may_read_once_the_owner_has_let_the_group(theirs: Path) -> None:
    def refused() -> None:
        with pytest.raises(ReadOnlyError, match=rf"{theirs}.*uid {OWNER}.*chmod -R g\+rX"):
            inspect(theirs)

    def reads() -> None:
        assert inspect(theirs)["counters"]["length"] == 8
        assert check(theirs).verified == 8
        engine, _ = open_copy(theirs)
        with engine:
            assert len(items.read(engine)) == 8
        with pytest.raises(UnsafePathError, match="run as its owner"):
            Engine.open(theirs, None)

    by(COLLEAGUE, refused)
    allow_group(theirs)
    before = contents(theirs)
    by(COLLEAGUE, reads)
    assert contents(theirs) == before


def modes(path: Path) -> dict[str, int]:
    return {
        str(one.relative_to(path)): stat.S_IMODE(one.stat().st_mode) & 0o777
        for one in path.rglob("*")
    }


def test_new_files_are_for_their_owner_until_the_owner_lets_the_group_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buffer"
    # The user wants others to list the directory, and did not decide about the files.
    path.mkdir(mode=0o755)
    with items.create(path, 8) as engine:
        items.write(engine, [1])
    found = modes(path)
    assert set(found.values()) == {0o600, 0o700}
    allow_group(path / ".shmbuffer")
    with Directory.open(path) as directory:
        directory.make(layout.PARTIALS)
        directory.create("later/one", 1).close()
        directory.write_atomic("later/two", b"2")
        directory.open_lock(f"{layout.PRIVATE}/new.lock").close()
    later = {name: mode for name, mode in modes(path).items() if name not in found}
    assert later == {
        ".shmbuffer/partials": 0o750,
        "later": 0o750,
        "later/one": 0o640,
        "later/two": 0o640,
        # A user who may open a lock file may lock it.
        ".shmbuffer/new.lock": 0o600,
    }


@only_root
def test_a_buffer_that_is_defined_later_can_be_read_by_the_group(public: Path) -> None:
    path = public / "theirs"
    with items.create(path, 8) as engine:
        allow_group(path)
        items.write(engine, range(3))

    def reads() -> None:
        assert check(path).verified == 3

    for one in (path, *path.rglob("*")):
        os.chown(one, OWNER, GROUP)
    by(COLLEAGUE, reads)


@only_root
@pytest.mark.parametrize("name", [layout.CONTROL, layout.SLOTS, layout.LEDGER, "number.memmap"])
@pytest.mark.parametrize("trap", ["link", "FIFO", "device", "folder", "hard link"])
def test_a_trap_in_the_place_of_a_file_of_another_user_is_refused(
    trap: str, name: str, theirs: Path, public: Path
) -> None:
    place, kept = theirs / name, public / "kept"
    place.rename(kept)
    if trap == "link":
        place.symlink_to(kept)
    elif trap == "FIFO":
        os.mkfifo(place)
    elif trap == "folder":
        place.mkdir()
    elif trap == "hard link":
        place.hardlink_to(kept)
    else:
        try:
            os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # has no end
        except PermissionError:
            pytest.skip("no device files can be made here")
    os.chown(place, OWNER, OWNER, follow_symlinks=False)
    with pytest.raises(UnsafePathError, match=rf"{place.name}: "):
        check(theirs)


@only_root
def test_a_linked_directory_of_another_user_is_refused(theirs: Path) -> None:
    (theirs / ".shmbuffer").rename(theirs / "elsewhere")
    (theirs / ".shmbuffer").symlink_to("elsewhere")
    with pytest.raises(UnsafePathError, match=r"shmbuffer: .*a symbolic link"):
        inspect(theirs)


@only_root
@pytest.mark.parametrize("name", ["number.memmap", layout.SLOTS, layout.CONTROL])
def test_a_file_that_is_cut_off_while_it_is_copied_is_an_error(
    name: str, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copying.data_ranges

    def cut(fd: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        found = list(whole(fd, first, end))
        if os.path.samestat(os.fstat(fd), os.stat(theirs / name)):
            os.truncate(theirs / name, 4)
        return iter(found)

    monkeypatch.setattr(copying, "data_ranges", cut)
    with pytest.raises(CorruptBufferError, match=rf"{name}: the file has 4 bytes instead of \d+"):
        open_copy(theirs)


@only_root
def test_no_number_of_another_user_leads_behind_the_end_of_a_file(theirs: Path) -> None:
    ledger = theirs / layout.LEDGER
    page = bytearray(ledger.read_bytes())
    page[:] = b"\xff" * len(page)  # eight consumers with all possible items
    ledger.write_bytes(page)
    assert inspect(theirs)["consumers"] == []
    assert "ledger" in check(theirs).problems[0]


@only_root
def test_nothing_is_written_in_the_directory_of_another_user(theirs: Path) -> None:
    before, known = contents(theirs), facts(theirs)
    with Directory.open(theirs, reading=True) as directory, Directory.open(theirs.parent) as ours:
        for call in (
            lambda: directory.create("new", 1),
            lambda: directory.make("new"),
            lambda: directory.open_file(layout.CONTROL),
            lambda: directory.open_lock(locks.INIT_LOCK),
            lambda: directory.write_atomic(layout.SCHEMA, b""),
            lambda: directory.rename(layout.SCHEMA, "new"),
            lambda: directory.rename(layout.SCHEMA, "new", into=ours),
            lambda: directory.unlink(layout.SCHEMA),
            lambda: directory.rmdir(layout.PRIVATE),
        ):
            with pytest.raises(UnsafePathError, match=f"belongs to uid {OWNER}"):
                call()
    assert (contents(theirs), facts(theirs)) == (before, known)


@only_root
@pytest.mark.parametrize("verb", ["recover", "set", "stop", "serve"])
def test_writing_verbs_still_refuse_the_buffer_of_another_user(
    verb: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, known = contents(theirs), facts(theirs)
    options = ["--capacity=8", "--on-existing=recover"] if verb == "serve" else []
    assert main([verb, str(theirs), *options]) != exits.DONE
    assert f"belongs to uid {OWNER}" in capsys.readouterr().err
    assert (contents(theirs), facts(theirs)) == (before, known)


@only_root
def test_a_client_in_another_container_cannot_be_seen(
    public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = public / "theirs"
    with items.create(path, 8) as engine:
        items.write(engine, [1])
        engine.seat.control.entries["pid_namespace"][engine.seat.entry] += 1
        give(path)
        (client,) = inspect(path)["clients"]
        assert (client["alive"], client["state"], client["memory_bytes"]) == (True, "unknown", None)
        assert main(["ps", str(path)]) == exits.DONE
        assert "unknown" in capsys.readouterr().out
        assert "cannot determine whether all clients are alive" in str(check(path))
        give(path, 0, 0)


@only_root
def test_a_killed_client_of_another_user_is_found_dead(public: Path) -> None:
    path = public / "live"
    with writing(path):
        assert [client["alive"] for client in inspect(path)["clients"]] == [True]
    assert [client["alive"] for client in inspect(path)["clients"]] == [False]
    assert not check(path).alive


@only_root
def test_a_copy_larger_than_the_memory_is_refused_with_both_numbers(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "free_memory_bytes", lambda: 4096)
    with pytest.raises(SpaceError, match=r"must be copied into memory, .* 4096 bytes are free"):
        check(theirs)


def test_holes_that_are_read_count_as_memory(fast_path: Path) -> None:
    path, room = fast_path / "file", 2**43
    with path.open("wb+") as file:
        file.truncate(room)
        private_copy(file.fileno(), path, size=room, copy_size=room).close()
        with pytest.raises(SpaceError, match=r"file: 8\.0 TiB .* must be copied into memory"):
            private_copy(file.fileno(), path, size=room, copy_size=room, dense=True)


def test_holes_of_a_file_are_holes_of_its_copy(fast_path: Path) -> None:
    path, page = fast_path / "file", os.sysconf("SC_PAGESIZE")
    with path.open("wb+") as file:
        file.truncate(1000 * page)
        os.pwrite(file.fileno(), b"here", 500 * page)
        with private_copy(file.fileno(), path, size=1000 * page, copy_size=1001 * page) as copy:
            assert os.pread(copy.fd, 6, 500 * page) == b"here\0\0"
            found = os.fstat(copy.fd)
            assert (found.st_size, found.st_blocks) == (1001 * page, page // 512)
        parts = [(0, 500 * page + 2)]
        with private_copy(
            file.fileno(), path, size=1000 * page, copy_size=1000 * page, parts=parts
        ) as (copy):
            assert os.pread(copy.fd, 4, 500 * page) == b"he\0\0"


READ_ONLY = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
path = sys.argv[1].encode()
private, bind, remount, read_only = 1 << 18, 4096, 32, 1
if (
    libc.unshare(0x00020000)
    or libc.mount(b"none", b"/", None, 16384 | private, None)
    or libc.mount(path, path, None, bind, None)
    or libc.mount(b"none", path, None, bind | remount | read_only, None)
):
    sys.exit(77)
from shmbuffer.cli import main
code = 0
for argv in sys.argv[2:]:
    code |= main(argv.split("|"))
sys.exit(code)
"""


@pytest.mark.parametrize("living", [False, True], ids=["left", "in use"])
def test_the_owner_checks_and_exports_what_lies_on_a_read_only_file_system(
    living: bool, tmp_path: Path
) -> None:
    path, out = tmp_path / "buffer", tmp_path / "out"
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyMemmapStorage(8, scratch_dir=path, shared_init=True)
    )
    rb.extend(TensorDict({"obs": torch.arange(12)}, [12]))
    if not living:
        rb.close()
    verbs = [f"check|{path}|--json", f"export|{path}|{out}|--json"]
    run = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(path), *verbs], capture_output=True, text=True
    )
    if run.returncode == 77:
        pytest.skip("no file system can be mounted here")
    assert (run.returncode, run.stderr) == (0, "")
    checked, exported = map(json.loads, run.stdout.splitlines())
    assert (checked["ok"], checked["verified"], checked["alive"]) == (True, 8, living)
    assert (exported["items"], exported["left_out"]) == (8, 0)
    assert TensorDict.load_memmap(out)["obs"].tolist() == list(range(4, 12))
    rb.close()
