"""Creates a private copy of a save, or of a buffer that this process can only read.

    copy all files ──▶ read the slot words again ──▶ remove changed items ──▶ only valid items

A save is mapped with copy on write, and no process writes to it. Any other buffer is copied if its
files belong to another user or are on a read-only file system. This process cannot take a lock
there, so other processes may write during the copy. As for every reader, an item is valid if its
slot word was the same before and after its bytes were copied. The other parts of the copy may be
from different points in time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import BufferInUseError
from shmbuffer.memory.directory.diagnosis import NO_CLIENT_ALIVE, Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.layout import BufferState
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.upkeep.recovery import Repair
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport


@dataclass(frozen=True)
class CopiedBuffer:
    """A private copy of a buffer. Changes to the copy stay in this process."""

    found: Diagnosis  # the diagnosis, with the control file, which is copied last
    mapped: Mapped | None  # the copies of the other files; None before the first write
    changed: int  # number of elements that were removed, because their words changed meanwhile
    # sentence that says why the buffer may have changed during the copy; None if it did not
    unsettled: str | None


def copy_buffer(files: Files) -> CopiedBuffer:
    """Copies a buffer into private memory, or maps a save with copy on write. Takes no lock.

    Raises:
        BufferInUseError: The buffer was recovered, removed or redefined during the copy.
        SpaceError: The buffer is larger than the free memory.
    """
    before = Diagnosis.read(files, writable=False)
    mapped = before.load(writable=False)
    changed = 0 if mapped is None else _empty_changed(files, mapped)
    found = Diagnosis.read(files, writable=False)
    then, now = before.superblock, found.superblock
    if (then.uuid, then.epoch, then.schema_sha256) != (now.uuid, now.epoch, now.schema_sha256):
        raise BufferInUseError(
            f"{files.path}: the buffer was recovered or redefined while it was copied; call again",
            pids=[],
        )
    unsettled = None
    if found.reason_to_recover() is None:
        unsettled = "the buffer may be in use"
    elif memoryview(before.control.map) != memoryview(found.control.map):
        unsettled = "the buffer was used during the check"
    return CopiedBuffer(found, mapped, changed, unsettled)


def repair_copy(copied: CopiedBuffer, mapped: Mapped, *, verify: bool = True) -> RecoveryReport:
    """Repairs a copy in memory like a recovery, without changing any file.

    If all processes that used the buffer ran in this boot, items without checksums are kept,
    because their slot words were compared during the copy. If ``verify`` is False, the items of a
    save are not compared with their checksums.
    """
    found, control, began = copied.found, copied.found.control, time.perf_counter_ns()
    is_save = found.is_save()
    reason = NO_CLIENT_ALIVE if is_save else found.reason_to_recover()
    of_this_boot = reason in (None, NO_CLIENT_ALIVE)
    if of_this_boot and copied.unsettled is not None:
        reason = "in use"
    report = RecoveryReport(str(found.files.path), str(reason), epoch=found.superblock.epoch)
    _core.format_mutex(control.map)
    saved = int(control.runtime["length"][0]) * mapped.schema.width
    repair = Repair(found, found.superblock, found.settings(), mapped)
    verify = verify or not is_save
    report = repair.run(report, verify=verify, left_in_order=False, believed=of_this_boot)
    if is_save:  # a slot that was saved with an item cannot have the word zero
        gone = abs(saved - report.items - report.checksum_failed) // mapped.schema.width
        report = replace(report, words_refused=max(report.words_refused, gone))
    control.runtime["state"] = BufferState.READ_ONLY if is_save else BufferState.READY
    # private memory needs no allocation
    control.runtime["allocated"] = mapped.schema.capacity
    duration_ms = (time.perf_counter_ns() - began) / 1e6
    # the clients keep using the original
    return replace(report, clients_retired=0, duration_ms=duration_ms)


def _empty_changed(files: Files, mapped: Mapped) -> int:
    """Empties the slots of the copy whose words have changed since they were copied.

    Returns the number of elements that were removed.
    """
    schema, live = mapped.schema, SlotsFile(mapped.slots, mapped.schema)
    words = (live.at["words"], live.at["words"] + 8 * live.capacity)
    now = SlotsFile(files.map_slots(schema, writable=False, parts=[words]), schema).words
    changed = live.words != now
    removed = int(np.count_nonzero(slots.committed(live.words[changed])))
    live.words[changed] = 0
    return removed * live.width
