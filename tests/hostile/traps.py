"""Traps that another user may put in the way of a call: in the place of a file, or around the path.

A correct call does not follow, wait for, change or remove a trap.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from tests.damage.hostile import STRANGER, bind_socket

PRECIOUS = b"precious"
InPlace = Callable[[Path, Path], None]
"""Puts a trap in a place; also gets a directory outside with the targets of links."""
Around = Callable[[Path, Path], None]
"""Puts traps around the path of the call; also gets a directory outside."""


def make_away(away: Path) -> None:
    """Creates the directory outside, with a file and a directory that no call may touch."""
    (away / "folder").mkdir(parents=True)
    for path in (away / "precious", away / "folder" / "precious"):
        path.write_bytes(PRECIOUS)
        path.chmod(0o600)


def _cleared(place: Path, away: Path) -> Path:
    """Moves an existing object at the place to the directory outside; returns a link target."""
    if not os.path.lexists(place):
        return away / "precious"
    target = away / f"moved {len(os.listdir(away))}"
    os.rename(place, target)
    if target.is_dir() and not target.is_symlink():
        (target / "precious").write_bytes(PRECIOUS)
    return target


def _a_link(place: Path, away: Path) -> None:
    place.symlink_to(_cleared(place, away))


def _a_link_to_a_directory(place: Path, away: Path) -> None:
    _cleared(place, away)
    place.symlink_to(away / "folder")


def _a_dangling_link(place: Path, away: Path) -> None:
    _cleared(place, away)
    place.symlink_to(away / "absent")


def _a_link_to_itself(place: Path, away: Path) -> None:
    _cleared(place, away)
    place.symlink_to(place.name)


def _a_hard_link(place: Path, away: Path) -> None:
    target = _cleared(place, away)
    os.link(away / "precious" if target.is_dir() else target, place)


def _a_fifo(place: Path, away: Path) -> None:
    _cleared(place, away)
    os.mkfifo(place)


def _a_socket(place: Path, away: Path) -> None:
    _cleared(place, away)
    bind_socket(place)


def _another_kind(place: Path, away: Path) -> None:
    """Puts a file in the place of a directory, or a directory with a file in any other place."""
    if _cleared(place, away).is_dir():
        place.write_bytes(PRECIOUS)
    else:
        place.mkdir()
        (place / "precious").write_bytes(PRECIOUS)


def _nothing(place: Path, away: Path) -> None:
    _cleared(place, away)


def _device(minor: int) -> InPlace:
    def trap(place: Path, away: Path) -> None:
        _cleared(place, away)
        os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, minor))

    return trap


def _of_a_stranger(place: Path, away: Path) -> None:
    if not os.path.lexists(place):
        place.write_bytes(PRECIOUS)
    os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


IN_PLACE: dict[str, InPlace] = {
    "nothing": _nothing,
    "a link": _a_link,
    "a link to a directory": _a_link_to_a_directory,
    "a dangling link": _a_dangling_link,
    "a link to itself": _a_link_to_itself,
    "a hard link": _a_hard_link,
    "a FIFO": _a_fifo,
    "a socket": _a_socket,
    "kind": _another_kind,
}
FOLLOWED = ("a link", "a link to a directory", "a dangling link", "a link to itself")
"""Links of this user at the end of a path. They are followed, as SECURITY.md says."""
ROOT_IN_PLACE: dict[str, InPlace] = {
    "an empty device": _device(3),
    "an endless device": _device(5),
    "a stranger's": _of_a_stranger,
}


# -- around the path -------------------------------------------------------------------------------


def guessable(path: Path) -> list[Path]:
    """Returns names beside the path, and in it, that a program could use for temporary files."""
    name, pid = path.name, os.getpid()
    beside = [f".{name}.{pid}", f"{name}.{pid}", f"{name}.tmp", f".{name}.tmp", f"{name}.kept"]
    beside += [f".{name}.{pid}.kept", f"{name}.lock", ".lock", f".{name}.shmbuffer-save"]
    found = [path.parent / each for each in beside]
    if path.is_dir() and not path.is_symlink():
        within = ["shards-raw", f"shards.json.{pid}", ".lock", ".x.tmp", "x.kept", f".x.{pid}"]
        found += [path / each for each in within]
    return [each for each in found if not os.path.lexists(each)]


def _links_beside(path: Path, away: Path) -> None:
    for each in guessable(path):
        each.symlink_to(away / "precious")


def _dangling_links_beside(path: Path, away: Path) -> None:
    for number, each in enumerate(guessable(path)):
        each.symlink_to(away / f"absent {number}")


def _files_beside(path: Path, away: Path) -> None:
    for each in guessable(path):
        each.write_bytes(PRECIOUS)


def _directories_beside(path: Path, away: Path) -> None:
    for each in guessable(path):
        each.mkdir()
        (each / "precious").write_bytes(PRECIOUS)


def _is_directory(path: Path) -> bool:
    """Creates a directory if nothing is there; returns True if there is a directory."""
    if not os.path.lexists(path):
        path.mkdir()
    return path.is_dir() and not path.is_symlink()


def _files_within(path: Path, away: Path) -> None:
    if _is_directory(path):
        (path / "shards-old").mkdir()
        (path / "shards-old" / "precious").write_bytes(PRECIOUS)
        (path / "shards-notes.txt").write_bytes(PRECIOUS)


def _open_above(path: Path, away: Path) -> None:
    path.parent.chmod(0o777)


def _open(path: Path, away: Path) -> None:
    if _is_directory(path):
        path.chmod(path.stat().st_mode | stat.S_IRWXO)


def _read_only_above(path: Path, away: Path) -> None:
    path.parent.chmod(0o555)


def _read_only(path: Path, away: Path) -> None:
    if path.is_dir():
        path.chmod(0o555)
    path.parent.chmod(0o555)


def _above_of_a_stranger(path: Path, away: Path) -> None:
    os.chown(path.parent, STRANGER, STRANGER)
    _links_beside(path, away)


def _of_a_stranger_whole(path: Path, away: Path) -> None:
    """Makes the path a directory of another user, with links under all guessable names."""
    _is_directory(path)
    _links_beside(path, away)
    for each in (path, *path.rglob("*")):
        os.chown(each, STRANGER, STRANGER, follow_symlinks=False)


def _a_stranger_s_link_in_a_sticky_directory(path: Path, away: Path) -> None:
    _a_link_to_a_directory(path, away)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    path.parent.chmod(0o1777)


def _a_stranger_s_link_to_a_file(path: Path, away: Path) -> None:
    _a_link(path, away)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    path.parent.chmod(0o1777)


FREE = "nothing around"
"""The name of a scene without a trap, in which the call has to succeed."""
AROUND: dict[str, Around] = {
    FREE: lambda path, away: None,
    "umask 0": lambda path, away: None,
    "links beside": _links_beside,
    "dangling links beside": _dangling_links_beside,
    "files beside": _files_beside,
    "directories beside": _directories_beside,
    "files within": _files_within,
    "open above": _open_above,
    "open": _open,
    "read-only above": _read_only_above,
    "read-only": _read_only,
}
ROOT_AROUND: dict[str, Around] = {
    "above of a stranger": _above_of_a_stranger,
    "whole of a stranger": _of_a_stranger_whole,
    "a stranger's link, sticky": _a_stranger_s_link_in_a_sticky_directory,
    "a stranger's link to a file, sticky": _a_stranger_s_link_to_a_file,
}
LIMITED = ("read-only above", "read-only")
"""Traps that are tried without root's capabilities, because root may write anywhere."""
