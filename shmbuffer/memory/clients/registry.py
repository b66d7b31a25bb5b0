"""The registry of clients: their identities, and the proof that one is dead.

     FREE ──join (under init.lock)──▶ LIVE ──leave, or reaped after proof of death──▶ FREE

An entry is 512 bytes of the control file. A joining client first locks the liveness file of the
entry, which the kernel unlocks when the process ends. It then writes its identity, and finally sets
the state to LIVE.

Always true
  1. FREE becomes LIVE only under init.lock. LIVE becomes FREE by the entry's owner, or under the
     mutex by a reaper that has completed its claim.
  2. An incarnation is used once in the life of a directory, so a reaper that compares it never
     frees the entry of a successor.
  3. Counters outlive the client: the totals of the buffer are the sums over all entries.
If a client dies while joining: its entry is still FREE, or LIVE with an identity that can be proved
to be dead.
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
    """A handle on the buffer, as the registry describes it."""

    entry: int  # its place in the registry
    incarnation: int  # unique in the directory; the source of the items that it writes
    role: str  # ``client``, ``collector``, ``learner`` or ``coordinator``
    pid: int  # process id, in the pid namespace of the process
    alive: bool  # true unless it was proved to be dead
    state: ProcessState  # DEAD if it is not alive
    phase: str  # of its claim; IDLE if it is writing nothing
    # ``first`` ticket and ``count`` of slots of its claim; None if it is writing nothing
    claimed: dict[str, int] | None
    queue_position: int | None  # in the queue for a slot, from 1; None if it does not wait
    queued_s: float | None  # seconds since it got that position; None if it does not wait
    joined_s: float  # seconds since the epoch
    idle_s: float | None  # seconds since its last write, sample or update; None if there was none
    # see `layout.COUNTERS`; sums over all clients that ever had this entry
    counters: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Converts to a dict of plain values."""
        return asdict(self)


class Registry:
    """The registry of a control file.

    Without a directory of liveness files, identities decide alone. They also do so in a directory
    of another user, because testing a lock there would make it seem held to its owner.
    """

    def __init__(self, control: Control, directory: Directory | None) -> None:
        self._control = control
        self._foreign = directory is not None and directory.foreign
        self._directory = None if self._foreign else directory

    def __repr__(self) -> str:
        return f"Registry({self._control.where!r}, entries={[entry for entry, _ in self.live()]})"

    def identity(self, entry: int) -> Identity:
        """Returns the identity in the entry."""
        found = self._control.entries[entry]
        return Identity(
            pid=int(found["pid"]),
            start_time=int(found["start_time"]),
            boot_id=found["boot_id"].tobytes(),
            pid_namespace=int(found["pid_namespace"]),
        )

    def role(self, entry: int) -> Role:
        """Returns the role in the entry, or CLIENT if it is damaged."""
        found = int(self._control.entries["role"][entry])
        return next((role for role in Role if role == found), Role.CLIENT)

    def live(self) -> list[tuple[int, int]]:
        """Returns (entry, incarnation) of every entry in use, whether its owner is alive or not."""
        entries = self._control.entries
        return [
            (int(i), int(entries["incarnation"][i]))
            for i in (entries["state"] == EntryState.LIVE).nonzero()[0]
        ]

    def is_dead(self, entry: int) -> bool:
        """True if the owner is proved to be dead. Takes about 100 µs; not under the mutex."""
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
        """Returns (entry, incarnation) of all clients that are not proved to be dead."""
        return [
            (entry, incarnation) for entry, incarnation in self.live() if not self.is_dead(entry)
        ]

    def pids(self) -> list[int]:
        """Returns the process ids of living clients, each once."""
        return sorted({int(self._control.entries["pid"][entry]) for entry, _ in self.alive()})

    def join(self, role: Role) -> Membership:
        """Takes a free entry. The caller holds init.lock and has reaped dead clients."""
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
                f"{self._control.where}: the number of clients, {incarnation}, is impossible, "
                "because another program wrote to the shared memory; close every handle, then "
                "recover the buffer"
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
        """Records the source of the first draw; returns pids of processes with the same one."""
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
        """Frees an entry without a claim: our own, or any entry before there are slots."""
        self._control.entries["state"][entry] = EntryState.FREE
        _core.reached("leave.freed")

    def clients(self) -> list[Client]:
        """Returns every entry in use, including those of dead clients."""
        entries, now = self._control.entries, time.time_ns()
        found = []
        for entry, incarnation in self.live():
            record, alive = entries[entry].copy(), not self.is_dead(entry)
            if not alive and (entry, incarnation) not in self.live():
                continue  # it has left and ended meanwhile
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
        """Returns the state of an entry's process."""
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
        """True if the owner's liveness file is free, or its process has ended without one."""
        who = self.identity(entry)
        if self._directory is None:
            return _has_ended(who)
        if identity.is_of_another_boot(who) and not self._directory.exists(
            LivenessFile.name(entry)
        ):
            return True  # its name was not on the disk yet when the power failed
        return LivenessFile.is_free(self._directory, entry)

    def _is_another_program(self, entry: int, who: Identity) -> bool:
        """True if a running process has called execve: its lock is free, and its map is gone."""
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
        """Returns a free entry with its liveness file; skips files that processes still hold."""
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
            f"{self._control.where}: all {layout.ENTRIES} entries are taken by living clients "
            f"(pids {', '.join(map(str, pids))}); close handles that are not needed",
            pids=pids,
        )


@dataclass(eq=False)
class Membership:
    """The registry entry of a handle, which the handle frees when it is closed."""

    entry: int
    incarnation: int
    liveness: Lock | None  # the locked liveness file; None in anonymous memory
    control: Control  # the control file of the entry
    native: _core.Ring | None = None  # the C core's ring of the entry; None before there are slots
    pid: int = field(default_factory=os.getpid)  # the process that owns the entry

    def leave(self) -> bool:
        """Frees the entry unless it is a parent's; false if the call must be repeated."""
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


# The memberships of this process since it started this program, by buffer and incarnation.
_memberships: weakref.WeakValueDictionary[tuple[str, int], Membership] = (
    weakref.WeakValueDictionary()
)


def _claim(record: Any) -> dict[str, int] | None:
    """Returns the claim of an entry; None if it is writing nothing."""
    if int(record["phase"]) == Phase.IDLE:
        return None
    return {name: int(record[name]) for name in ("first", "count")}


def _queued_s(record: Any, now_ns: int) -> float | None:
    return max(0, now_ns - int(record["turn_ns"])) / 1e9 if int(record["turn"]) else None


def _has_ended(who: Identity) -> bool:
    """True if a process is a zombie without living threads. Used if there are no liveness files."""
    seen = identity._state_and_start(who.pid)
    if seen is None or seen[0] not in "ZXx" or not 0 != who.start_time == seen[1]:
        return False
    try:
        return len(os.listdir(f"/proc/{who.pid}/task")) <= 1
    except FileNotFoundError:
        return True
