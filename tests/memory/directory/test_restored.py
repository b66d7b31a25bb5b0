"""Backups that are restored in place within one boot, and snapshots, are detected.

The backups in these tests are not snapshots, like any backup made beside writers: the leaves are
from one time, the control file and slots from a later one. If they were trusted, each item would be
torn.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shmbuffer import BufferInUseError, recover
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.upkeep.inspect import inspect
from tests.kit.rings import ring_of
from tests.memory.rows import child, contents, require_sound, schema, write

SETTINGS = Settings(capacity=8, alpha=1.0, eps=0.0)
TOOLS = {
    "cp -rT": ["cp", "-rT", "{backup}", "{path}"],
    "cp -aT": ["cp", "-aT", "{backup}", "{path}"],
    # -I: rsync skips files of the same size and time, as files of memory maps are.
    "rsync -rI --inplace": ["rsync", "-rI", "--inplace", "{backup}/", "{path}/"],
    "rsync -aI --inplace": ["rsync", "-aI", "--inplace", "{backup}/", "{path}/"],
    "tar --overwrite": ["sh", "-c", "tar -C {backup} -c . | tar -C {path} -x --overwrite"],
    "tar -m --overwrite": ["sh", "-c", "tar -C {backup} -c . | tar -C {path} -xm --overwrite"],
}


@pytest.fixture(params=["memory", "disk"])
def path(request: pytest.FixtureRequest, fast_path: Path, on_disk: Path) -> Path:
    return (fast_path if request.param == "memory" else on_disk) / "buffer"


def killed(path: Path, settings: Settings = SETTINGS) -> Path:
    """Makes items 8 to 15, whose writer was killed, and a backup with items 4 to 11."""
    backup = path.with_name("backup")

    def victim(parent: object) -> None:
        with Engine.open(path, settings) as engine:
            ring = engine.define(schema(settings.capacity))
            write(ring, range(8))
            shutil.copytree(path, backup)
            write(ring, range(8, 12))
            for name in ("control", "slots"):
                shutil.copy2(path / ".shmbuffer" / name, backup / ".shmbuffer" / name)
            write(ring, range(12, 16))
            os.kill(os.getpid(), 9)

    with child(victim) as process:
        assert process.end() == -9
    return backup


def tick() -> None:
    """Waits until the kernel's clock for files has advanced."""
    coarse = 5  # CLOCK_REALTIME_COARSE of linux/time.h, which Python does not name
    now = time.clock_gettime_ns(coarse)
    while time.clock_gettime_ns(coarse) == now:
        pass


def put_back(tool: str, backup: Path, path: Path) -> None:
    command = [part.format(backup=backup, path=path) for part in TOOLS[tool]]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    tick()
    subprocess.run(command, check=True, timeout=30)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_copy_that_is_put_back_in_place_has_whole_items_only(path: Path, tool: str) -> None:
    backup = killed(path)
    inode = (path / ".shmbuffer/control").stat().st_ino
    put_back(tool, backup, path)
    assert (path / ".shmbuffer/control").stat().st_ino == inode
    assert inspect(path)["needs_recovery"] == "restored"
    report = recover(path)
    assert (report.reason, report.items, report.checksum_failed) == ("restored", 4, 4)
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {n % 8: n for n in range(4, 8)}
        require_sound(engine)


def test_a_buffer_whose_processes_were_killed_is_believed(path: Path) -> None:
    killed(path)
    report = recover(path)
    assert (report.reason, report.items, report.checksum_failed) == ("no client alive", 8, 0)


def test_a_restored_directory_is_believed_after_it_was_verified(path: Path) -> None:
    put_back("cp -rT", killed(path), path)
    assert recover(path).reason == "restored"
    assert recover(path).reason == "no client alive"


def test_a_recovery_of_a_restored_directory_that_dies_is_repeated(path: Path) -> None:
    put_back("cp -rT", killed(path), path)

    def victim(parent: object) -> None:
        _core.arm("recover.tree")
        recover(path)

    with child(victim) as process:
        assert process.end() == -9
    report = recover(path)
    assert (report.reason, report.items) == ("restored", 4)


def test_one_leaf_that_is_put_back_with_its_times_is_found(path: Path) -> None:
    backup = killed(path)
    shutil.copy2(backup / "next/obs.memmap", path / "next/obs.memmap")
    report = recover(path)
    assert (report.reason, report.items, report.checksum_failed) == ("restored", 0, 8)


def test_a_directory_that_was_removed_and_copied_back_is_never_believed(path: Path) -> None:
    """The file system may reuse the inode numbers."""
    backup = killed(path)
    shutil.rmtree(path)
    tick()
    shutil.copytree(backup, path)
    report = recover(path)
    assert report.reason in ("copy", "restored")
    assert (report.items, report.checksum_failed) == (4, 4)


def test_without_checksums_a_restored_directory_is_taken_as_it_is(path: Path) -> None:
    """No checksum can verify the items, so `recover` does not drop them all."""
    put_back("cp -rT", killed(path, replace(SETTINGS, checksum=False)), path)
    report = recover(path)
    assert (report.reason, report.items) == ("no client alive", 8)


def test_a_claim_that_was_open_is_finished_where_the_bytes_may_be_the_writer_s(path: Path) -> None:
    """The file was only touched: its batch is complete, as after any death."""

    def victim(parent: object) -> None:
        with Engine.open(path, SETTINGS) as engine:
            ring = engine.define(schema(8))
            write(ring, range(4))
            _core.arm("write.count", after=0)
            write(ring, range(4, 8))

    with child(victim) as process:
        assert process.end() == -9
    tick()
    os.chmod(path / "next/obs.memmap", 0o600)
    report = recover(path)
    assert (report.reason, report.items) == ("restored", 8)
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {n: n for n in range(8)}
        require_sound(engine)


# On request.


def test_items_are_compared_with_their_checksums_on_request(path: Path) -> None:
    killed(path)
    with (path / "next/obs.memmap").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        memory[37 * 3 : 37 * 3 + 5] = b"\xff" * 5
        memory.close()
    report = recover(path, verify=True)
    assert (report.reason, report.items, report.checksum_failed) == ("no client alive", 7, 1)


def test_a_buffer_in_use_is_not_verified(path: Path) -> None:
    with (
        Engine.open(path, SETTINGS),
        pytest.raises(
            BufferInUseError, match=rf"pids {os.getpid()}\); end these processes first"
        ) as raised,
    ):
        recover(path, verify=True)
    assert raised.value.pids == [os.getpid()]


def test_without_checksums_there_is_nothing_to_verify_and_nothing_is_dropped(path: Path) -> None:
    killed(path, replace(SETTINGS, checksum=False))
    report = recover(path, verify=True)
    assert (report.items, report.checksum_failed, report.unverified) == (8, 0, 8)


# A snapshot.


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """Mounts an ext4 file system from a file, if this process may mount one."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-o", "loop", image, at], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True, timeout=30)


def elsewhere(program: str, path: Path) -> str:
    """Runs a program in another process, because maps of this one would block the unmount."""
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


WRITER = """
import os, sys
from pathlib import Path
from tests.memory.directory.test_restored import killed
killed(Path(sys.argv[1]))
"""
RECOVERED = """
import json, sys
from shmbuffer import recover
print(json.dumps(recover(sys.argv[1]).to_json()))
"""


@pytest.mark.full
def test_a_snapshot_that_is_rolled_back_is_verified(on_disk: Path) -> None:
    """Times and inodes are unchanged, but the kernel's memory is not."""
    image, snapshot, at = on_disk / "image", on_disk / "snapshot", on_disk / "mounted"
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=30)
    with mounted(image, at):
        elsewhere(WRITER, at / "buffer")
        found = (at / "buffer/.shmbuffer/control").stat()
        assert json.loads(elsewhere(RECOVERED, at / "buffer"))["reason"] == "no client alive"
    shutil.copy(image, snapshot)
    with mounted(image, at):
        assert json.loads(elsewhere(RECOVERED, at / "buffer"))["reason"] == "restored"
    os.replace(snapshot, image)
    with mounted(image, at):
        again = (at / "buffer/.shmbuffer/control").stat()
        assert (again.st_dev, again.st_ino) == (found.st_dev, found.st_ino)
        report = json.loads(elsewhere(RECOVERED, at / "buffer"))
        assert (report["reason"], report["items"]) == ("restored", 8)


@pytest.mark.full
def test_one_leaf_that_is_put_back_without_its_times_is_found_a_second_later(path: Path) -> None:
    backup = killed(path)
    with Engine.open(path, None) as engine:
        engine.seat.control.touch()
    until = time.time() + 1.1
    while time.time() < until:
        pass
    shutil.copyfile(backup / "next/obs.memmap", path / "next/obs.memmap")
    assert recover(path).checksum_failed == 8


def test_a_clock_that_was_ahead_has_items_verified_once(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(ring_of(engine) if engine.ring() else engine.define(schema(8)), range(8))
        engine.seat.control.entries["last_seen_ns"][7] = time.time_ns() + 10**14
    assert [recover(path).reason for _ in range(2)] == ["restored", "no client alive"]
