"""A trial: a scene with a trap, a call, and the checks of the effects of the call.

    <base>/here/<path>       what the call is given, and what others put beside it
    <base>/away              victims: what links lead to
    <base>/aside             files that the call needs elsewhere

A call succeeds, or raises an error of this package, an OSError or a ValueError that names the path.
In each case victims and files of others are unchanged, nothing was created outside, and other users
cannot write to new files.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shmbuffer import ShmBufferError
from tests.damage.trials import require_all
from tests.hostile import traps
from tests.hostile.calls import TABLE, Call, RefusedError, aside

PATH = "."
"""The place of the path itself."""
scenes: Path | None = None
"""The directory in which scenes are created. A child that hangs leaves its scene there."""
_CAPABILITY_VERSION = 0x20080522
_OTHER_NAMES = ("dump", "save", "load")
"""Other names of ``dumps`` and ``loads``. With these, only the path itself is tried."""
_RANDOM = re.compile(r"[0-9a-f]{8,}")


@dataclass(frozen=True)
class Trap:
    """A trap and its place, which is empty for traps around the path."""

    name: str
    place: str = PATH

    def spring(self, path: Path, away: Path) -> None:
        """Puts the trap in its place."""
        if make := {**traps.IN_PLACE, **traps.ROOT_IN_PLACE}.get(self.name):
            for place in _places_at(path, self.place):
                if _is_reachable(place, path):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    make(place, away)
        else:
            {**traps.AROUND, **traps.ROOT_AROUND}[self.name](path, away)


class Trial(NamedTuple):
    """A row of the table, and the traps in its way."""

    row: str
    traps: tuple[Trap, ...]

    def __str__(self) -> str:
        return f"{self.row}, {' and '.join(f'{trap.name} at {trap.place}' for trap in self.traps)}"


def places(row: str, trap: str) -> list[str]:
    """Returns the places in which the trap can be put for this row."""
    if trap in traps.AROUND or trap in traps.ROOT_AROUND:
        return [PATH]
    if any(f".{name}(" in row for name in _OTHER_NAMES):
        return [PATH]
    return [PATH, *_used_names(row)]


@cache
def _used_names(row: str) -> list[str]:
    """Returns the names that a call uses, relative to the path; random parts are ``*``.

    They are found once, by a call in an empty directory.
    """
    with tempfile.NamedTemporaryFile() as file:

        def learn(row: str) -> None:
            call = TABLE[row]
            with _scene(call) as path:
                call.prepare(path)
                before = _names(path)
                _require_answer(_error_of(call, path), path, call, is_free=True)
                found = sorted({_RANDOM.sub("*", name) for name in before | _names(path)})
                Path(file.name).write_text(json.dumps(found))

        require_all([row], learn, "the same call")
        names: list[str] = json.loads(Path(file.name).read_text())
        return names


def judge(trial: Trial) -> None:
    """Makes the call; raises AssertionError if it breaks a rule. It has to run in a child."""
    call = TABLE[trial.row]
    with _scene(call) as path:
        call.prepare(path)
        away = path.parent.parent / "away"
        names = {trap.name for trap in trial.traps}
        taken = {place for trap in trial.traps for place in _places_at(path, trap.place)}
        for trap in trial.traps:
            trap.spring(path, away)
        before = _Before(path, away, taken, is_followed=any(map(_is_followed, trial.traps)))
        umask, is_limited = 0 if "umask 0" in names else 0o22, not names.isdisjoint(traps.LIMITED)
        with _umask(umask), _limited(is_limited):
            error = _error_of(call, path)
        _require_answer(error, path, call, is_free=names == {traps.FREE})
        before.require_unchanged()


# -- the scene -------------------------------------------------------------------------------------


@contextmanager
def _scene(call: Call) -> Iterator[Path]:
    """Yields the path for a call, in new directories."""
    torch.set_num_threads(1)  # threads of the parent do not exist in a forked process
    warnings.simplefilter("ignore")
    os.umask(0o22)
    gc.freeze()  # a million older objects are no garbage
    base = Path(tempfile.mkdtemp(prefix="shmbuffer-hostile-", dir=scenes))
    base.chmod(0o755)
    try:
        (base / "here").mkdir()
        aside(base / "here" / call.name).mkdir()
        traps.make_away(base / "away")
        home = Path.cwd()
        os.chdir(aside(base / "here" / call.name))
        try:
            yield base / "here" / call.name
        finally:
            os.chdir(home)
    finally:
        gc.collect()
        for folder, _, _ in os.walk(base):
            os.chmod(folder, 0o755)
        shutil.rmtree(base)


def _names(path: Path) -> set[str]:
    if not path.is_dir():
        return set()
    return {str(each.relative_to(path)) for each in path.rglob("*")}


def _places_at(path: Path, place: str) -> list[Path]:
    if "*" in place:
        return sorted(path.glob(place))
    return [path] if place == PATH else [path / place]


def _is_reachable(place: Path, path: Path) -> bool:
    """True if no other trap is on the way from the path to the place."""
    way = [each for each in place.parents if each.is_relative_to(path)]
    return all(each.is_dir() and not each.is_symlink() for each in way if os.path.lexists(each))


def _is_followed(trap: Trap) -> bool:
    """True if the path is a link of this user, so that new files are created at its target."""
    return trap.place == PATH and trap.name in traps.FOLLOWED


@contextmanager
def _umask(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _limited(is_limited: bool) -> Iterator[None]:
    """Runs a block without effective capabilities, so that permissions apply to root as well."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)  # effective, permitted, inheritable, twice
    libc.capget(header, data)
    before = data.raw
    if is_limited:
        words = struct.unpack("6I", before)
        data.raw = struct.pack("6I", 0, *words[1:3], 0, *words[4:])
        assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data.raw = before
        libc.capset(header, data)


# -- the answer ------------------------------------------------------------------------------------


def _error_of(call: Call, path: Path) -> Exception | None:
    try:
        call.run(path)
    except Exception as error:
        return error
    return None


def _require_answer(error: Exception | None, path: Path, call: Call, *, is_free: bool) -> None:
    """Requires success, or a clear error with the path; only success if there is no trap."""
    if error is None or (call.error is not None and isinstance(error, call.error)):
        return
    is_for_users = isinstance(error, ShmBufferError | OSError | ValueError | RefusedError)
    says_where = path.name in str(error) or str(path.parent.parent) in str(error)
    if is_free or not is_for_users or not says_where or "/proc/self/fd" in str(error):
        said = f"{type(error).__name__}: {error}"
        raise AssertionError(f"no clear error that names the path: {said}") from error


# -- what must not change --------------------------------------------------------------------------


class _Before:
    """The state before a call: victims, files of others, and names outside.

    A call may replace a file in a place to which it writes, as every save replaces files with the
    same names. It may not write to the old file, and may not replace other files.
    """

    def __init__(self, path: Path, away: Path, taken: set[Path], *, is_followed: bool) -> None:
        self._path, self._away, self._is_followed = path, away, is_followed
        self._victims = _tree(away)
        self._base = set(os.listdir(away.parent))
        here = _tree(path.parent)
        self._there = set(here)
        self._theirs = {
            name: found
            for name, found in here.items()
            if _is_of_others(found, away) and path.parent / name not in taken
        }

    def require_unchanged(self) -> None:
        """Raises AssertionError with the first change that it finds."""
        victims = _tree(self._away)
        for name, one in self._victims.items():
            if self._is_followed and one[-1] != traps.PRECIOUS:
                continue
            assert victims.get(name) == one, f"a victim was changed: {name}"
        new = victims.keys() - self._victims.keys()
        assert self._is_followed or not new, f"created outside: {sorted(new)}"
        assert set(os.listdir(self._away.parent)) == self._base, "created beside the scene"
        now = _tree(self._path.parent)
        for name, one in self._theirs.items():
            assert now.get(name) == one, f"a file of another program was changed: {name}"
        created = now.keys() - self._there
        for name in created:
            mode = now[name][0]
            is_open = mode & stat.S_IWOTH and not stat.S_ISLNK(mode)
            assert not is_open, f"all users can write to {name} (mode {stat.S_IMODE(mode):#o})"
        stray = {name.partition("/")[0] for name in created} - {self._path.name}
        assert not stray, f"left beside the path: {sorted(stray)}"


def _is_of_others(found: tuple[Any, ...], away: Path) -> bool:
    """True if this is a file of another program, or a link that another program made."""
    return found[-1] == traps.PRECIOUS or str(found[-1]).startswith(str(away))


def _tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Returns the mode, the owner, and the content or target of everything below a folder."""
    found: dict[str, tuple[Any, ...]] = {}
    for each in sorted(folder.rglob("*")):
        info = os.lstat(each)
        content: Any = None
        if stat.S_ISREG(info.st_mode):
            content = each.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(each)
        found[str(each.relative_to(folder))] = (info.st_mode, info.st_uid, content)
    return found
