"""Recovers a directory whose clients are all dead, when the first process opens it again.

    READY ──no client alive──▶ RECOVERING ──mutex, claims, words, checksums, tree──▶ READY

Recovery runs under init.lock, so only one process recovers the directory, and no process joins
before the recovery is complete. Every step can be repeated. If the process is killed, another
process starts again with the first step. The state READY is stored last.

If the machine was not rebooted, the page cache contains everything that dead processes stored.
After a reboot, in a copied directory, or if files were restored from a copy, some pages may be
older than others. In these cases an item is kept only if it matches its checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import LockTimeout
from shmbuffer.memory.clients import roster
from shmbuffer.memory.directory import growth
from shmbuffer.memory.directory.diagnosis import NO_CLIENT_ALIVE, Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.written import Written
from shmbuffer.memory.format import layout, ledger, limiter, slots
from shmbuffer.memory.format.array_types import Flags, Floats
from shmbuffer.memory.format.layout import BufferState, EntryState, Flag, Phase, SlotState
from shmbuffer.memory.format.priorities import are_priorities
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped import extents, weights_file
from shmbuffer.memory.mapped.control import Superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.settings import Settings, exponent_fits
from shmbuffer.memory.mapped.slots_file import PIECE, SlotsFile
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.progress import Progress
from shmbuffer.memory.upkeep.history_writer import note_deaths
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport

# A head beyond _MANY_TICKETS is accepted only if an item is at most _LARGEST_GAP tickets older. No
# program writes 10 ** 9 items per second for 70 years, or moves the head this far without writing
# items.
_MANY_TICKETS = 2**61
_LARGEST_GAP = 2**40


def recover_directory(
    found: Diagnosis, reason: str, *, verify: bool = False, left_in_order: bool = False
) -> tuple[RecoveryReport, Mapped | None]:
    """Recovers a directory. The caller holds init.lock.

    Args:
        found: The diagnosis of the directory.
        reason: The reason for the recovery, from `Diagnosis.reason_to_recover`.
        verify: If True, all items are compared with their checksums.
        left_in_order: True if all clients have detached cleanly, so that the slots need no repair.

    Returns:
        The report, and the maps of the files; None instead of the maps if there is no schema.
    """
    files, control, superblock = found.files, found.control, found.superblock
    began = time.perf_counter_ns()
    settings, mapped = found.settings(), found.load()
    _core.reached("recover.locked")
    recovering = replace(superblock, state=BufferState.RECOVERING, epoch=superblock.epoch + 1)
    superblock = control.write(recovering)
    control.runtime["state"] = BufferState.RECOVERING
    _core.reached("recover.state")
    if mapped is not None:
        _allocate_space(found, mapped, reason)
    # in a copied directory, the registry contains clients of another buffer, which may be alive
    if reason != "copy":
        note_deaths(files, control, superblock)
        roster.remove_deaths(files.directory)
    _core.format_mutex(control.map)
    _core.reached("recover.mutex")
    control.clear_spare(superblock)
    report = RecoveryReport(str(files.path), reason, epoch=superblock.epoch)
    if mapped is None:
        files.discard_unfinished()
        retired = int(np.count_nonzero(control.entries["state"]))
        control.entries["state"] = EntryState.FREE
        _core.reached("recover.entries")
        state = BufferState.NO_SCHEMA
        report = replace(report, clients_retired=retired)
    else:
        repair = Repair(found, superblock, settings, mapped)
        report = repair.run(report, verify=verify, left_in_order=left_in_order)
        state = BufferState.READY
    _core.reached("recover.tree")
    if verify or reason != NO_CLIENT_ALIVE:
        weights_file.recover(files.directory)
    # The next two calls come late, so that a process that repeats an interrupted recovery finds the
    # same reason for it.
    files.vouch(mapped.schema if mapped else None)
    control.write(replace(_with_new_identity(superblock, files, reason), state=state))
    _core.reached("recover.superblock")
    report = replace(report, duration_ms=(time.perf_counter_ns() - began) / 1e6)
    report.note(control)  # before READY, so that a process that sees READY also finds the report
    control.entries["last_seen_ns"] = 0  # the clock of former clients may have been ahead
    _core.reached("recover.seen")
    control.touch()
    control.runtime["state"] = state
    _core.reached("recover.ready")
    return report, mapped


def _with_new_identity(superblock: Superblock, files: Files, reason: str) -> Superblock:
    """Returns a copy of a superblock with the current boot id and the identity of the control file.

    If the directory is a copy, the superblock also gets a new uuid and this process as its owner.
    """
    found = files.directory.stat(layout.CONTROL)
    if reason == "copy":
        superblock = superblock.with_owner(uuid=np.random.default_rng().bytes(16))
    now = replace(superblock, boot_id=identity.boot_id(), flags=superblock.flags & ~Flag.SAVE)
    return replace(now, device=found.st_dev, inode=found.st_ino)


def _allocate_space(found: Diagnosis, mapped: Mapped, reason: str) -> None:
    """Allocates the space of the slots again, which a power cut or a copy may have lost.

    If the machine was not rebooted, the files have kept their space. For buffers without checksums
    the space is always allocated again, because a restored copy would not be detected.
    """
    files, superblock, runtime = found.files, found.superblock, found.control.runtime
    schema, used = mapped.schema, 0
    may_be_lost = reason != NO_CLIENT_ALIVE or not superblock.flags & Flag.CHECKSUM
    if may_be_lost:
        used = Written(files, SlotsFile(mapped.slots, schema)).slots()
    allocated = int(runtime["allocated"][0])
    slots = growth.slots_to_allocate(superblock, allocated, used, schema.capacity)
    if may_be_lost:
        files.allocate_again(schema, slots)
        _core.reached("recover.reserved")
    if found.is_save():
        files.write_meta(schema)
    runtime["allocated"] = slots if superblock.flags & Flag.STEPS else schema.capacity
    _core.reached("recover.allocated")


def wrong_checksums(
    native: _core.Ring, schema: Schema, live: SlotsFile, count: int, progress: Progress
) -> list[int]:
    """Returns the first ``count`` slots whose items do not match their checksums, by index."""
    slot_bytes = sum(schema.map_bytes) // schema.capacity
    wrong: list[int] = []
    for first, size in progress.cut(count, slot_bytes):
        wrong += native.verify(first, size)
        if progress.has_listener:
            committed = np.count_nonzero(live.holds(slice(first, first + size)))
            progress.advance(int(committed) * schema.width)
    return wrong


class Repair:
    """Performs the steps between RECOVERING and READY on the mapped files."""

    def __init__(
        self, found: Diagnosis, superblock: Superblock, settings: Settings, mapped: Mapped
    ) -> None:
        self.control = found.control
        self.superblock = superblock
        self.settings = settings
        self.schema = mapped.schema
        self.live = SlotsFile(mapped.slots, mapped.schema)
        self.records_map = mapped.leaves[0] if mapped.schema.record_bytes else None
        self.native = mapped.ring(found.control, entry=0)
        self.ledger = mapped.ledger
        self.capacity = mapped.schema.capacity
        self.width = mapped.schema.width
        self.written = Written(found.files, self.live)
        self.used = slice(0)  # the slots up to the last one in use

    def run(
        self, report: RecoveryReport, *, verify: bool, left_in_order: bool, believed: bool = False
    ) -> RecoveryReport:
        """Runs all steps, and returns the report with the results.

        The files of a directory that seems to have been restored may still be intact. Claims are
        therefore completed in this case, too, so that their batches stay complete.

        Args:
            report: The report to which the results are added.
            verify: If True, items are compared with their checksums even if the machine was not
                rebooted.
            left_in_order: True if all clients have detached cleanly. The slots then need no repair
                and are not read.
            believed: If True, items without checksums are kept for any reason of the recovery.
        """
        runtime, is_save = self.control.runtime, bool(self.superblock.flags & Flag.SAVE)
        trusted = report.reason == NO_CLIENT_ALIVE
        if not self._repair_settings() and left_in_order and self._has_plausible_counters():
            items = int(runtime["length"][0]) * self.width
            self._settle_flow(lambda: items)
            return replace(report, items=items)
        self.used = slice(self.written.slots())
        self._repair_head()
        before = {name: int(runtime[name][0]) for name in ("rolled_back", "rolled_forward")}
        # an estimate for the progress: the words are read only later, and the page may be damaged
        items = min(int(runtime["length"][0]), self.capacity) * self.width
        progress = Progress("check" if is_save else "recover", items, "items")
        retired = self._reap_all(finishing=trusted or report.reason == "restored")
        _core.reached("recover.reaped")
        refused = self._refuse_impossible_words(trusted)
        leftover = self._abort_writing()
        misplaced = self._refuse_misplaced_records(trusted) if self.schema.record_bytes else 0
        _core.reached("recover.words")
        verify = verify or not trusted
        if not verify:
            progress.advance(items // 3)
        believed = believed or trusted
        failed, unverified = self._verify(progress, believed) if verify else (0, 0)
        # always, because no other step detects a damaged record header
        if self.schema.record_bytes:
            failed += self._relink()
        elif self.schema.sharing:
            failed += self.native.repair_links()
        _core.reached("recover.verified")
        repaired = self._repair_priorities()
        _core.reached("recover.priorities")
        runtime["waiters"] = 0
        _core.reached("recover.waiters")
        self._settle_flow(lambda: int(np.count_nonzero(self.live.holds(self.used))) * self.width)
        if not verify:
            progress.advance(items // 3)
        reached = min(int(runtime["head"][0]), self.capacity)
        self.written.clear_masses(reached * self.width)
        self.native.rebuild()
        progress.finish()
        rolled = {name: int(runtime[name][0]) - was for name, was in before.items()}
        return replace(
            report,
            items=int(runtime["length"][0]) * self.width,
            rolled_back=(rolled["rolled_back"] + leftover) * self.width,
            rolled_forward=rolled["rolled_forward"] * self.width,
            clients_retired=retired,
            priorities_repaired=repaired,
            words_refused=refused + misplaced,
            checksum_failed=failed * self.width,
            unverified=unverified * self.width,
        )

    def _repair_settings(self) -> bool:
        """Repairs invalid values of alpha, eps and the maximum priority in the runtime page.

        alpha and eps are restored from the settings. Returns True if one of them was invalid.
        """
        runtime, settings = self.control.runtime, self.settings
        alpha, eps = found = self._exponent()
        if not exponent_fits(alpha, eps, len(self.live.raw)):
            alpha, eps = (1.0 if settings.alpha is None else settings.alpha), settings.eps
        for name, value in (("alpha", alpha), ("eps", eps)):
            runtime[name] = value
            _core.reached("recover.settings")
        if not self._fits(runtime["max_priority"])[0]:
            runtime["max_priority"] = -1.0
        _core.reached("recover.max_priority")
        return (alpha, eps) != found

    def _has_plausible_counters(self) -> bool:
        """True if the counters of the runtime page are possible.

        Returns False for records, because their headers must always be examined.
        """
        runtime = self.control.runtime[0]
        return (
            not self.schema.record_bytes
            and runtime["head"] <= _MANY_TICKETS
            and runtime["length"] <= min(int(runtime["head"]), self.capacity)
            and runtime["next_incarnation"] < layout.INCARNATIONS
        )

    def _settle_flow(self, count_items: Callable[[], int]) -> None:
        """Resets the flow control: all waits and reservations of dead clients end.

        An invalid limiter is removed. If the difference between inserts and samples is impossible,
        both are counted from 0 again. ``count_items`` returns the number of items in the buffer.
        """
        runtime, entries = self.control.runtime, self.control.entries
        for name in ("pending", "reading", "waits_for"):
            entries[name] = 0
            _core.reached("recover.flow")
        for name in ("pending", "limited", "reserved", "reserved_bytes", "next_expiry"):
            runtime[name] = 0
            _core.reached("recover.flow")
        ledger.end_reservations(self.ledger, runtime)
        runtime["queue_since"] = min(int(runtime["queue_since"][0]), int(runtime["head"][0]))
        _core.reached("recover.flow")
        if limiter.active(runtime[0]) is None:  # no limiter, or an invalid one
            runtime["limiter_version"] = 0
        _core.reached("recover.limiter")
        if limiter.is_far_apart(runtime[0], self.capacity * self.width):
            block = self.control.limiter_block(int(runtime["limiter_version"][0]))
            free = max(0, int(block["min_size"][0]) - count_items())
            if int(block["limits"][0]) & layout.Limit.QUOTA:
                # first, because a process may die here, and a quota that is too small is harmless
                block["error_buffer"] = 0.0
                _core.reached("recover.bases")
            block["inserts_base"] = int(runtime["write_count"][0]) + free
            _core.reached("recover.bases")
            block["samples_base"] = runtime["drawn"]
        _core.reached("recover.bases")

    def _repair_head(self) -> None:
        """Lowers a head that is far beyond all items, because tickets would soon run out."""
        runtime, head = self.control.runtime, int(self.control.runtime["head"][0])
        if head > _MANY_TICKETS:
            words = self.live.words[self.used]
            tickets = slots.tickets(words)
            valid = (tickets % self.capacity == np.arange(len(words))) & (words != 0)
            newest = int(tickets[valid & (tickets < min(head, 2**62))].max(initial=-1))
            if head - newest > _LARGEST_GAP:
                runtime["head"] = max(newest + 1, self.superblock.durable_ticket)
        _core.reached("recover.sane_head")

    def _reap_all(self, *, finishing: bool) -> int:
        """Reaps all clients, and returns their number.

        With ``finishing``, the claims of the clients are completed or rolled back. Without it, the
        claims are discarded, because they may be older than the slots and may have been completed
        long ago. To complete them again would lose items. For example, an old claim that empties
        the buffer would remove all items that were written later.
        """
        entries = self.control.entries
        retired = 0
        bad = (entries["phase"] > Phase.EMPTYING) | (entries["count"] > self.capacity)
        entries["phase"][bad | (not finishing)] = Phase.IDLE
        _core.reached("recover.phases")
        for entry in (entries["state"] != EntryState.FREE).nonzero()[0]:
            entries["state"][entry] = EntryState.LIVE
            _core.reached("recover.live")
            incarnation = int(entries["incarnation"][entry])
            freed = self.native.reap(int(entry), incarnation, 0)
            if freed < 0:
                raise LockTimeout(
                    f"{self.control.where}: another process has the shared memory open and holds "
                    "the mutex that this recovery has just created; end that process, then recover "
                    "the buffer"
                )
            retired += freed
        entries["phase"] = Phase.IDLE
        _core.reached("recover.idle")
        entries["turn"] = 0
        _core.reached("recover.turns")
        # after a reboot, the slots may be newer than the page that contains the counters
        known = [self.control.runtime["next_incarnation"], entries["incarnation"]]
        known += [layout.writer_of(self.live.sources[piece]) for piece in self._pieces()]
        self.control.runtime["next_incarnation"] = max(
            int(np.where(numbers < np.uint64(layout.INCARNATIONS), numbers, 0).max())
            for numbers in known
        )
        _core.reached("recover.incarnation")
        return retired

    def _refuse_impossible_words(self, trusted: bool) -> int:
        """Clears words whose ticket belongs to another slot or is beyond the head.

        Returns the number of cleared words. If the head is not ``trusted``, because it may be older
        than the slots, tickets that are not far beyond it are accepted.
        """
        head, refused = int(self.control.runtime["head"][0]), 0
        end = np.uint64(head if trusted else max(head + _LARGEST_GAP, _MANY_TICKETS))
        for piece in self._pieces():
            words = self.live.words[piece]
            tickets = slots.tickets(words).view(np.uint64)
            # the slot of each ticket; a division and a multiplication are faster than a remainder
            capacity = np.uint64(self.capacity)
            owners = tickets - tickets // capacity * capacity
            wrong = owners != np.arange(piece.start, piece.stop, dtype=np.uint64)
            wrong |= slots.states(words) == SlotState.EMPTY
            wrong |= tickets >= end
            wrong &= words != 0
            self.live.words[piece][wrong] = 0
            _core.reached("recover.refused")
            refused += int(np.count_nonzero(wrong))
        return refused

    def _refuse_misplaced_records(self, trusted: bool) -> int:
        """Clears the words of slots whose record is invalid, and returns the number of slots.

        If the counters are ``trusted``, records outside the used part of the byte ring are also
        invalid.
        """
        runtime = self.control.runtime[0] if trusted else None
        wrong = extents.find_misplaced(runtime, self.live, self.used, self.schema.record_bytes)
        # otherwise the checksums of the items are compared later, which include the headers
        if trusted or not self.superblock.flags & Flag.CHECKSUM:
            size, content = self.schema.record_bytes, self.records_map
            wrong |= extents.find_mismatched(self.live, size, content, ~wrong)
        self.live.words[self.used][wrong] = 0
        _core.reached("recover.misplaced")
        return int(np.count_nonzero(wrong))

    def _relink(self) -> int:
        """Rebuilds the chain of records, and drops records that overlap others.

        Returns the number of dropped records.
        """
        committed = self.live.holds(self.used).nonzero()[0]
        order = np.argsort(self.live.extents["position"][committed], kind="stable")
        ordered = np.ascontiguousarray(committed[order], np.int64)
        return int(self.native.relink(ordered.ctypes.data, len(ordered)))

    def _abort_writing(self) -> int:
        """Aborts all slots that are marked as being written, and returns their number.

        No claim may contain these slots any more.
        """
        aborted = 0
        for piece in self._pieces():
            which = self.live.writing(piece)
            self.live.words[piece][which] = slots.aborted(self.live.words[piece][which])
            _core.reached("recover.aborted")
            aborted += int(np.count_nonzero(which))
        return aborted

    def _verify(self, progress: Progress, believed: bool) -> tuple[int, int]:
        """Drops the items that do not match their checksums.

        Without checksums, all items are kept if ``believed`` is True or the durability barrier
        covers all of them; otherwise all items are dropped.

        Returns:
            The number of slots whose items were dropped, and of slots that were kept unverified.
        """
        runtime = self.control.runtime
        head = int(runtime["head"][0])
        words = self.live.words[self.used]
        committed = slots.committed(words)
        failed = unverified = 0
        if self.superblock.flags & Flag.CHECKSUM:
            wrong = wrong_checksums(self.native, self.schema, self.live, len(words), progress)
            failed = len(wrong)
            words[wrong] = 0
        elif believed or self.superblock.durable_ticket == head > self._newest_ticket():
            unverified = int(np.count_nonzero(committed))
        else:
            failed = int(np.count_nonzero(committed))
            words[committed] = 0
        _core.reached("recover.dropped")
        left = int(np.count_nonzero(words))
        runtime["head"] = max(head, self.superblock.durable_ticket, self._newest_ticket() + 1)
        _core.reached("recover.head")
        runtime["write_count"] = max(int(runtime["write_count"][0]), left * self.width)
        _core.reached("recover.count")
        return failed, unverified

    def _newest_ticket(self) -> int:
        """Returns the newest ticket of all slots, which may be beyond the head; -1 if none."""
        words = self.live.words[self.used]
        used = words[words != 0]
        return int(slots.tickets(used).max()) if len(used) else -1

    def _exponent(self) -> tuple[float, float]:
        runtime = self.control.runtime
        return float(runtime["alpha"][0]), float(runtime["eps"][0])

    def _fits(self, raw: Floats) -> Flags:
        return are_priorities(raw, *self._exponent(), len(self.live.raw))

    def _repair_priorities(self) -> int:
        """Replaces invalid raw priorities by NaN, and returns their number."""
        refused = 0
        prioritized = bool(self.control.runtime["prioritized"][0])
        for piece in self._pieces():
            where = slice(piece.start * self.width, piece.stop * self.width)
            raw = self.live.raw[where]
            wrong = ~self._fits(raw)  # also true for NaN
            wrong &= np.repeat(self.live.holds(piece), self.width)
            if not prioritized:  # NaN then means that the writer passed no priority
                wrong &= ~np.isnan(raw)
            self.live.raw[where][wrong] = np.nan
            _core.reached("recover.priority")
            refused += int(np.count_nonzero(wrong))
        return refused

    def _pieces(self) -> Iterator[slice]:
        """Yields slices of at most `PIECE` slots, which together are all slots in use."""
        for first in range(0, self.used.stop, PIECE):
            yield slice(first, min(first + PIECE, self.used.stop))
