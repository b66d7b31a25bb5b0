"""The file system of a buffer: whether it is reliable, and how much space it has."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from shmbuffer import UnsafeFilesystemError
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.region import Directory


@pytest.mark.parametrize(("path", "magic"), [("/proc", 0x9FA0), ("/dev/shm", 0x01021994)])
def test_the_kernel_tells_the_type_of_a_file_system(path: str, magic: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    assert filesystem.filesystem_type(fd) == magic
    os.close(fd)


def test_a_type_that_cannot_be_told_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        filesystem.filesystem_type(-1)


@pytest.mark.parametrize("magic", filesystem.UNSAFE)
def test_a_network_file_system_is_refused_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int
) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda fd: magic)
    name = filesystem.UNSAFE[magic]
    with pytest.raises(
        UnsafeFilesystemError,
        match=rf"buffer: this directory is on {name}, .* choose a directory on a local disk",
    ) as info:
        Directory.open(tmp_path / "buffer", create=True)
    assert info.value.parts["filesystem"] == name
    assert os.listdir(tmp_path) == []


def test_a_network_file_system_is_accepted_where_the_user_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda fd: 0x6969)
    Directory.open(tmp_path / "buffer", create=True, allow_unsafe_fs=True).close()


@pytest.mark.parametrize(
    "magic",
    [0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0x858458F6, 1],
    ids=["ext4", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs", "f2fs", "ramfs", "unknown"],
)
def test_a_local_file_system_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int
) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda fd: magic)
    Directory.open(tmp_path).close()


def test_the_sign_of_a_magic_number_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """32-bit kernel interfaces show the magic number of CIFS as negative."""

    class Kernel:
        @staticmethod
        def fstatfs(fd: ctypes.c_int, answer: ctypes.Array[ctypes.c_char]) -> int:
            ctypes.c_long.from_buffer(answer).value = 0xFF534D42 - 2**32
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Kernel)
    assert filesystem.UNSAFE[filesystem.filesystem_type(0)] == "CIFS"


def test_a_file_system_without_a_limit_is_never_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    unlimited = os.statvfs_result((real.f_bsize, real.f_frsize, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: unlimited)
    with Directory.open(tmp_path) as directory:
        assert directory.free_bytes() > 2**50


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1_048_575, "1048575 bytes"),
        (1_048_576, "1.0 MiB (1048576 bytes)"),
        (1_610_612_736, "1.5 GiB (1610612736 bytes)"),
        (2**52, "4096.0 TiB (4503599627370496 bytes)"),
    ],
)
def test_sizes_are_shown_to_people(nbytes: int, text: str) -> None:
    assert filesystem.human_size(nbytes) == text


def test_an_error_for_want_of_room_says_what_kind_of_room() -> None:
    error = filesystem.space_error("leaf", 2, 1)
    assert str(error) == (
        "leaf: 2 bytes are needed, and 1 bytes are free;"
        " free some space, make the buffer smaller, or choose another directory"
    )
    assert (error.errno, error.parts["needed_bytes"], error.parts["free_bytes"]) == (
        errno.ENOSPC,
        2,
        1,
    )
