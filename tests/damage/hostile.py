"""Traps that an attacker may put in the place of a file of the library."""

from __future__ import annotations

import os
import signal
import socket
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory import removal
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import ended, fork
from tests.damage.judgement import answer
from tests.damage.specimen import Specimen, contents

#: Another user id, which can be used if this process may change the owner of files.
STRANGER = 12345

_HANGS_S = 120

Trap = Callable[[Path, Path], None]


def ends_in_time(body: Callable[[], object]) -> int:
    """Runs ``body`` in a child; returns its exit status, or ``-SIGALRM`` if it did not return."""

    def limited() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_HANGS_S)
        body()

    return ended(fork(limited))


def bind_socket(path: Path) -> None:
    """Makes a socket without a listening process."""
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _instead(make: Callable[[Path], object]) -> Trap:
    def trap(path: Path, victim: Path) -> None:
        path.unlink()
        make(path)

    return trap


def _link(path: Path, victim: Path) -> None:
    victim.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(victim)


def _hard_link(path: Path, victim: Path) -> None:
    victim.unlink()
    os.link(path, victim)


def _folder_of_links(path: Path, victim: Path) -> None:
    """Makes the directory of the file a link to a directory of another user."""
    folder = path.parent
    os.rename(folder, victim.parent / "their folder")
    folder.symlink_to(victim.parent / "their folder")


TRAPS: dict[str, Trap] = {
    "nothing": _instead(lambda path: None),
    "a link": _link,
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a hard link": _hard_link,
    "a FIFO": _instead(os.mkfifo),
    "a directory": _instead(os.mkdir),
    "a socket": _instead(bind_socket),
    "an empty file": lambda path, victim: os.truncate(path, 0),
    "a byte more": lambda path, victim: os.truncate(path, path.stat().st_size + 1),
    "a folder that is a link": _folder_of_links,
}
ROOT_TRAPS: dict[str, Trap] = {
    "a device": _instead(
        lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    ),
    "a stranger's file": lambda path, victim: os.chown(path, STRANGER, STRANGER),
    "a stranger's folder": lambda path, victim: os.chown(path.parent, STRANGER, STRANGER),
}


def spring(specimen: Specimen, name: str, trap: Trap) -> None:
    """Inspects, opens, removes and recreates a buffer with a trap in the place of a file.

    The calls may fail, but change nothing outside of the buffer's directory.
    """
    victim = specimen.path.parent / "victim" / "precious"
    victim.parent.mkdir(exist_ok=True)
    path = specimen.path
    for use in (inspect, check, _opened, _removed, _made_anew):
        specimen.renew()
        victim.write_bytes(b"precious")
        trap(path / name, victim)
        before = _everything(victim.parent)
        found = answer(lambda use=use: use(path), specimen)  # type: ignore[misc]
        if use is _opened and found is not None:
            assert found == specimen.truth
        assert _everything(victim.parent) == before, f"{use.__name__} changed another's file"
        _put_back(victim.parent, path, name)


def _opened(path: Path) -> object:
    with Engine.open(path, None, timeout=0.5) as engine:
        return contents(engine.ring()) if engine.ring() is not None else None


def _removed(path: Path) -> object:
    return removal.remove(path, uuid.UUID(inspect(path)["uuid"]).bytes, timeout=0.5)


def _made_anew(path: Path) -> object:
    with Engine.open(path, Settings(capacity=4), existing="overwrite", timeout=0.5) as engine:
        return engine.settings.capacity


def _everything(folder: Path) -> dict[str, bytes]:
    """Returns the contents of regular files below a folder by name. Lock files are always empty."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }


def _put_back(theirs: Path, path: Path, name: str) -> None:
    folder = (path / name).parent
    if folder.is_symlink():
        folder.unlink()
        os.rename(theirs / "their folder", folder)
    for left in path.rglob("*"):
        if not left.is_symlink():
            os.chown(left, os.geteuid(), -1)
