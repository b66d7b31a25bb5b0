"""The roster of spawned processes, with name and index: one file for each process.

     coordinator: creates an empty file ──starts──▶ child: writes its identity, locks the file for
                                                    life, then checks that the file has its name
     a reader: gets the lock ──▶ the process is dead: removes the file; a child that was about to
                                      start does not run
                    does not ──▶ the file has the identity of the living process
     coordinator: a death without a restart ──▶ a new file with the death replaces that of the child

    .shmbuffer/spawned/<16 hex>, lines of JSON that the child writes
        {"name", "index", "started_s", "pid", "start_time", "boot_id", "pid_namespace"}   at first
        {"exitcode", "failed", "error"}                                                   at its end
    or the one line of a death, that the coordinator writes
        {"died", "exitcode", "error"}

Always true
  1. The file exists before its process does. Whenever a process is killed, every process that runs
     a target can be found.
  2. A file that is locked for longer than a reader needs has an identity, because the child writes
     it before it locks.
  3. A name is used once, so no child writes into the file of another.
  4. Only the lock proves that a process is alive. The identity names the process to signal, after a
     comparison with the kernel's facts (`identity.open_pidfd`).
  5. A child that is to be restarted keeps its file until its successor has one. If a reader finds
     only deaths, none of these processes will write again.
If a process dies here: the kernel unlocks the file, and the next reader removes it. Deaths remain
until the next coordinator or the next recovery, because a waiting process may still need them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, BufferNotFoundError, BufferUnlinkedError
from shmbuffer.memory.clients.locks import TESTER_PATIENCE_S, Lock, is_free
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.identity import Identity
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

_NAME = re.compile(r"[0-9a-f]{16}")
_LIMIT = 64 * 2**10
_PURPOSE = "was spawned by a coordinator"

_alive = Lock()
"""The lock of this process's file, if it was spawned. It is held while the process lives."""


@dataclass(frozen=True)
class LivingProcess:
    """A spawned process that is alive."""

    file: str
    name: str  # the name given to ``spawn``
    index: int  # the index within its ``spawn``
    identity: Identity  # as the process wrote it


@dataclass(frozen=True)
class ExitRecord:
    """The last entry of a process in its file."""

    exitcode: int | None = None  # None if the process was killed first, or the file is damaged
    failed: str = ""  # hash of the place of its exception, if any
    error: str = ""  # that exception, in one line


@dataclass(frozen=True)
class Dead:
    """A process that has died and is not restarted."""

    name: str  # with the index
    exitcode: int | None  # negative for a signal; None if unknown
    error: str  # its last exception, in one line, if any

    def __str__(self) -> str:
        return f"{self.name} {describe_exit(self.exitcode)}" + (
            f" ({self.error})" if self.error else ""
        )


@dataclass(frozen=True)
class RosterContent:
    """The spawned processes of a directory, according to their files."""

    dead: tuple[Dead, ...]  # processes that are not restarted
    others: int  # processes that run, are about to start, or are about to be restarted
    absent: tuple[
        float, ...
    ]  # the start times of running or starting processes that have not attached, in epoch seconds


def create_file(scratch_dir: Path) -> str:
    """Creates the file of a process that is about to start; returns its name."""
    with Directory.open(scratch_dir) as directory:
        file = f"{layout.SPAWNED}/{secrets.token_hex(8)}"
        directory.create(file, 0).close()
        _core.reached("spawned.planned")
        return file


def remove_file(scratch_dir: Path, file: str) -> None:
    """Removes the file of a process that has ended, or was not started."""
    with suppress(BufferNotFoundError), Directory.open(scratch_dir) as directory:
        directory.unlink(file)
        _core.reached("spawned.removed")


def record_death(scratch_dir: Path, file: str, dead: Dead) -> str:
    """Replaces the file of a process that is not restarted by a record of its death."""
    with Directory.open(scratch_dir) as directory:
        new = f"{layout.SPAWNED}/{secrets.token_hex(8)}"
        directory.create(new, 0).close()
        _core.reached("spawned.planned")
        line = {"died": dead.name, "exitcode": dead.exitcode, "error": dead.error}
        _append(directory, new, line)
        _core.reached("spawned.ended")
        directory.unlink(file)
        _core.reached("spawned.removed")
        return new


def remove_deaths(directory: Directory) -> None:
    """Removes the records of deaths, because a new run begins."""
    for file, lines in _files(directory):
        if _parse_death(lines) is not None:
            directory.unlink(file)
            _core.reached("spawned.removed")


def read_roster(directory: Directory, attached: Collection[int]) -> RosterContent:
    """Returns the spawned processes; ``attached`` are the pids in the registry. Changes nothing."""
    dead: list[Dead] = []
    absent: list[float] = []
    others = 0
    for file, lines in _files(directory):
        if (death := _parse_death(lines)) is not None:
            dead.append(death)
            continue
        others += 1
        with suppress(FileNotFoundError, LookupError, TypeError, ValueError):
            if not lines:  # the process is about to start
                absent.append(directory.stat(file).st_mtime)
            elif int(lines[0]["pid"]) not in attached and not is_free(directory, file):
                absent.append(float(lines[0]["started_s"]))
    return RosterContent(tuple(sorted(dead, key=lambda death: death.name)), others, tuple(absent))


def describe_exit(exitcode: int | None) -> str:
    """Describes how a process ended, from the exit code of ``multiprocessing``."""
    if exitcode is None:
        return "died"
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)}"
    if exitcode > 128:
        return f"ended on {_signal_name(exitcode - 128)}"
    return f"ended with exit code {exitcode}"


def _signal_name(number: int) -> str:
    """Returns the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def record_start(scratch_dir: Path, file: str, name: str, index: int, started_s: float) -> bool:
    """Writes the identity of this process, and locks the file; false if it should not run."""
    me = identity.current()
    who = {"name": name, "index": index, "started_s": started_s}
    found = {**who, **asdict(me), "boot_id": me.boot_id.hex()}
    try:
        with Directory.open(scratch_dir) as directory:
            _append(directory, file, found)
            _core.reached("spawned.written")
            _alive.hold(directory, file, timeout=TESTER_PATIENCE_S, purpose=_PURPOSE, make=False)
            _core.reached("spawned.locked")
    except (BufferNotFoundError, BufferUnlinkedError):
        return False
    return True


def record_exit(scratch_dir: Path, file: str, record: ExitRecord) -> None:
    """Writes how this process ends, for a coordinator that is not its parent."""
    with (
        suppress(BufferNotFoundError, BufferUnlinkedError),
        Directory.open(scratch_dir) as directory,
    ):
        _append(directory, file, asdict(record))
        _core.reached("spawned.ended")


def read_exit(scratch_dir: Path, file: str) -> ExitRecord:
    """Reads the last entry of a process that has ended."""
    with (
        suppress(BufferNotFoundError, ValueError, RecursionError),
        Directory.open(scratch_dir) as directory,
    ):
        found = _lines(directory, file)
        if len(found) == 2 and isinstance(code := found[1].get("exitcode"), int):
            return ExitRecord(code, *(str(found[1].get(name, "")) for name in ("failed", "error")))
    return ExitRecord()


def find_living(scratch_dir: Path, excluding: Collection[str] = ()) -> list[LivingProcess]:
    """Returns the living processes; removes the files of dead ones."""
    found: list[LivingProcess] = []
    with Directory.open(scratch_dir) as directory:
        for file in _names(directory):
            entry = None if file in excluding else _living_process_of(directory, file)
            if entry is not None:
                found.append(entry)
    return found


def _names(directory: Directory) -> list[str]:
    """Returns the paths of the files that record spawned processes."""
    try:
        names = directory.listdir(layout.SPAWNED)
    except BufferNotFoundError:
        return []
    return [f"{layout.SPAWNED}/{name}" for name in filter(_NAME.fullmatch, names)]


def _files(directory: Directory) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the files and their lines; no lines if a file is damaged or was just removed."""
    for file in _names(directory):
        with suppress(BufferNotFoundError):
            try:
                lines = _lines(directory, file)
            except (ValueError, RecursionError):
                lines = []
            yield file, lines


def _parse_death(lines: list[dict[str, Any]]) -> Dead | None:
    """Parses the record of a death; None if the lines are not one."""
    if len(lines) != 1 or "died" not in lines[0]:
        return None
    code = lines[0].get("exitcode")
    code = code if isinstance(code, int) else None
    return Dead(str(lines[0]["died"]), code, str(lines[0].get("error", "")))


def _living_process_of(
    directory: Directory, file: str, patience_s: float = 0.0
) -> LivingProcess | None:
    """Returns the living process of a file; if it is dead, removes the file under its lock."""
    try:
        lock = Lock().hold(directory, file, timeout=patience_s, purpose=_PURPOSE, make=False)
    except BufferNotFoundError:
        return None
    except AttachTimeout as error:
        try:
            return _read_identity(directory, file)
        except BufferNotFoundError:
            return None
        except (LookupError, TypeError, ValueError, RecursionError):
            if patience_s:
                raise error from None
            # Another reader holds the lock, because a child writes before it locks.
            return _living_process_of(directory, file, TESTER_PATIENCE_S)
    with lock:
        directory.unlink(file)
        _core.reached("spawned.removed")
    return None


def _read_identity(directory: Directory, file: str) -> LivingProcess:
    """Reads the identity of a living process from its file."""
    found = _lines(directory, file)[0]
    who = Identity(
        int(found["pid"]),
        int(found["start_time"]),
        bytes.fromhex(found["boot_id"]),
        int(found["pid_namespace"]),
    )
    return LivingProcess(file, str(found["name"]), int(found["index"]), who)


def _lines(directory: Directory, file: str) -> list[dict[str, Any]]:
    """Returns the complete lines of a file."""
    complete = directory.read(file, limit=_LIMIT).rpartition(b"\n")[0]
    found = [json.loads(line) for line in complete.splitlines()]
    return [line for line in found if isinstance(line, dict)]


def _append(directory: Directory, file: str, line: dict[str, Any]) -> None:
    """Appends a line of JSON to a file."""
    rest = json.dumps(line).encode() + b"\n"
    with directory.open_file(file) as held, explain_errors(directory.path / file, needed=len(rest)):
        os.lseek(held.fd, 0, os.SEEK_END)
        while rest:
            rest = rest[os.write(held.fd, rest) :]
            _core.reached("spawned.noted")
