"""The roster of spawned processes: a directory with one file for each process.

     coordinator: creates an empty file ──starts──▶ child: writes its identity, locks the file until
                                                    it ends, then checks that the file still exists
     a reader: gets the lock         ──▶ the process is dead: the reader removes the file; a child
                                         that has not started yet will not run
               does not get the lock ──▶ the file contains the identity of the living process
     coordinator: a child died and is not restarted ──▶ a new file, which records the death,
                                                        replaces the file of the child

    .shmbuffer/spawned/<16 hex>, with lines of JSON that the child writes
        {"name", "index", "started_s", "pid", "start_time", "boot_id", "pid_namespace"}   at start
        {"exitcode", "failed", "error"}                                                   at its end
    or with a single line that the coordinator writes after a death
        {"died", "exitcode", "error"}

Always true
  1. A file exists before its process starts. Every process that runs a target can therefore be
     found, even if the coordinator is killed at any time.
  2. If a file stays locked for longer than readers lock it, it contains an identity, because the
     child writes its identity before it locks the file.
  3. Each file name is used only once, so a child never writes to the file of another child.
  4. Only the lock proves that a process is alive. The identity specifies the process to which a
     signal is sent, after it was compared with the kernel's data (`identity.open_pidfd`).
  5. The file of a child that will be restarted remains until its successor has a file. If all files
     record deaths, none of these processes will write again.
If a process dies here: the kernel unlocks its file, and the next reader removes the file. Records
of deaths remain until the next coordinator or recovery, because a waiting process may need them.
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
"""The lock on the file of this process, if the process was spawned. It is held until it ends."""


@dataclass(frozen=True)
class LivingProcess:
    """A spawned process that is alive."""

    file: str  # name of its file in the roster
    name: str  # name that was passed to `spawn`
    index: int  # index of the process among those of the same `spawn` call
    identity: Identity  # as the process wrote it to its file


@dataclass(frozen=True)
class ExitRecord:
    """The last line that a process writes to its file."""

    # None if the process was killed before it wrote the line, or if the file is damaged
    exitcode: int | None = None
    failed: str = (
        ""  # hash of the code location where it raised an exception; empty if it raised none
    )
    error: str = ""  # this exception, in one line


@dataclass(frozen=True)
class Dead:
    """A spawned process that has died and will not be restarted."""

    name: str  # including the index
    exitcode: int | None  # negative if a signal killed the process; None if unknown
    error: str  # its last exception, in one line; empty if it raised none

    def __str__(self) -> str:
        error = f" ({self.error})" if self.error else ""
        return f"{self.name} {describe_exit(self.exitcode)}{error}"


@dataclass(frozen=True)
class RosterContent:
    """The spawned processes of a buffer, according to the files of the roster."""

    dead: tuple[Dead, ...]  # processes that will not be restarted
    others: int  # number of processes that run, are about to start, or will be restarted
    # start times, in seconds since the epoch, of running or starting processes that have not
    # attached to the buffer yet
    absent: tuple[float, ...]


def create_file(scratch_dir: Path) -> str:
    """Creates the file of a process that is about to start, and returns the name of the file."""
    with Directory.open(scratch_dir) as directory:
        file = f"{layout.SPAWNED}/{secrets.token_hex(8)}"
        directory.create(file, 0).close()
        _core.reached("spawned.planned")
        return file


def remove_file(scratch_dir: Path, file: str) -> None:
    """Removes the file of a process that has ended or that was not started."""
    with suppress(BufferNotFoundError), Directory.open(scratch_dir) as directory:
        directory.unlink(file)
        _core.reached("spawned.removed")


def record_death(scratch_dir: Path, file: str, dead: Dead) -> str:
    """Replaces the file of a process that will not be restarted by a record of its death.

    Returns:
        The name of the new file.
    """
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
    """Removes all records of deaths. Called when a new run begins."""
    for file, lines in _files(directory):
        if _parse_death(lines) is not None:
            directory.unlink(file)
            _core.reached("spawned.removed")


def read_roster(directory: Directory, attached: Collection[int]) -> RosterContent:
    """Reads the roster without changing it.

    Args:
        directory: The directory of the buffer.
        attached: The pids of all clients in the registry.
    """
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
    """Describes how a process ended, as a predicate such as "was killed by SIGKILL".

    Args:
        exitcode: The exit code as `multiprocessing` reports it, or None if it is unknown.
    """
    if exitcode is None:
        return "died"
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)}"
    if exitcode > 128:
        return f"ended on {_signal_name(exitcode - 128)}"
    return f"ended with exit code {exitcode}"


def _signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGTERM", or "signal N" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def record_start(scratch_dir: Path, file: str, name: str, index: int, started_s: float) -> bool:
    """Writes the identity of this process to its file, and locks the file until the process ends.

    Args:
        scratch_dir: The directory of the buffer.
        file: Name of the file that `create_file` created for this process.
        name: Name that was passed to `spawn`.
        index: Index of the process among those of the same `spawn` call.
        started_s: Start time of the process, in seconds since the epoch.

    Returns:
        False if the file or the buffer was removed, so that this process must not run its target.
    """
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
    """Writes to the file of this process how it ends.

    A coordinator that was started later, and is not the parent of this process, reads the record.
    """
    with (
        suppress(BufferNotFoundError, BufferUnlinkedError),
        Directory.open(scratch_dir) as directory,
    ):
        _append(directory, file, asdict(record))
        _core.reached("spawned.ended")


def read_exit(scratch_dir: Path, file: str) -> ExitRecord:
    """Reads how a process has ended from its file.

    All fields of the result are empty if the process did not record its end.
    """
    with (
        suppress(BufferNotFoundError, ValueError, RecursionError),
        Directory.open(scratch_dir) as directory,
    ):
        found = _lines(directory, file)
        if len(found) == 2 and isinstance(code := found[1].get("exitcode"), int):
            return ExitRecord(code, *(str(found[1].get(name, "")) for name in ("failed", "error")))
    return ExitRecord()


def find_living(scratch_dir: Path, excluding: Collection[str] = ()) -> list[LivingProcess]:
    """Returns the living processes, and removes the files of dead processes.

    Args:
        scratch_dir: The directory of the buffer.
        excluding: Names of files that are neither read nor removed.
    """
    found: list[LivingProcess] = []
    with Directory.open(scratch_dir) as directory:
        for file in _names(directory):
            entry = None if file in excluding else _living_process_of(directory, file)
            if entry is not None:
                found.append(entry)
    return found


def _names(directory: Directory) -> list[str]:
    """Returns the names of all files of the roster, relative to the directory of the buffer."""
    try:
        names = directory.listdir(layout.SPAWNED)
    except BufferNotFoundError:
        return []
    return [f"{layout.SPAWNED}/{name}" for name in filter(_NAME.fullmatch, names)]


def _files(directory: Directory) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the name of each file with its parsed lines, or without lines if it is damaged."""
    for file in _names(directory):
        with suppress(BufferNotFoundError):
            try:
                lines = _lines(directory, file)
            except (ValueError, RecursionError):
                lines = []
            yield file, lines


def _parse_death(lines: list[dict[str, Any]]) -> Dead | None:
    """Parses the record of a death. Returns None if the lines are not such a record."""
    if len(lines) != 1 or "died" not in lines[0]:
        return None
    code = lines[0].get("exitcode")
    code = code if isinstance(code, int) else None
    return Dead(str(lines[0]["died"]), code, str(lines[0].get("error", "")))


def _living_process_of(
    directory: Directory, file: str, patience_s: float = 0.0
) -> LivingProcess | None:
    """Returns the process of a file if it is alive. Otherwise removes the file under its lock.

    Args:
        directory: The directory of the buffer.
        file: Name of the file.
        patience_s: Number of seconds to wait for the lock, which another reader may hold.

    Raises:
        AttachTimeout: The file stayed locked, but contains no identity.
    """
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
            # Another reader holds the lock. A child would have written its identity before.
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
    """Parses the complete lines of a file, each of which is a JSON object."""
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
