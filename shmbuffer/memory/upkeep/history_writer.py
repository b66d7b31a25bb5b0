"""Writes the history of a buffer, in one process at a time; `history` describes its format."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import (
    AttachTimeout,
    BufferNotFoundError,
    CorruptBufferError,
    FormatError,
    ShmBufferError,
)
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.directory.files import NEW_HISTORY, Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.control import Control, Superblock
from shmbuffer.memory.system.filesystem import read_at
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.history import (
    BY_RECOVERY,
    HEADER_BYTES,
    Event,
    EventKind,
    History,
    HistoryRing,
)

_log = logging.getLogger(__name__)


class HistoryWriter:
    """Writes the history of a buffer. `open` creates a writer, at most one per buffer at a time."""

    def __init__(
        self, file: Lock, where: Path, found: History | None = None, reason: str | None = None
    ) -> None:
        self.history = found  # the history before this writer; None if the history is new
        # reason why the existing history was replaced by a new one; None if it was not replaced
        self.reason = reason
        self._file = file
        self._where = where
        rings = history.rings(history.recorded_fields()) if found is None else found.rings
        self._fine, self._coarse, self._events = rings
        self._coarse_ns: int | None = None
        if found is not None and len(found.coarse):
            self._coarse_ns = int(found.coarse["time_ns"][-1])

    @classmethod
    def open(cls, files: Files, uuid: bytes) -> Self:
        """Continues the history of a buffer, or creates one. The caller holds init.lock.

        Args:
            files: The files of the buffer.
            uuid: The uuid of the buffer. A history with another uuid is replaced.
        """
        directory, where = files.directory, files.path / layout.HISTORY
        try:
            file = _open_locked(directory)
        except BufferNotFoundError:
            return cls(_create(directory, uuid), where)
        try:
            found = _read_or_explain(directory, uuid)
        except BaseException:  # a read error must not replace the history
            file.close()
            raise
        if isinstance(found, History):
            return cls(file, where, found)
        with file:
            return cls(_create(directory, uuid), where, reason=found)

    def record(self, values: Mapping[str, int | float], recorder: int) -> None:
        """Writes a record to the fine ring and, once per minute, to the coarse ring.

        Args:
            values: The values of the counters, by field.
            recorder: The incarnation of the client that writes the history.
        """
        stamp = _stamp(recorder)
        self._put(self._fine, {**values, **stamp})
        _core.reached("history.fine")
        # The time since the last record of any writer counts, so that short-lived writers do not
        # fill the ring. If the wall clock was set back, recording must continue.
        now_ns, last_ns = stamp["time_ns"], self._coarse_ns
        if last_ns is None or not last_ns <= now_ns < last_ns + int(history.COARSE_S * 10**9):
            self._put(self._coarse, {**values, **stamp})
            _core.reached("history.coarse")
            self._coarse_ns = now_ns

    def note(self, event: Event, recorder: int) -> None:
        """Writes an event with the current time. ``recorder`` is as for `record`."""
        self._put(self._events, {**event.to_row(), **_stamp(recorder)})
        _core.reached("history.event")

    def note_deaths(self, died: Sequence[Event]) -> None:
        """Records the deaths of those clients in ``died`` whose end has not been recorded yet."""
        ring = self._events
        data = read_at(self._file.fd, ring.end - ring.begin, ring.begin)
        rows, _ = ring.parse(data)
        events = history.parse_events(rows)
        ends = history.open_ends(events)
        ended = {event.incarnation for event in events} - ends.keys()
        for event in died:
            if event.incarnation not in ended:
                seen = ends.get(event.incarnation, event)
                self.note(replace(event, name=seen.name), BY_RECOVERY)

    def close(self) -> None:
        """Unlocks the history, so that another process can write it. Can be called repeatedly."""
        self._file.close()

    def _put(self, ring: HistoryRing, values: Mapping[str, Any]) -> None:
        """Writes the next record or event to a ring."""
        if self._file.fd < 0:
            raise ValueError(f"{self._where}: this recorder was closed; open a new one")
        row = {**values, "number": ring.number + 1, "pad": b""}
        body = _pack(ring.dtype, row)[:-8]
        data = body + int(_core.crc32c(body)).to_bytes(8, "little")
        offset = ring.begin + ring.number % ring.capacity * len(data)
        _write(self._file.fd, data, offset, self._where)
        ring.number += 1  # last, so that an incomplete record is overwritten


def note_deaths(files: Files, control: Control, superblock: Superblock) -> None:
    """Writes the deaths of all clients that a recovery found to the history.

    The caller holds init.lock. Errors are only logged, because the recovery does not depend on the
    history.
    """
    where = files.path / layout.HISTORY
    try:
        with _open_locked(files.directory) as file:
            # Only the header and the events are read, because the other rings are large and other
            # processes wait for the recovery.
            page, size = os.pread(file.fd, HEADER_BYTES, 0), os.fstat(file.fd).st_size
            uuid, fields, _ = history.parse_header(page, size, where)
            if uuid == superblock.uuid and fields == history.recorded_fields():
                HistoryWriter(file, where).note_deaths(_dead_clients(control, superblock.epoch))
    except BufferNotFoundError:
        return
    except (AttachTimeout, OSError, ShmBufferError) as error:
        _log.warning(
            "%s: the deaths of clients could not be written to the history: %s",
            *(files.path, str(error)),
        )


def _dead_clients(control: Control, epoch: int) -> list[Event]:
    """Returns a death event for every client in the registry, all of which are dead."""
    dead = control.entries[control.entries["state"] == layout.EntryState.LIVE]
    return [
        Event(
            EventKind.DIED,
            layout.name_of(layout.Role, int(entry["role"])).lower(),
            int(entry["pid"]),
            int(entry["incarnation"]),
            epoch,
        )
        for entry in dead
    ]


def _read_or_explain(directory: Directory, uuid: bytes) -> History | str:
    """Reads the existing history, or returns the reason why it must be replaced."""
    try:
        found = history.read(directory)
    except (FormatError, CorruptBufferError) as error:
        return str(error)
    if found.uuid != uuid:
        return "it is the history of the buffer from which this buffer was copied"
    if found.fields != history.recorded_fields():
        return "its fields are not those that this version records"
    return found


def _stamp(recorder: int) -> dict[str, int]:
    """Returns the first fields of a record that is written now, except its number."""
    return {"time_ns": time.time_ns(), "boottime_ns": _core.boot_ns(), "recorder": recorder}


def _open_locked(directory: Directory) -> Lock:
    """Opens and locks the existing history. Raises BufferNotFoundError if there is none."""
    return Lock().hold(
        directory,
        layout.HISTORY,
        timeout=0,
        purpose="records the history of the buffer",
        make=False,
    )


def _create(directory: Directory, uuid: bytes) -> Lock:
    """Creates an empty history and locks it. An existing history is replaced."""
    fields = history.recorded_fields()
    directory.unlink(NEW_HISTORY)
    with directory.create(NEW_HISTORY, history.file_bytes(fields)) as file:
        _write(file.fd, _header(uuid, fields), 0, directory.path / NEW_HISTORY)
        _core.reached("history.header")
    directory.rename(NEW_HISTORY, layout.HISTORY)
    _core.reached("history.renamed")
    return _open_locked(directory)


def _write(fd: int, data: bytes, at: int, where: Path) -> None:
    with explain_errors(where, needed=len(data)):
        if os.pwrite(fd, data, at) != len(data):
            raise OSError(errno.EIO, "only a part could be written")


def _pack(dtype: np.dtype[np.void], values: Mapping[str, Any]) -> bytes:
    """Encodes a row of a dtype. Fields that are missing in ``values`` are 0."""
    row = [(dtype[name].kind, values.get(name, 0)) for name in dtype.names or ()]
    fitting = tuple(int(value) & 2**64 - 1 if code == "u" else value for code, value in row)
    return np.array([fitting], dtype).tobytes()


def _header(uuid: bytes, fields: Mapping[str, str]) -> bytes:
    """Encodes the header of a new history."""
    text = json.dumps(fields).encode()
    page = {
        "magic": history.MAGIC,
        "pad": b"",
        "version": history.VERSION,
        "endian": layout.ENDIAN_TAG,
        "uuid": uuid,
        "created_ns": time.time_ns(),
        "fields_bytes": len(text),
        "fields": text,
        **history.header_sizes(history.rings(fields)),
    }
    data = _pack(history.HEADER, page)[:-4]
    return data + int(_core.crc32c(data)).to_bytes(4, "little")
