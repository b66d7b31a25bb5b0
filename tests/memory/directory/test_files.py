"""The files of a buffer after a power cut: all of them exist once the buffer was created."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbuffer.memory import Engine, Leaf, Schema, Settings


@contextmanager
def unsynced(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yields the directories with new names that were not synced yet.

    Lock files and their directory are ignored, because a process that needs one creates it.
    """
    found: set[str] = set()
    real: dict[str, Any] = {name: getattr(os, name) for name in ("open", "mkdir", "rename")}

    def changed(folder: int | None, name: str | os.PathLike[str]) -> None:
        if folder is not None and not os.fspath(name).endswith((".lock", "procs")):
            found.add(os.readlink(f"/proc/self/fd/{folder}"))

    def opened(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **more: Any) -> int:
        if flags & os.O_CREAT:
            changed(dir_fd, path)
        return int(real["open"](path, flags, *args, dir_fd=dir_fd, **more))

    def made(path: Any, *args: Any, dir_fd: int | None = None) -> None:
        real["mkdir"](path, *args, dir_fd=dir_fd)
        changed(dir_fd, path)

    def renamed(old: Any, new: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        changed(src_dir_fd, old)
        changed(dst_dir_fd, new)

    def synced(fd: int) -> None:
        found.discard(os.readlink(f"/proc/self/fd/{fd}"))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        patched.setattr(os, "mkdir", made)
        patched.setattr(os, "rename", renamed)
        patched.setattr(os, "fsync", synced)
        yield found


def test_the_control_file_has_its_name_on_the_disk_when_a_buffer_was_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unsynced(monkeypatch) as directories, Engine.open(path, Settings(capacity=8)):
        assert (path / ".shmbuffer/control").exists()
        assert str(path / ".shmbuffer") not in directories


@pytest.mark.parametrize("record_bytes", [0, 8192], ids=["rows", "records"])
def test_every_file_has_its_name_on_the_disk_when_a_schema_was_defined(
    path: Path, monkeypatch: pytest.MonkeyPatch, record_bytes: int
) -> None:
    leaves = (Leaf(("number",), "int64", ()), Leaf(("next", "deep", "obs"), "float32", (3,)))
    schema = (
        Schema((), 8, (), {"kind": "records"}, record_bytes) if record_bytes else Schema(leaves, 8)
    )
    settings = Settings(capacity=8, record_bytes=record_bytes)
    with unsynced(monkeypatch) as directories, Engine.open(path, settings) as engine:
        engine.define(schema)
        assert directories == set()
        assert (path / ".shmbuffer/slots").exists()
