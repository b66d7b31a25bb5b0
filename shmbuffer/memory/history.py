"""What a buffer was at: its counters second by second, in a file whose size never changes.

     header ── one page: whose history it is, and what a record is made of
     fine   ── a record a second, for an hour    ┐
     coarse ── a record a minute, for a week     ├ rings: number n lies at place (n - 1) mod room
     events ── who came, left or died; recoveries┘

A record holds the counters as they stood, not what was added, so that any two of them make a rate,
and one that is missing costs nothing but its own moment. The header names the fields: what a later
version counts is recorded by it, and a reader of another version knows what it looks at.

Always true
  1. One process at a time writes: it holds the lock of the file, which its death frees.
  2. The file has its room and its header before it has its name; its size never changes.
  3. A record counts only if its checksum fits and it lies where its number says. So one that was
     torn, by a death between two pages or by a power cut, is left out, and nothing else is.
  4. Nothing waits for it: it is written with plain writes by whoever looks after the buffer, never
     synced, and neither the mutex nor a page that others map is touched.
If the recorder dies: what it wrote is the kernel's, and is read as it is; the next one goes on
behind it. A history that is damaged, foreign or of another version is no reason for anything: it
is started anew by the next recorder, and whoever only reads is told.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.errors import (
    AttachTimeout,
    BufferNotFoundError,
    CorruptBufferError,
    FormatError,
    IncompatibleVersionError,
    ShmBufferError,
)
from shmbuffer.memory import layout
from shmbuffer.memory.counters import RUNTIME_COUNTERS
from shmbuffer.memory.files import NEW_HISTORY, Files
from shmbuffer.memory.layout import Role
from shmbuffer.memory.locks import Lock
from shmbuffer.memory.region import Directory
from shmbuffer.memory.trust import explained

_log = logging.getLogger(__name__)

MAGIC = b"SHMHIS\x00\x01"
VERSION = 1

FINE, FINE_S = 3600, 1.0
"""Records of the fine ring, and the seconds between two of them: an hour."""

COARSE, COARSE_S = 7 * 24 * 60, 60.0
"""The same of the coarse ring: a week."""

EVENTS = 2048

HEADER_BYTES = layout.PAGE
LIMIT = 64 * 2**20
"""Bytes that a history may have to be read, whatever its header says."""

FLOATS = ("max_priority", "p_sum", "samples_per_insert")
"""Fields that are float64; all others are unsigned integers of 64 bits."""

HEADER = np.dtype(
    {
        "names": [
            *("magic", "version", "endian", "uuid", "created_ns", "record_bytes", "event_bytes"),
            *("fine", "coarse", "events", "fields_bytes", "fields", "crc32c"),
        ],
        "formats": [
            *("V8", "<u2", "<u4", "V16", "<u8", "<u4", "<u4"),
            *("<u4", "<u4", "<u4", "<u4", "V4028", "<u4"),
        ],
        "offsets": [0, 8, 12, 16, 32, 40, 44, 48, 52, 56, 60, 64, 4092],
        "itemsize": HEADER_BYTES,
    }
)

#: What a record of any ring begins with: its number, from 1; when it was, by the wall clock and in
#: nanoseconds since boot, which nobody sets; and the incarnation of the recorder, since one clock
#: of the two says nothing beyond its boot.
STAMP = [("number", "<u8"), ("time_ns", "<u8"), ("boottime_ns", "<u8"), ("recorder", "<u8")]
_CHECK = [("crc32c", "<u4"), ("pad", "V4")]

EVENT = np.dtype(
    [
        *STAMP,
        ("kind", "<u4"),
        ("role", "<u4"),
        ("pid", "<u8"),
        ("incarnation", "<u8"),
        ("epoch", "<u8"),
        ("exitcode", "<i4"),
        ("flags", "<u4"),
        ("name", "S48"),
        *_CHECK,
    ]
)
_PACKED_EVENT = struct.Struct("<4QIIQQQiI48s")

UNKNOWN_EXITCODE = 2**31 - 1
RESTARTED = 1  # flag of DIED: it was started again
BY_RECOVERY = 0  # in place of a recorder's incarnation: nobody recorded when it went


class EventKind(IntEnum):
    """What happened. JOINED also of those who are there when a recorder begins."""

    JOINED = 1
    LEFT = 2
    DIED = 3
    RECOVERED = 4


@dataclass(frozen=True)
class Event:
    """Something that happened to a buffer.

    Attributes:
        kind: what.
        role: of the client; of a recovery, of whoever recorded it.
        pid: of the client; 0 of a recovery.
        incarnation: of the client; 0 where it is not known.
        epoch: number of recoveries at that time.
        name: of a process that a coordinator started, else "".
        exitcode: of one that died, as ``multiprocessing`` gives it; None where nobody knows.
        restarted: whether one that died was started again.
    """

    kind: EventKind
    role: Role = Role.CLIENT
    pid: int = 0
    incarnation: int = 0
    epoch: int = 0
    name: str = ""
    exitcode: int | None = None
    restarted: bool = False


@dataclass(frozen=True)
class History:
    """A history as it was read; whatever did not fit its checksum is left out.

    Attributes:
        uuid: of the buffer that it was recorded of.
        created_ns: wall clock, when it was begun.
        fields: what is recorded, by name, with the type.
        fine: a record a second, oldest first; `STAMP` and the fields.
        coarse: a record a minute, in the same way.
        events: oldest first; see `EVENT`.
        rooms: of the three rings.
        left_out: places with something in them that is no record.
    """

    uuid: bytes
    created_ns: int
    fields: Mapping[str, str]
    fine: NDArray[np.void]
    coarse: NDArray[np.void]
    events: NDArray[np.void]
    rooms: tuple[int, int, int]
    left_out: int


def recorded_fields() -> dict[str, str]:
    """What this version records, by name, with the type; counters by the names that they have."""
    names = (
        *("epoch", "head", "write_count", "length", "limited"),
        *layout.COUNTERS,
        *RUNTIME_COUNTERS,
        *(living(role) for role in Role),
        *FLOATS,
    )
    return {name: "f8" if name in FLOATS else "u8" for name in names}


def living(role: Role) -> str:
    """The field that counts the living clients of a role."""
    return f"living_{role.name.lower()}"


def file_bytes(fields: Mapping[str, str]) -> int:
    """Size of a history with these fields."""
    rows = (FINE + COARSE) * _record_type(fields).itemsize + EVENTS * EVENT.itemsize
    return HEADER_BYTES + rows


def _record_type(fields: Mapping[str, str]) -> np.dtype[np.void]:
    return np.dtype([*STAMP, *((name, f"<{kind}") for name, kind in fields.items()), *_CHECK])


def read(directory: Directory) -> History:
    """Reads the history of a buffer, also while it is being written; takes no lock.

    Raises:
        BufferNotFoundError: there is none.
        FormatError, CorruptBufferError, UnsafePathError: what is there is none that can be read.
    """
    where = directory.path / layout.HISTORY
    size = directory.stat(layout.HISTORY).st_size
    if size > LIMIT:
        raise _damaged(where, f"has {size:,} bytes, more than any history has")
    return parse(directory.read(layout.HISTORY, limit=LIMIT), where)


def parse(data: bytes, where: Path) -> History:
    """Reads a history from its bytes.

    Raises:
        FormatError: not a history, or one of another version.
        CorruptBufferError: a header that is damaged, or another size than it says.
    """
    page, fields = _parsed_header(data, where)
    rooms = [int(page[name]) for name in ("fine", "coarse", "events")]
    sizes = [int(page["record_bytes"])] * 2 + [int(page["event_bytes"])]
    expected = HEADER_BYTES + sum(room * size for room, size in zip(rooms, sizes, strict=True))
    types = [_record_type(fields), _record_type(fields), EVENT]
    if [kind.itemsize for kind in types] != sizes or expected != len(data) or not all(rooms):
        raise _damaged(where, f"has {len(data):,} bytes, and its header speaks of {expected:,}")
    fine, coarse, events = (
        _whole(np.frombuffer(data, kind, room, HEADER_BYTES + before))
        for kind, room, before in zip(types, rooms, _offsets(rooms, sizes), strict=True)
    )
    return History(
        page["uuid"].tobytes(),
        int(page["created_ns"]),
        fields,
        *(fine[0], coarse[0], events[0]),
        (rooms[0], rooms[1], rooms[2]),
        fine[1] + coarse[1] + events[1],
    )


def _parsed_header(data: bytes, where: Path) -> tuple[np.void, dict[str, str]]:
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{where}: not a history of shmbuffer; the next recorder starts it anew")
    if len(data) < HEADER_BYTES:
        raise _damaged(where, f"has {len(data)} bytes, too few for a header")
    page = np.frombuffer(data, HEADER, 1)[0]
    if page["version"] != VERSION or page["endian"] != layout.ENDIAN_TAG:
        raise IncompatibleVersionError(
            f"{where}: a history of format version {page['version']}, this is version {VERSION}; "
            "read it with the version that wrote it, the next recorder starts it anew"
        )
    if _core.crc32c(data[: HEADER_BYTES - 4]) != page["crc32c"]:
        raise _damaged(where, "has a header that does not fit its checksum")
    fields = _fields_of(page["fields"].tobytes()[: int(page["fields_bytes"])])
    return page, fields


def open_ends(events: NDArray[np.void]) -> dict[int, Event]:
    """Those who were seen coming and not going, by incarnation, as it was first noted."""
    found: dict[int, Event] = {}
    roles = {int(role): role for role in Role}
    columns = (events[name].tolist() for name in ("kind", "role", "pid", "incarnation", "name"))
    for kind, role, pid, incarnation, name in zip(*columns, strict=True):
        if kind == EventKind.JOINED:
            known, text = roles.get(role, Role.CLIENT), name.decode(errors="replace")
            found.setdefault(
                incarnation, Event(EventKind.JOINED, known, pid, incarnation, name=text)
            )
        elif kind in (EventKind.LEFT, EventKind.DIED):
            found.pop(incarnation, None)
    return found


def _offsets(rooms: list[int], sizes: list[int]) -> list[int]:
    return [sum(r * s for r, s in zip(rooms[:n], sizes[:n], strict=True)) for n in range(3)]


def _fields_of(text: bytes) -> dict[str, str]:
    """Names and types out of a header; of what is none, none, which fits no record."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    reserved = {name for name, _ in (*STAMP, *_CHECK)}
    if not isinstance(fields, dict) or reserved & fields.keys():
        return {}
    named = all(name.isidentifier() for name in fields)
    return fields if named and all(kind in ("u8", "f8") for kind in fields.values()) else {}


def _whole(ring: NDArray[np.void]) -> tuple[NDArray[np.void], int]:
    """What is whole in a ring, in order, and the number of places that something else is in."""
    used = np.flatnonzero(ring["number"])
    size = ring.dtype.itemsize
    data = memoryview(ring[used].tobytes())
    sums = [_core.crc32c(data[at : at + size - 8]) for at in range(0, len(data), size)]
    good = ring["crc32c"][used] == np.array(sums, np.uint32)
    good &= (ring["number"][used] - 1) % len(ring) == used
    good &= ring["number"][used] < _MANY
    newest = ring["number"][used][good].max(initial=0)
    good &= ring["number"][used] + len(ring) > newest  # else it is of a lap that has ended
    found = ring[used[good]]
    return found[np.argsort(found["number"])], len(used) - len(found)


def _damaged(where: Path, what: str) -> CorruptBufferError:
    return CorruptBufferError(
        f"{where}: {what}; nothing else is harmed, and the next recorder starts it anew", path=where
    )


class Recorder:
    """Writes a history. Open one with `open`; it is the only one as long as it is open.

    Attributes:
        history: what was there when it was opened; None if it was begun anew.
        reason: why it was begun anew, if there was something that could not be gone on with.
    """

    def __init__(
        self, file: Lock, where: Path, history: History | None, reason: str | None
    ) -> None:
        self.history = history
        self.reason = reason
        self._file = file
        self._where = where
        self._fields = recorded_fields()
        self._packed = struct.Struct("<4Q" + "".join(_CODES[k] for k in self._fields.values()))
        size = self._packed.size + 8
        self._fine = _Place(HEADER_BYTES, size, FINE)
        self._coarse = _Place(self._fine.end, size, COARSE)
        self._events = _Place(self._coarse.end, EVENT.itemsize, EVENTS)
        self._coarse_ns: int | None = None
        if history is not None:
            for place, ring in (
                (self._fine, history.fine),
                (self._coarse, history.coarse),
                (self._events, history.events),
            ):
                place.number = int(ring["number"][-1]) if len(ring) else 0
            if len(history.coarse):
                self._coarse_ns = int(history.coarse["time_ns"][-1])

    @classmethod
    def open(cls, files: Files, uuid: bytes) -> Self:
        """Goes on with the history of a buffer, or begins one; under init.lock.

        Args:
            files: of the buffer.
            uuid: of the buffer; of another one, such as the one that this was copied from, the
                history is begun anew.

        Raises:
            AttachTimeout: another process records it.
            SpaceError: there is no room for it.
            ReadOnlyError, UnsafePathError, BufferUnlinkedError: as for `Directory.create`.
        """
        directory, where = files.directory, files.path / layout.HISTORY
        try:
            file = _locked(directory)
        except BufferNotFoundError:
            return cls(_made(directory, uuid), where, None, None)
        try:
            found = _to_go_on_with(directory, uuid)
        except BaseException:  # what cannot be read right now is no reason to begin anew
            file.close()
            raise
        if isinstance(found, History):
            return cls(file, where, found, None)
        with file:
            return cls(_made(directory, uuid), where, None, found)

    def record(self, values: Mapping[str, int | float], recorder: int) -> None:
        """Writes a record of this moment, and, once a minute, another one that is kept for longer.

        Args:
            values: the fields, and whatever else; a field that is missing is recorded as 0.
            recorder: incarnation of the client that we are.

        Raises:
            OSError: it could not be written.
        """
        now_ns, body = time.time_ns(), []
        for name, kind in self._fields.items():
            value = values.get(name, 0)
            body.append(float(value) if kind == "f8" else int(value) & 2**64 - 1)
        boottime_ns = _boottime_ns()
        self._put(self._fine, self._packed, now_ns, boottime_ns, recorder, *body)
        _core.reached("history.fine")
        # By the wall clock, so that recorders that live shortly do not fill the ring; one that was
        # set back must not stop it.
        last_ns = self._coarse_ns
        if last_ns is None or not last_ns <= now_ns < last_ns + int(COARSE_S * 10**9):
            self._put(self._coarse, self._packed, now_ns, boottime_ns, recorder, *body)
            _core.reached("history.coarse")
            self._coarse_ns = now_ns

    def note(self, event: Event, recorder: int) -> None:
        """Writes an event of this moment.

        Raises:
            OSError: it could not be written.
        """
        self._put(
            self._events,
            _PACKED_EVENT,
            *(time.time_ns(), _boottime_ns(), recorder),
            *(event.kind, event.role, event.pid, event.incarnation, event.epoch),
            UNKNOWN_EXITCODE if event.exitcode is None else event.exitcode,
            RESTARTED if event.restarted else 0,
            event.name.encode()[:48],
        )
        _core.reached("history.event")

    def note_deaths(self, died: Sequence[Event]) -> None:
        """Notes those of these whose end is not noted yet; see the function."""
        place = self._events
        data = os.pread(self._file.fd, place.size * place.room, place.begin)
        events = _whole(np.frombuffer(data, EVENT))[0]
        place.number = int(events["number"].max(initial=0))
        ends = open_ends(events)
        ended = set(events["incarnation"].tolist()) - ends.keys()
        for event in died:
            if event.incarnation not in ended:
                seen = ends.get(event.incarnation, event)
                self.note(replace(event, name=seen.name), BY_RECOVERY)

    def close(self) -> None:
        """Lets the next recorder in. Idempotent."""
        self._file.close()

    def _put(self, place: _Place, packed: struct.Struct, *values: Any) -> None:
        if self._file.fd < 0:
            raise ValueError(f"{self._where}: this recorder was closed")
        number = place.number + 1
        body = packed.pack(number, *values)
        data = body + int(_core.crc32c(body)).to_bytes(8, "little")
        at = place.begin + (number - 1) % place.room * place.size
        _write(self._file.fd, data, at, self._where)
        place.number = number  # only now: what was not written whole is written over


def note_deaths(files: Files, uuid: bytes, died: Sequence[Event]) -> None:
    """Notes those whom a recovery has found dead, where there is a history; under init.lock.

    Those whose end is in there already are left out. What keeps it from being written is logged:
    the recovery goes on.
    """
    try:
        file = _locked(files.directory)
    except BufferNotFoundError:
        return
    except (AttachTimeout, OSError, ShmBufferError) as error:
        _log.warning("%s: the dead are not in the history: %s", files.path, str(error))
        return
    try:
        # Of its own: the other rings are large, and somebody waits for the recovery.
        page, fields = _parsed_header(os.pread(file.fd, HEADER_BYTES, 0), files.path)
        rooms = tuple(int(page[name]) for name in ("fine", "coarse", "events"))
        ours = page["uuid"].tobytes() == uuid
        if ours and (fields, rooms) == (recorded_fields(), (FINE, COARSE, EVENTS)):
            where, size = files.path / layout.HISTORY, os.fstat(file.fd).st_size
            if size != (expected := file_bytes(fields)):
                raise _damaged(where, f"has {size:,} bytes, and its header speaks of {expected:,}")
            Recorder(file, where, None, None).note_deaths(died)
    except (OSError, ShmBufferError) as error:
        _log.warning("%s: the dead are not in the history: %s", files.path, str(error))
    finally:
        file.close()


def _to_go_on_with(directory: Directory, uuid: bytes) -> History | str:
    """The history that is there, or why a new one has to be begun."""
    try:
        history = read(directory)
    except (FormatError, CorruptBufferError) as error:
        return str(error)
    if history.uuid != uuid:
        return "it is the history of another buffer, from which this one was copied"
    if (history.fields, history.rooms) != (recorded_fields(), (FINE, COARSE, EVENTS)):
        return "it records other things than this version does"
    return history


@dataclass
class _Place:
    """A ring in the file."""

    begin: int
    size: int
    room: int
    number: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.size * self.room


_MANY = 2**62  # records; nobody writes so many, and there has to be a next one
_CODES = {"u8": "Q", "f8": "d"}


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)  # goes on while the machine is suspended


def _locked(directory: Directory) -> Lock:
    return Lock().hold(
        directory,
        layout.HISTORY,
        timeout=0,
        purpose="records the history of the buffer",
        make=False,
    )


def _made(directory: Directory, uuid: bytes) -> Lock:
    """Makes a new history, in the place of one that is there, and locks it."""
    fields = recorded_fields()
    directory.unlink(NEW_HISTORY)
    with directory.create(NEW_HISTORY, file_bytes(fields)) as file:
        _write(file.fd, _header(uuid, fields), 0, directory.path / NEW_HISTORY)
        _core.reached("history.header")
    directory.rename(NEW_HISTORY, layout.HISTORY)
    _core.reached("history.renamed")
    return _locked(directory)


def _write(fd: int, data: bytes, at: int, where: Path) -> None:
    with explained(where, needed=len(data)):
        if os.pwrite(fd, data, at) != len(data):
            raise OSError(errno.EIO, "only a part could be written")


def _header(uuid: bytes, fields: Mapping[str, str]) -> bytes:
    text = json.dumps(fields).encode()
    page = np.zeros((), HEADER)
    page["magic"] = np.void(MAGIC)
    page["version"] = VERSION
    page["endian"] = layout.ENDIAN_TAG
    page["uuid"] = np.void(uuid)
    page["created_ns"] = time.time_ns()
    page["record_bytes"] = _record_type(fields).itemsize
    page["event_bytes"] = EVENT.itemsize
    page["fine"] = FINE
    page["coarse"] = COARSE
    page["events"] = EVENTS
    page["fields_bytes"] = len(text)
    page["fields"] = np.void(text.ljust(HEADER["fields"].itemsize, b"\0"))
    data = page.tobytes()[:-4]
    return data + int(_core.crc32c(data)).to_bytes(4, "little")
