"""Who was spawned in a directory, under which name and index: one file for each process.

     coordinator: makes an empty file ──starts──▶ child: writes who it is, locks the file for life,
                                                  then looks whether the file still has its name
     a reader: gets the lock ──▶ nobody lives there: removes the file; a child that was on its
                                      way does not run
                    does not ──▶ the file says who lives

    .shmbuffer/spawned/<16 hex>, lines of JSON that the child writes
        {"name", "index", "pid", "start_time", "boot_id", "pid_namespace"}    at first
        {"exitcode", "failed"}                                                at its end

Always true
  1. The file is there before its process is. So at whatever step a process is killed, no process
     runs a target that a later look does not find.
  2. A file that is locked for longer than a look takes says who holds it: the child writes first.
  3. A name is used once: no child writes into the file of another.
  4. The lock alone says that it lives; what is written names the process to signal, and is
     compared with what the kernel says of that process (`identity.opened`).
If a process dies here: the kernel unlocks; the file goes at the next look.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, BufferNotFoundError, BufferUnlinkedError
from shmbuffer.memory import identity, layout
from shmbuffer.memory.identity import Identity
from shmbuffer.memory.locks import TESTER_PATIENCE_S, Lock
from shmbuffer.memory.region import Directory

_NAME = re.compile(r"[0-9a-f]{16}")
_LIMIT = 64 * 2**10
_PURPOSE = "was spawned by a coordinator"

_alive = Lock()
"""Says for the life of this process, if it was spawned, that it lives."""


@dataclass(frozen=True)
class Entry:
    """A process that lives."""

    file: str  # of the entry
    name: str  # that it was spawned under
    index: int  # among those of its ``spawn``
    identity: Identity  # of the process, as it said


@dataclass(frozen=True)
class LastWords:
    """What a process wrote at its end."""

    # of the process; None if it was killed before, or what it wrote is damaged
    exitcode: int | None = None
    failed: str = ""  # where it failed, as a number; "" if no exception ended it


def plan(scratch_dir: Path) -> str:
    """Makes the file of a process that is to be started, and returns its name."""
    with Directory.open(scratch_dir) as directory:
        file = f"{layout.SPAWNED}/{secrets.token_hex(8)}"
        directory.create(file, 0).close()
        _core.reached("spawned.planned")
        return file


def forget(scratch_dir: Path, file: str) -> None:
    """Removes the file of a process that has ended, or was not started."""
    with suppress(BufferNotFoundError), Directory.open(scratch_dir) as directory:
        directory.unlink(file)
        _core.reached("spawned.removed")


def check_in(scratch_dir: Path, file: str, name: str, index: int) -> bool:
    """Says who this process is and that it lives; False if it is not wanted any more."""
    me = identity.current()
    found = {"name": name, "index": index, **asdict(me), "boot_id": me.boot_id.hex()}
    try:
        with Directory.open(scratch_dir) as directory:
            _append(directory, file, found)
            _core.reached("spawned.written")
            _alive.hold(directory, file, timeout=TESTER_PATIENCE_S, purpose=_PURPOSE, make=False)
            _core.reached("spawned.locked")
    except (BufferNotFoundError, BufferUnlinkedError):
        return False
    return True


def check_out(scratch_dir: Path, file: str, words: LastWords) -> None:
    """Says how this process ends, for a coordinator that is not its parent."""
    with (
        suppress(BufferNotFoundError, BufferUnlinkedError),
        Directory.open(scratch_dir) as directory,
    ):
        _append(directory, file, asdict(words))
        _core.reached("spawned.ended")


def last_words(scratch_dir: Path, file: str) -> LastWords:
    """What a process that has ended wrote."""
    with (
        suppress(BufferNotFoundError, ValueError, RecursionError),
        Directory.open(scratch_dir) as directory,
    ):
        found = _lines(directory, file)
        if len(found) == 2 and isinstance(code := found[1].get("exitcode"), int):
            return LastWords(code, str(found[1].get("failed", "")))
    return LastWords()


def living(scratch_dir: Path, excluding: Collection[str] = ()) -> list[Entry]:
    """Those who live; removes the files of those who do not."""
    found: list[Entry] = []
    with Directory.open(scratch_dir) as directory:
        try:
            names = directory.listdir(layout.SPAWNED)
        except BufferNotFoundError:
            return found
        for name in filter(_NAME.fullmatch, names):
            file = f"{layout.SPAWNED}/{name}"
            entry = None if file in excluding else _look(directory, file)
            if entry is not None:
                found.append(entry)
    return found


def _look(directory: Directory, file: str, patience_s: float = 0.0) -> Entry | None:
    """Who lives there; if nobody does the file goes, under its lock."""
    try:
        lock = Lock().hold(directory, file, timeout=patience_s, purpose=_PURPOSE, make=False)
    except BufferNotFoundError:
        return None
    except AttachTimeout as error:
        try:
            return _entry(directory, file)
        except BufferNotFoundError:
            return None
        except (LookupError, TypeError, ValueError, RecursionError):
            if patience_s:
                raise error from None
            # Another one is looking, too: a child does not lock before it has written.
            return _look(directory, file, TESTER_PATIENCE_S)
    with lock:
        directory.unlink(file)
        _core.reached("spawned.removed")
    return None


def _entry(directory: Directory, file: str) -> Entry:
    found = _lines(directory, file)[0]
    who = Identity(
        int(found["pid"]),
        int(found["start_time"]),
        bytes.fromhex(found["boot_id"]),
        int(found["pid_namespace"]),
    )
    return Entry(file, str(found["name"]), int(found["index"]), who)


def _lines(directory: Directory, file: str) -> list[dict[str, Any]]:
    """What is written there, as far as the lines are whole."""
    whole = directory.read(file, limit=_LIMIT).rpartition(b"\n")[0]
    found = [json.loads(line) for line in whole.splitlines()]
    return [line for line in found if isinstance(line, dict)]


def _append(directory: Directory, file: str, line: dict[str, Any]) -> None:
    with directory.open_file(file) as held:
        os.lseek(held.fd, 0, os.SEEK_END)
        os.write(held.fd, json.dumps(line).encode() + b"\n")
