"""The registry of clients, which stores the identity, claim and counters of each client.

     FREE ──join (under init.lock)──▶ LIVE ──leave, or reaped after proof of death──▶ FREE

An entry consists of 512 bytes in the control file. A client that joins first locks the liveness
file of the entry, which the kernel unlocks when the process ends. It then writes its identity to
the entry, and finally sets the state of the entry to LIVE.

Always true
  1. An entry becomes LIVE only under init.lock. It is freed either by its owner, or under the mutex
     by a process that has completed or undone the claim of the dead owner.
  2. Each incarnation is used only once in a directory. A process that compares the incarnation
     before it frees an entry therefore never frees the entry of a later client.
  3. Counters remain when a client ends. The totals of the buffer are the sums over all entries.
If a client dies while it joins: its entry is either still FREE, or LIVE with an identity that
allows other processes to prove that the client is dead.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, BufferNeedsRestart, RegistryFullError, ShmBufferError
from shmbuffer.memory.clients.locks import LivenessFile, Lock
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import EntryState, Phase, Role
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.identity import Identity, ProcessState, prove_dead
from shmbuffer.memory.system.region import Directory


@dataclass(frozen=True)
class Client:
    """A client of a buffer: an open handle, as its registry entry describes it."""

    entry: int  # index of the entry in the registry
    # unique number of the client in the directory; identifies the writer of an item
    incarnation: int
    role: str  # "client", "collector", "learner" or "coordinator"
    pid: int  # process id, in the pid namespace of the client's process
    alive: bool  # False if the process was proved to be dead
    state: ProcessState  # DEAD if `alive` is False
    phase: str  # phase of the client's claim; "IDLE" if it has no claim
    # the claim: its first ticket (`first`) and number of slots (`count`); None without a claim
    claimed: dict[str, int] | None
    queue_position: int | None  # position in the queue for a slot, from 1; None if not waiting
    queued_s: float | None  # seconds since the client got this position; None if not waiting
    joined_s: float  # time of joining, in seconds since the epoch
    idle_s: float | None  # seconds since the last write, sample or update; None if there was none
    # the counters in `layout.COUNTERS`; sums over all clients that ever had this entry
    counters: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Converts the client to a dict of values that JSON supports."""
        return asdict(self)


class Registry:
    """The registry in a control file.

    If there are no liveness files, because ``directory`` is None, only the identities in the
    entries show whether a client is alive. The same applies to another user's directory: testing a
    lock there would make it appear to be held to the processes of the owner.

    Args:
        control: The mapped control file.
        directory: The directory of the buffer, or None for anonymous memory.
    """

    def __init__(self, control: Control, directory: Directory | None) -> None:
        self._control = control
        self._foreign = directory is not None and directory.foreign
        self._directory = None if self._foreign else directory

    def __repr__(self) -> str:
        return f"Registry({self._control.where!r}, entries={[entry for entry, _ in self.live()]})"

    def identity(self, entry: int) -> Identity:
        """Returns the identity of the process that an entry belongs to."""
        found = self._control.entries[entry]
        return Identity(
            pid=int(found["pid"]),
            start_time=int(found["start_time"]),
            boot_id=found["boot_id"].tobytes(),
            pid_namespace=int(found["pid_namespace"]),
        )

    def role(self, entry: int) -> Role:
        """Returns the role of an entry's client, or CLIENT if the value is damaged."""
        found = int(self._control.entries["role"][entry])
        return next((role for role in Role if role == found), Role.CLIENT)

    def live(self) -> list[tuple[int, int]]:
        """Returns the entry and incarnation of each client, whether its process is alive or not."""
        entries = self._control.entries
        return [
            (int(i), int(entries["incarnation"][i]))
            for i in (entries["state"] == EntryState.LIVE).nonzero()[0]
        ]

    def is_dead(self, entry: int) -> bool:
        """True if the process of an entry is proved to be dead.

        Takes about 100 µs, so do not call it while the mutex is held.
        """
        who = self.identity(entry)
        incarnation = int(self._control.entries["incarnation"][entry])
        if (self._control.where, incarnation) in _memberships and who == identity.current():
            return False
        return prove_dead(
            who,
            lambda: self._lock_is_free(entry),
            lambda: self._is_another_program(entry, who),
        )

    def alive(self) -> list[tuple[int, int]]:
        """Returns the entry and incarnation of each client that is not proved to be dead."""
        return [
            (entry, incarnation) for entry, incarnation in self.live() if not self.is_dead(entry)
        ]

    def pids(self) -> list[int]:
        """Returns the pids of all living clients, sorted and without duplicates."""
        return sorted({int(self._control.entries["pid"][entry]) for entry, _ in self.alive()})

    def join(self, role: Role) -> Membership:
        """Registers a new client of this process in a free entry.

        The caller must hold init.lock, and must have reaped dead clients.
        """
        entry, liveness = self._free_entry()
        _core.reached("join.liveness")
        try:
            return self._enter(entry, liveness, role)
        except BaseException:
            self.free(entry)
            if liveness is not None:
                liveness.close()
            raise

    def _enter(self, entry: int, liveness: Lock | None, role: Role) -> Membership:
        """Writes the identity of this process into an entry, and sets its state to LIVE."""
        me = identity.current()
        incarnation = int(self._control.runtime["next_incarnation"][0]) + 1
        if incarnation >= layout.INCARNATIONS:
            raise BufferNeedsRestart(
                f"{self._control.where}: the number of clients is {incarnation}, which is"
                " impossible, so another program has written to the shared memory; close all"
                " handles, then recover the buffer"
            )
        self._control.runtime["next_incarnation"] = incarnation
        _core.reached("join.incarnation")
        own_entry = self._control.entries[entry : entry + 1]
        fields = {
            "role": role,
            "incarnation": incarnation,
            "pid": me.pid,
            "start_time": me.start_time,
            "pid_namespace": me.pid_namespace,
            "boot_id": np.void(me.boot_id),
            "joined_ns": time.time_ns(),
            "phase": Phase.IDLE,
            "turn": 0,
            "pending": 0,
            "reading": 0,
            "waits_for": 0,
            "last_seen_ns": 0,
            "last_insert_ns": 0,
            "last_sample_ns": 0,
            "first_draw": 0,
        }
        for name, value in fields.items():
            own_entry[name] = value
            _core.reached("join.identity")
        membership = Membership(entry, incarnation, liveness, self._control)
        _memberships[self._control.where, incarnation] = membership
        own_entry["state"] = EntryState.LIVE
        _core.reached("join.live")
        self._control.touch()
        return membership

    def note_first_draw(self, entry: int, origin: int) -> list[int]:
        """Records the random state of a client's first draw, to find processes with equal draws.

        Args:
            entry: Entry of the client.
            origin: Number that identifies the state of the random generator, not 0.

        Returns:
            The pids of other processes whose first draw had the same origin. The list is empty if
            the entry has already recorded a first draw.
        """
        draws = self._control.entries["first_draw"]
        if draws[entry]:
            return []
        draws[entry] = origin
        _core.reached("draw.noted")
        self._control.touch()
        me = identity.current()
        same = [each for each, _ in self.live() if draws[each] == origin and each != entry]
        others = [each for each in same if self.identity(each) != me and not self.is_dead(each)]
        return sorted({self.identity(each).pid for each in others})

    def free(self, entry: int) -> None:
        """Frees an entry of this process, or any entry while the buffer has no slots.

        The entry must not have a claim.
        """
        self._control.entries["state"][entry] = EntryState.FREE
        _core.reached("leave.freed")

    def clients(self) -> list[Client]:
        """Returns a description of all clients, including dead ones that were not reaped yet."""
        entries, now = self._control.entries, time.time_ns()
        found = []
        for entry, incarnation in self.live():
            record, alive = entries[entry].copy(), not self.is_dead(entry)
            if not alive and (entry, incarnation) not in self.live():
                continue  # the client has left the registry in the meantime, and its process ended
            seen = int(record["last_seen_ns"])
            found.append(
                Client(
                    entry=entry,
                    incarnation=incarnation,
                    role=layout.name_of(Role, int(record["role"])).lower(),
                    pid=int(record["pid"]),
                    alive=alive,
                    state=self._state(entry, alive=alive),
                    phase=layout.name_of(Phase, int(record["phase"])),
                    claimed=_claim(record),
                    queue_position=int(record["turn"]) or None,
                    queued_s=_queued_s(record, time.monotonic_ns()),
                    joined_s=int(record["joined_ns"]) / 1e9,
                    idle_s=max(0, now - seen) / 1e9 if seen else None,
                    counters={name: int(record[name]) for name in layout.COUNTERS},
                )
            )
        return found

    def _state(self, entry: int, *, alive: bool) -> ProcessState:
        """Returns the state of an entry's process, which was proved to be dead if not ``alive``."""
        if not alive:
            return ProcessState.DEAD
        who, here = self.identity(entry), identity.current().pid_namespace
        same = who.pid_namespace == here != 0
        if self._foreign and (not same or identity.is_of_another_boot(who)):
            return ProcessState.UNKNOWN
        if 0 not in (who.pid_namespace, here) and not same:
            return ProcessState.OTHER_CONTAINER
        is_stopped = identity.process_state(who.pid) == ProcessState.STOPPED
        return ProcessState.STOPPED if is_stopped else ProcessState.RUNNING

    def _lock_is_free(self, entry: int) -> bool:
        """True if the liveness file of an entry is not locked.

        Without liveness files, returns True if the process has ended.
        """
        who = self.identity(entry)
        if self._directory is None:
            return _has_ended(who)
        if identity.is_of_another_boot(who) and not self._directory.exists(
            LivenessFile.name(entry)
        ):
            return True  # the name of the file was not on the disk when the power failed
        return LivenessFile.is_free(self._directory, entry)

    def _is_another_program(self, entry: int, who: Identity) -> bool:
        """True if the process of an entry has called execve(2) and now runs another program.

        In this case, its liveness file is not locked, and it does not map the control file.
        """
        if self._directory is None:
            return False
        try:
            return LivenessFile.is_free(self._directory, entry) and (
                who == identity.current()
                or not identity.maps(who.pid, self._directory.stat(layout.CONTROL).st_ino)
            )
        except (OSError, ShmBufferError):
            return False

    def _free_entry(self) -> tuple[int, Lock | None]:
        """Finds a free entry and locks its liveness file.

        An entry is skipped if another process still holds the lock of its liveness file.

        Returns:
            The entry and the lock, which is None in anonymous memory.

        Raises:
            RegistryFullError: All entries are in use.
            AttachTimeout: The liveness files of all free entries are locked.
        """
        free = (self._control.entries["state"] == EntryState.FREE).nonzero()[0].tolist()
        for entry in free:
            if self._directory is None:
                return entry, None
            try:
                return entry, LivenessFile.hold(self._directory, entry)
            except AttachTimeout:
                if entry == free[-1]:
                    raise
        pids = self.pids()
        raise RegistryFullError(
            f"{self._control.where}: all {layout.ENTRIES} registry entries are in use by living"
            f" clients (pids {', '.join(map(str, pids))}); close handles that are not needed",
            pids=pids,
        )


@dataclass(eq=False)
class Membership:
    """The registration of a handle: its entry, which is freed when the handle is closed."""

    entry: int
    incarnation: int
    liveness: Lock | None  # the lock of the liveness file; None in anonymous memory
    control: Control  # the control file that contains the entry
    native: _core.Ring | None = None  # the ring in the C core; None before the buffer has slots
    pid: int = field(default_factory=os.getpid)  # pid of the process that owns the entry

    def leave(self) -> bool:
        """Frees the entry, unless it belongs to the parent of this forked process.

        Returns:
            False if the entry could not be freed yet, so that the call must be repeated.
        """
        if os.getpid() != self.pid:
            return True
        if self.native is not None:
            if self.native.leave(LOCK_TIMEOUT_NS) not in (0, -_core.LEFT):
                return False  # a claim may be open, or a call may wait for the mutex
        else:
            entry = self.control.entries[self.entry]
            if entry["incarnation"] == self.incarnation:
                self.control.touch()
                self.control.entries["state"][self.entry] = EntryState.FREE
                _core.reached("leave.freed")
        if self.liveness is not None:
            self.liveness.close()
        return True


# The memberships of this process, by the path of the buffer and the incarnation. execve(2) clears
# them.
_memberships: weakref.WeakValueDictionary[tuple[str, int], Membership] = (
    weakref.WeakValueDictionary()
)


def _claim(record: Any) -> dict[str, int] | None:
    """Returns the first ticket and the number of slots in a claim, or None if there is no claim."""
    if int(record["phase"]) == Phase.IDLE:
        return None
    return {name: int(record[name]) for name in ("first", "count")}


def _queued_s(record: Any, now_ns: int) -> float | None:
    """Returns the seconds since a client got its queue position, or None if it does not wait."""
    return max(0, now_ns - int(record["turn_ns"])) / 1e9 if int(record["turn"]) else None


def _has_ended(who: Identity) -> bool:
    """True if a process is a zombie whose threads have all ended.

    Decides whether a zombie is dead if there are no liveness files.
    """
    seen = identity._state_and_start(who.pid)
    if seen is None or seen[0] not in "ZXx" or not 0 != who.start_time == seen[1]:
        return False
    try:
        return len(os.listdir(f"/proc/{who.pid}/task")) <= 1
    except FileNotFoundError:
        return True
