"""Checks a buffer for damage, and changes nothing.

If the buffer is in use, the check holds its mutex for a few milliseconds per million elements.
Checksums are compared without the mutex. If the buffer has no clients, the check does not take the
mutex, because this would repair the buffer. Damage that the next recovery will repair is reported
as a note instead of a problem. If the directory is read-only, the check examines a copy and takes
no lock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError, CorruptBufferError, LockTimeout, ShmBufferError
from shmbuffer.memory.directory.diagnosis import Diagnosis, is_save
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.neighbours import directory_of
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.directory.written import Written
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState, EntryState, Flag, Phase, Role
from shmbuffer.memory.mapped.control import Control, Superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.progress import OnProgress, Progress, report_to
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.copied_buffer import copy_buffer
from shmbuffer.memory.upkeep.recovery import wrong_checksums

NO_SCHEMA = "nothing has been written yet: there is no schema"


@dataclass
class CheckReport:
    """The result of a check."""

    path: str  # the directory, or "anonymous memory"
    alive: bool = False  # True if a living client uses the buffer
    items: int = 0  # number of committed elements
    verified: int = 0  # number of elements whose checksum was compared
    problems: list[str] = field(default_factory=list)  # one sentence for each kind of damage
    # damage that the next recovery will repair, and parts of the buffer that could not be checked
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the check found no damage."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that can be written as JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {'intact' if self.ok else 'DAMAGED'}, {self.items:,} items, "
            f"{self.verified:,} verified, {'in use' if self.alive else 'not in use'}"
        ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check(
    path: str | PathLike[str], *, timeout: float = 60.0, on_progress: OnProgress | None = None
) -> CheckReport:
    """Checks a directory under init.lock, without becoming a client.

    If the directory belongs to another user or is on a read-only file system, a private copy is
    checked without a lock. If the directory may be in use, priorities, sums and counters are not
    compared.
    """
    # init.lock prevents a recovery from creating a new mutex while this function, which has no
    # registry entry, holds the old mutex.
    path = directory_of(path)
    with Directory.open(path, reading=True) as directory:
        files = Files(directory)
        files.require_control()
        report = CheckReport(str(directory.path))
        report.notes += _history_faults(directory)
        try:
            if directory.copying or is_save(path):
                _check_copy(report, Files(directory, private=True), on_progress)
                return report
            # first, because no lock file must be created next to files of another program
            Diagnosis.read(files)
            with files.lock(timeout):
                found = Diagnosis.read(files)
                _compare_control(report, found)
                mapped = _note_schema(report, found.load())
                if mapped is not None:
                    native = mapped.ring(found.control, entry=layout.ENTRIES - 1)
                    used = _compare_slots(report, found.control, mapped, native, files)
        except CorruptBufferError as error:
            report.problems.append(str(error))
            return report
        if mapped is not None:
            with report_to(on_progress):
                _compare_checksums(report, found.superblock, mapped, native, used)
        return report


def check_living(seat: Seat) -> CheckReport:
    """Checks the buffer to which a handle is attached; see `check`."""
    superblock, mapped = seat.control.superblock(), seat.mapped
    report = CheckReport(seat.where, alive=True)
    report.problems += _impossible_fields(seat.control, superblock)
    if mapped is None:
        report.notes.append(NO_SCHEMA)
    else:
        files = seat.backing if isinstance(seat.backing, Files) else None
        used = _compare_slots(report, seat.control, mapped, seat.native, files)
        _compare_checksums(report, superblock, mapped, seat.native, used)
    return report


def _history_faults(directory: Directory) -> list[str]:
    """Describes faults of the history, which are only notes because the items do not need it."""
    try:
        found = history.read(directory)
    except BufferNotFoundError:
        return []
    except ShmBufferError as error:
        return [f"the history cannot be read: {error}"]
    return [f"{found.left_out} records of the history are torn"] if found.left_out else []


def _check_copy(report: CheckReport, files: Files, on_progress: OnProgress | None) -> None:
    """Checks a private copy of the files, without a lock."""
    copied = copy_buffer(files)
    found, changed = copied.found, copied.changed
    _compare_control(report, found)
    if any(client.state == "unknown" for client in found.registry.clients()):
        report.notes.append("this process cannot determine whether all clients are alive")
    mapped = _note_schema(report, copied.mapped)
    if mapped is None:
        return
    native = mapped.ring(found.control, entry=layout.ENTRIES - 1)
    if found.is_save():
        native.rebuild()  # a save has no priority tree
    if copied.unsettled is None:
        used = _compare_slots(report, found.control, mapped, native, files)
    else:
        report.notes.append(
            f"{copied.unsettled}, so a copy was checked without a lock: priorities, sums and "
            f"counters were not compared, and {changed:,} items were skipped because they were "
            "overwritten during the copy"
        )
        live = SlotsFile(mapped.slots, mapped.schema)
        used = Written(files, live).slots()
        report.items = int(np.count_nonzero(live.holds(slice(used)))) * live.width
    with report_to(on_progress):
        _compare_checksums(report, found.superblock, mapped, native, used)


def _compare_control(report: CheckReport, found: Diagnosis) -> None:
    """Checks the control file, and adds a note if the buffer needs a recovery."""
    control, superblock = found.control, found.superblock
    report.problems += _impossible_fields(control, superblock)
    reason = found.reason_to_recover()
    report.alive = reason is None
    if reason is not None and (control.entries["state"] != 0).any():
        report.notes.append(f"{reason}: the next process that opens the buffer will recover it")
    if control.repaired:
        report.problems.append("one of the two superblock copies is damaged; the other is used")


def _note_schema(report: CheckReport, mapped: Mapped | None) -> Mapped | None:
    """Adds a note if there is no schema. Returns ``mapped`` unchanged."""
    if mapped is None:
        report.notes.append(NO_SCHEMA)
    return mapped


def _impossible_fields(control: Control, superblock: Superblock) -> list[str]:
    """Describes the impossible values in the control file, one sentence per value."""
    found = []
    state = int(control.runtime["state"][0])
    if state not in list(BufferState):
        found.append(f"invalid buffer state {state}")
    head, since = (int(control.runtime[name][0]) for name in ("head", "queue_since"))
    if since > head:
        found.append(f"the queue begins at ticket {since}, but the next ticket is {head}")
    if spare := sum(int(np.count_nonzero(part)) for part in control.spare(superblock)):
        found.append(f"{spare} bytes of the control file that belong to no field are not zero")
    entries = control.entries
    used, claims = entries["state"] != EntryState.FREE, entries["phase"] != Phase.IDLE
    for name, limit, where in (
        ("state", max(EntryState), used),
        ("role", max(Role), used),
        ("phase", max(Phase), claims),
        ("count", superblock.capacity, claims),
    ):
        found += [
            f"registry entry {entry}: its {name} is {entries[name][entry]}, but {int(limit)} is "
            "the limit"
            for entry in (where & (entries[name] > limit)).nonzero()[0]
        ]
    return found


def _compare_slots(
    report: CheckReport,
    control: Control,
    mapped: Mapped,
    native: _core.Ring,
    files: Files | None,
) -> int:
    """Checks everything in the slots file except the checksums, and the ledger.

    Returns the number of slots up to the last one that was ever written.
    """
    live = SlotsFile(mapped.slots, mapped.schema)
    written = None if files is None else Written(files, live)
    used = max(_count_written(control, live), 0 if written is None else written.slots())
    report.items = int(np.count_nonzero(live.holds(slice(used)))) * live.width
    found = native.check(report.alive, used, LOCK_TIMEOUT_NS)
    if isinstance(found, int):
        raise LockTimeout(
            f"{report.path}: a living process does not release the mutex of the buffer, so the "
            "buffer cannot be checked; continue or end that process (see `shmbuffer inspect`)"
        )
    nodes, leaves, length, words, orphans, records, nexts, reserved, consumed = found
    if written is not None and control.runtime["prioritized"][0]:
        before = max(used, _count_written(control, live))
        beyond = written.count_masses(before * live.width)
        leaves += beyond if _count_written(control, live) <= before else 0
    unfinished = report.problems
    if not report.alive:
        writing = int(np.count_nonzero(live.writing(slice(used))))
        if writing:
            report.notes.append(f"{writing} slots were being written; recovery frees them")
        orphans = 0
        if _has_unfinished_work(control):
            unfinished = report.notes
    for count, to, problem in (
        (nodes, unfinished, "priority tree: {} nodes are not the sum of their children"),
        (leaves, unfinished, "priority tree: {} leaves are not the mass of their priority"),
        (length, unfinished, "the number of items is off by {}"),
        (words, report.problems, "{} slot words have an impossible ticket"),
        (orphans, report.problems, "{} slots are being written, but no client has claimed them"),
        (records, report.problems, "{} records are outside the used part of the byte ring"),
        (nexts, unfinished, "{} next observations are not in the row to which their slots link"),
        (reserved, unfinished, "{} counts of reserved space differ from the reservations"),
        (consumed, unfinished, "{} delivery records of consumers are invalid"),
    ):
        if count:
            to.append(problem.format(count))
    return used


def _count_written(control: Control, live: SlotsFile) -> int:
    """Returns the number of slots that were ever written, according to the head of the ring."""
    return min(int(control.runtime["head"][0]), live.capacity)


def _has_unfinished_work(control: Control) -> bool:
    """True if a client died while it held the mutex or had a claim."""
    mutex = control.runtime[0]["mutex"].tobytes()
    return bool((control.entries["phase"] != Phase.IDLE).any() or any(mutex[:4]))


def _compare_checksums(
    report: CheckReport, superblock: Superblock, mapped: Mapped, native: _core.Ring, used: int
) -> None:
    """Compares the items in the first ``used`` slots with their checksums."""
    if not superblock.flags & Flag.CHECKSUM:
        report.notes.append(
            "the buffer was created with checksum=False, so the bytes of items cannot be verified"
        )
        return
    report.verified = report.items
    with Progress("check", report.items, "items") as progress:
        live = SlotsFile(mapped.slots, mapped.schema)
        wrong = wrong_checksums(native, mapped.schema, live, used, progress)
    report.problems += [f"slot {slot}: the bytes do not match their checksum" for slot in wrong]
