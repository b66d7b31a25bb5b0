"""Format of the history of a buffer: its counters over time, in a file of constant size.

     header ── one page: the uuid of the buffer, and the fields of a record
     fine   ── one record per second, 1 hour     ┐
     coarse ── one record per minute, 1 week     ├ rings: record n is at index (n - 1) mod capacity
     events ── clients that joined, left or died; recoveries┘

A record contains the values of the counters instead of their increments. A rate can therefore be
computed from any two records, and a missing record does not affect the others. The header contains
the names of the fields, so that later versions can record different counters.

Always true
  1. At most one process writes. It holds the lock of the file, which the kernel releases if the
     process dies.
  2. The space of the file is allocated and the header is written before the file gets its name. Its
     size never changes.
  3. A record is valid only if its checksum is correct and its index matches its number. A record
     that was written only in part, because of a death or a power cut, is skipped. Other records are
     not affected.
  4. Writing does not delay other processes. The writer uses plain writes, never syncs, and does not
     use the mutex or pages that other processes map. A reader takes no lock, so a suspended reader
     does not block the writer.
If the writer dies, the kernel keeps the written data, and the next writer continues after the last
record. If the history is damaged, or was written by a different program or version, the next writer
starts a new history, and readers get an error. Records call the client that wrote them the
recorder.

This module does not use a file format of the standard library. On a machine without Prometheus, the
history is the only record of the events before a crash, and `plot` uses it. The file must not grow,
a suspended reader must not block the coordinator, and read access must be enough to read the file.

* ``sqlite3`` with a rollback journal lets a suspended reader block the writer.
* With a write-ahead log, such a reader makes the log grow without a limit, and readers need write
  access.
* Rotated lines of text change their size, and a reader may find files that are being replaced.

A ring of records with checksums has none of these problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError, FormatError, IncompatibleVersionError
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Role
from shmbuffer.memory.ring.counters import RUNTIME_COUNTERS
from shmbuffer.memory.system.region import Directory

MAGIC = b"SHMHIS\x00\x01"
VERSION = 1

FINE, FINE_S = 3600, 1.0
"""Number of records of the fine ring, and the seconds between two records: one hour."""

COARSE, COARSE_S = 7 * 24 * 60, 60.0
"""Number of records of the coarse ring, and the seconds between two records: one week."""

EVENTS = 2048
"""Number of events in the ring of events."""

HEADER_BYTES = layout.PAGE
LIMIT = 64 * 2**20
"""Size in bytes above which a history is rejected as damaged, before it is read."""

FLOATS = ("max_priority", "p_sum", "samples_per_insert")
"""Fields that are float64; all others are unsigned integers of 64 bits."""

HEADER = np.dtype(
    [
        *(("magic", "V8"), ("version", "<u2"), ("pad", "V2"), ("endian", "<u4"), ("uuid", "V16")),
        *(("created_ns", "<u8"), ("record_bytes", "<u4"), ("event_bytes", "<u4")),
        *(("fine", "<u4"), ("coarse", "<u4"), ("events", "<u4")),
        *(("fields_bytes", "<u4"), ("fields", "V4028"), ("crc32c", "<u4")),
    ]
)

# The first fields of each record: its number (from 1), the wall clock time, the nanoseconds since
# boot, and the incarnation of the recorder. No program can set the clock that counts from boot, but
# its values can be compared only within one boot.
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

UNKNOWN_EXITCODE = 2**31 - 1
RESTARTED = 1  # flag of a DIED event: the process was restarted
BY_RECOVERY = 0  # used instead of a recorder's incarnation if no recorder observed the death

_MANY = 2**62  # larger than any valid number, so that there is always a next number


class EventKind(IntEnum):
    """The kind of an event.

    When a recorder starts, it also records JOINED for the clients that are already attached.
    """

    JOINED = 1
    LEFT = 2
    DIED = 3
    RECOVERED = 4


@dataclass(frozen=True)
class Event:
    """An event in the history of a buffer."""

    kind: EventKind
    role: str = "client"  # lower-case role of the client, or of the recorder for a recovery
    pid: int = 0  # pid of the client; 0 for a recovery
    incarnation: int = 0  # incarnation of the client; 0 if unknown
    epoch: int = 0  # number of recoveries at that time
    name: str = ""  # name of a process that a coordinator started, otherwise ""
    # exit code of a dead process, as in ``multiprocessing``; None if unknown
    exitcode: int | None = None
    restarted: bool = False  # True if a dead process was restarted
    # incarnation of the recorder of this event; 0 (`BY_RECOVERY`) for a client that was found dead
    recorder: int = BY_RECOVERY
    time_ns: int = 0  # wall clock time; 0 if the event is not recorded yet
    boottime_ns: int = 0  # time since boot; 0 if the event is not recorded yet

    @property
    def time_s(self) -> float:
        """The wall clock time of the event, in seconds since 1970."""
        return self.time_ns / 1e9

    @property
    def who(self) -> str:
        """The name of the client, or else its role and pid; for a recovery, the recorder's role."""
        return self.name or (f"{self.role} {self.pid}" if self.pid else self.role)

    def to_row(self) -> dict[str, Any]:
        """Returns the values of the fields of `EVENT`, except those that `HistoryWriter` adds."""
        code = UNKNOWN_EXITCODE if self.exitcode is None else self.exitcode
        return {
            **asdict(self),
            "role": Role.__members__.get(self.role.upper(), Role.CLIENT),
            "exitcode": code,
            "flags": RESTARTED if self.restarted else 0,
            # NumPy truncates a long name, and a name may contain characters without an encoding
            "name": self.name.encode(errors="replace"),
        }


@dataclass(frozen=True)
class History:
    """A history that was read, without the records that do not match their checksums."""

    uuid: bytes  # uuid of the recorded buffer
    fields: Mapping[str, str]  # names of the recorded fields, with their types
    # one record per second, oldest first; the fields of the dtype are `STAMP` and `fields`
    fine: NDArray[np.void]
    coarse: NDArray[np.void]  # one record per minute, with the same dtype
    events: Sequence[Event]  # oldest first
    # the three rings, with the number of their newest record
    rings: tuple[HistoryRing, HistoryRing, HistoryRing]
    left_out: int  # number of invalid records, which are not in the arrays above


def recorded_fields() -> dict[str, str]:
    """Returns the names of the fields that this version records, with their types."""
    names = (
        *("epoch", "head", "write_count", "length", "limited"),
        *layout.COUNTERS,
        *RUNTIME_COUNTERS,
        *(living(role) for role in Role),
        *FLOATS,
    )
    return {name: "f8" if name in FLOATS else "u8" for name in names}


def living(role: Role) -> str:
    """Returns the name of the field that counts the living clients with a role."""
    return f"living_{role.name.lower()}"


def file_bytes(fields: Mapping[str, str]) -> int:
    """Returns the size in bytes of a history with these fields."""
    return rings(fields)[-1].end


def record_type(fields: Mapping[str, str]) -> np.dtype[np.void]:
    """Returns the dtype of a record with these fields."""
    return np.dtype([*STAMP, *((name, f"<{kind}") for name, kind in fields.items()), *_CHECK])


@dataclass
class HistoryRing:
    """A ring of records or events in the file of a history."""

    dtype: np.dtype[np.void]  # dtype of a record
    capacity: int  # number of records
    begin: int  # offset of the ring in bytes
    number: int = 0  # number of the newest record; 0 if there is none

    @property
    def end(self) -> int:
        """The offset of the first byte after the ring."""
        return self.begin + self.capacity * self.dtype.itemsize

    def parse(self, data: bytes) -> tuple[NDArray[np.void], int]:
        """Parses the bytes of the ring, and sets `number`.

        Returns the valid records, ordered by number, and the number of invalid records.
        """
        ring = np.frombuffer(data, self.dtype, self.capacity)
        used = np.flatnonzero(ring["number"])
        numbers, size = ring["number"][used], self.dtype.itemsize
        records = memoryview(ring[used].tobytes())
        sums = [_core.crc32c(records[at : at + size - 8]) for at in range(0, len(records), size)]
        good = ring["crc32c"][used] == np.array(sums, np.uint32)
        good &= ((numbers - 1) % self.capacity == used) & (numbers < _MANY)
        # a record from an earlier pass over the ring is invalid, too
        good &= numbers + self.capacity > numbers[good].max(initial=0)
        found = ring[used[good]]
        self.number = int(found["number"].max(initial=0))
        return found[np.argsort(found["number"])], len(used) - len(found)


def rings(fields: Mapping[str, str]) -> tuple[HistoryRing, HistoryRing, HistoryRing]:
    """Returns the fine ring, the coarse ring and the events of a history with these fields."""
    fine = HistoryRing(record_type(fields), FINE, HEADER_BYTES)
    coarse = HistoryRing(fine.dtype, COARSE, fine.end)
    return fine, coarse, HistoryRing(EVENT, EVENTS, coarse.end)


def header_sizes(rings: tuple[HistoryRing, HistoryRing, HistoryRing]) -> dict[str, int]:
    """Returns the header fields that contain the sizes of records and the capacities of rings."""
    fine, coarse, events = rings
    return {
        "record_bytes": fine.dtype.itemsize,
        "event_bytes": events.dtype.itemsize,
        "fine": fine.capacity,
        "coarse": coarse.capacity,
        "events": events.capacity,
    }


def read(directory: Directory) -> History:
    """Reads the history of a buffer. Takes no lock, so another process may be writing it.

    Raises:
        BufferNotFoundError: The buffer has no history.
        FormatError, CorruptBufferError: The file is not a valid history of this version.
    """
    where = directory.path / layout.HISTORY
    size = directory.stat(layout.HISTORY).st_size
    if size > LIMIT:
        raise _damaged(where, f"has {size:,} bytes, which is more than any valid history has")
    return parse(directory.read(layout.HISTORY, limit=LIMIT), where)


def parse(data: bytes, where: Path) -> History:
    """Parses the bytes of a history. ``where`` is the path of the file, for error messages."""
    uuid, fields, parts = parse_header(data, len(data), where)
    found, torn = zip(*(ring.parse(data[ring.begin : ring.end]) for ring in parts), strict=True)
    return History(
        uuid,
        fields,
        found[0],
        found[1],
        parse_events(found[2]),
        rings=parts,
        left_out=sum(torn),
    )


def parse_header(
    data: bytes, size: int, where: Path
) -> tuple[bytes, dict[str, str], tuple[HistoryRing, HistoryRing, HistoryRing]]:
    """Parses the header of a history.

    Args:
        data: The first page of the file, or the whole file.
        size: The size of the file in bytes.
        where: The path of the file, for error messages.

    Returns:
        The uuid of the buffer, the fields of a record, and the rings.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{where}: this is not a history of shmbuffer; the next recorder starts a new one"
        )
    if len(data) < HEADER_BYTES:
        raise _damaged(where, f"has {len(data)} bytes, which is too few for a header")
    page = np.frombuffer(data, HEADER, 1)[0]
    if page["version"] != VERSION or page["endian"] != layout.ENDIAN_TAG:
        raise IncompatibleVersionError(
            f"{where}: the history has format version {page['version']}, but this build needs "
            f"{VERSION}; read it with the version that wrote it, or let the next recorder start a "
            "new one"
        )
    if _core.crc32c(data[: HEADER_BYTES - 4]) != page["crc32c"]:
        raise _damaged(where, "has a header that does not match its checksum")
    fields = _parse_fields(page["fields"].tobytes()[: int(page["fields_bytes"])])
    found = rings(fields)
    sizes = {name: int(page[name]) for name in header_sizes(found)}
    expected = HEADER_BYTES + sizes["events"] * sizes["event_bytes"]
    expected += (sizes["fine"] + sizes["coarse"]) * sizes["record_bytes"]
    if sizes != header_sizes(found) or expected != size:
        raise _damaged(where, f"has {size:,} bytes, but its header requires {expected:,}")
    return page["uuid"].tobytes(), fields, found


def _parse_fields(text: bytes) -> dict[str, str]:
    """Parses the JSON of the fields in a header. Returns an empty dict if it is invalid."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    reserved = {name for name, _ in (*STAMP, *_CHECK)}
    if not isinstance(fields, dict) or reserved & fields.keys():
        return {}
    are_names = all(name.isidentifier() for name in fields)
    return fields if are_names and all(kind in ("u8", "f8") for kind in fields.values()) else {}


def parse_events(rows: NDArray[np.void]) -> list[Event]:
    """Converts rows of the dtype `EVENT` to events, without kinds that are unknown here."""
    kinds = {int(kind): kind for kind in EventKind}
    names = [name for name in EVENT.names or () if name not in ("number", "crc32c", "pad")]
    found = []
    for values in zip(*(rows[name].tolist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        flags, code = row.pop("flags"), row["exitcode"]
        row |= {
            "role": layout.name_of(Role, row["role"]).lower(),
            "name": row["name"].decode(errors="replace"),
            "exitcode": None if code == UNKNOWN_EXITCODE else code,
            "restarted": bool(flags & RESTARTED),
        }
        if (kind := kinds.get(row.pop("kind"))) is not None:
            found.append(Event(kind, **row))
    return found


def open_ends(events: Iterable[Event]) -> dict[int, Event]:
    """Returns the JOINED event of each client whose end is not recorded, by incarnation."""
    found: dict[int, Event] = {}
    for event in events:
        if event.kind == EventKind.JOINED:
            found.setdefault(event.incarnation, event)
        elif event.kind in (EventKind.LEFT, EventKind.DIED):
            found.pop(event.incarnation, None)
    return found


def _damaged(where: Path, what: str) -> CorruptBufferError:
    return CorruptBufferError(
        f"{where}: {what}; the buffer is not affected, and the next recorder starts a new history",
        path=where,
    )
