"""Manages the seat of a handle: its registry entry, and the shared memory that it uses.

    taken (under init.lock) ──▶ connected, once there are slots ──▶ left

A handle reaches all data that it shares with other processes through its seat. The seat contains
the control file, the maps of slots and leaves, and the ring of the C core, which passes the
registry entry to every call. After ``fork``, the child has its parent's seat, and takes its own on
first use. After a handle was closed, `native` is an object that raises an error on any use.

If a process dies, another one frees its entry. The C core completes its claim or rolls it back,
under the mutex.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import weakref
from typing import Any, NoReturn

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferClosedError,
    BufferNeedsRestart,
    BufferUnlinkedError,
    CorruptBufferError,
    ForkedHandleError,
)
from shmbuffer.memory.clients.partials import PartialFile
from shmbuffer.memory.clients.registry import Membership, Registry
from shmbuffer.memory.directory.anonymous import Anonymous
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format.layout import BufferState, Flag, Phase, Role
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.weights_file import WeightsFile
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.path_checks import name_of


class Seat:
    """The place of a handle at a buffer; created under init.lock, or in unshared memory."""

    def __init__(
        self, backing: Files | Anonymous, control: Control, role: Role, mapped: Mapped | None = None
    ) -> None:
        self.backing = backing
        self.control = control
        self.registry = Registry(control, backing.directory)  # the clients
        # for messages: the directory, or "anonymous memory"
        self.where = str(backing.path) if isinstance(backing, Files) else backing.where
        self.role = role
        self.mapped = mapped
        self.closed = False  # True once the handle was closed
        self.not_durable: str | None = None  # the reason of the first sync that failed
        self.native: Any = None  # the C core's ring of our entry; None before there are slots
        # fast paths for batches with a suitable layout, by the source of the priorities
        self.intakes: dict[int | str | None, _core.Intake] = {}
        self.outtake: _core.Outtake | None = None  # the fast path for reading batches
        # fast paths for reading batches of stacks, by the steps of a stack and the stacked leaves
        self.stack_outtakes: dict[tuple[int, tuple[int, ...]], _core.Outtake] = {}
        # the mapped file of the weights; see `weights`
        self.weights: WeightsFile | None = None
        # rollouts that were begun here; other processes may continue them once this handle has left
        self.partial_files: weakref.WeakSet[PartialFile] = weakref.WeakSet()
        self._take()

    # Taking a seat, and leaving it.

    def _take(self) -> None:
        """Joins the registry, after reaping dead clients, and connects."""
        # Held while the ring is created. An entry has one claim, so two rings must not share it.
        self.connecting = threading.RLock()  # the parent's may never be released
        self.load()
        for entry, incarnation in self.registry.live():
            if self.registry.is_dead(entry):
                self._retire(entry, incarnation)
        self.membership = self.registry.join(self.role)
        _taken.add(self.membership)
        self._guard()
        self.connect()

    def _guard(self) -> None:
        """Frees the entry at the latest when the seat has no more references."""
        self._finalizer = weakref.finalize(self, _leave, self.membership)
        self._finalizer.atexit = False  # `_leave_at_exit` runs before the interpreter is torn down

    def _retire(self, entry: int, incarnation: int) -> None:
        """Reaps a dead client, or frees its entry if there are no slots yet."""
        if self.mapped is None:
            self.registry.free(entry)
        else:
            self._native_ring(self.mapped, entry).reap(entry, incarnation, LOCK_TIMEOUT_NS)

    def load(self) -> None:
        """Maps slots and leaves, if they exist now."""
        if self.mapped is not None or self.state() not in (BufferState.READY, BufferState.CLOSING):
            return
        try:
            self.mapped = self.backing.load(self.control.superblock())
        except CorruptBufferError as error:
            if self.state() != BufferState.CLOSING:
                raise
            raise BufferClosedError(
                f"{self.where}: the buffer is being removed; create it again"
            ) from error

    def catch_up(self) -> None:
        """Maps and connects, once, if the buffer is defined; joins again after a fork."""
        if self.closed or self.native is not None or self.state() == BufferState.NO_SCHEMA:
            return
        if not self.is_ours():
            self.rejoin()
        else:
            self.require_there()
        with self.connecting:
            self.load()
            if self.native is None:
                self.connect()

    def connect(self) -> None:
        """Creates the C core's ring of our entry, once there are slots."""
        if self.mapped is not None:
            native = self._native_ring(self.mapped, self.entry)
            self.membership.native = native
            self.use(native)

    def _native_ring(self, mapped: Mapped, entry: int) -> _core.Ring:
        directory = self.backing.directory
        folder = None if directory is None else directory.file.fd
        return mapped.ring(self.control, entry=entry, folder=folder)

    def use(self, native: Any) -> None:
        """Replaces the native ring, by that of a forked child or by `Closed`."""
        self.native = native
        self.outtake = None
        self.stack_outtakes.clear()
        self.intakes.clear()

    def unmapped(self) -> Seat:
        """Returns this seat for another definition; rings of the old one then raise errors."""
        other = copy.copy(self)
        other.mapped, other.intakes, other.stack_outtakes = None, {}, {}
        self._finalizer.detach()
        self.membership.native = None
        self.use(Closed(self.where))
        other.use(None)
        other._guard()
        return other

    def is_ours(self) -> bool:
        """True if this process took the seat; otherwise its parent did."""
        return os.getpid() == self.membership.pid

    def rejoin(self, *, timeout: float = 60.0) -> None:
        """Takes a new seat in the child of a fork."""
        self.require_open()
        try:
            self.require_there()
        except BufferUnlinkedError as error:
            raise ForkedHandleError(
                f"{self.where}: this handle came through fork, but its directory is gone; "
                "close it and create the buffer again"
            ) from error
        with self.backing.lock(timeout):
            self.rejoin_locked()  # which does nothing if another thread has done it meanwhile

    def rejoin_locked(self) -> None:
        """Does the work of `rejoin` under init.lock, unless it is done already."""
        if self.is_ours():
            return
        self._require_same_definition()
        _core.begin_process()
        self._finalizer.detach()
        if self.role is Role.COORDINATOR:
            # the child supervises no processes, and its end is not the coordinator's
            self.role = Role.CLIENT
        self._take()

    def _require_same_definition(self) -> None:
        """Raises ForkedHandleError unless the buffer is as it was when the parent forked.

        The superblock decides, because a process that died may not have changed the runtime page. A
        child must not join while the buffer is being recovered. No other process may either.
        """
        superblock, state = self.control.superblock(), self.state()
        known = superblock.schema_sha256 if self.mapped is None else self.mapped.schema.digest
        if (
            known != superblock.schema_sha256
            or BufferState.RECOVERING in (superblock.state, state)
            or BufferState.NO_SCHEMA == superblock.state != state
        ):
            raise ForkedHandleError(
                f"{self.where}: this handle was inherited through fork, and the buffer was "
                "recovered or redefined before its first use in this process; close it and attach "
                "again"
            )

    def leave(self) -> bool:
        """Frees the entry; False if a running call still needs it and the caller has to retry."""
        self.closed = True
        self.weights = None
        self.use(Closed(self.where))
        left = _leave(self.membership)
        self._finalizer.detach()
        if left:
            for partial in list(self.partial_files):
                partial.close()
            self.backing.close()
            _staying.discard(self)
        else:
            _staying.add(self)  # the call in flight needs the directory
        return left

    # Fast paths, which are created once.

    def intake(self, priority: int | str | None, **form: Any) -> _core.Intake | None:
        """Creates the fast path for writing batches; None once the handle is closed."""
        native = self.native
        if isinstance(native, Closed):
            return None
        made = _core.Intake(ring=native, priority=priority, timeout_ns=LOCK_TIMEOUT_NS, **form)
        self.intakes[priority] = made
        if native is not self.native:  # closed meanwhile: a cached path would keep the maps, too
            self.intakes.clear()
        return made

    def take_out(self, examples: tuple[Any, ...], tensors: type) -> _core.Outtake | None:
        """Creates the fast path for reading batches; None once the handle is closed."""
        native = self.native
        if isinstance(native, Closed):
            return None
        made = self.outtake = _core.Outtake(ring=native, examples=examples, tensors=tensors)
        if native is not self.native:  # closed meanwhile: a cached path would keep the maps, too
            self.outtake = None
        return made

    def take_stacks_out(
        self, examples: tuple[Any, ...], tensors: type, steps: int, stacks: tuple[int, ...]
    ) -> _core.Outtake | None:
        """Creates the fast path for reading batches of stacks; None once the handle is closed."""
        native = self.native
        if isinstance(native, Closed):
            return None
        made = _core.Outtake(
            ring=native, examples=examples, tensors=tensors, steps=steps, stacks=stacks
        )
        self.stack_outtakes[steps, stacks] = made
        if native is not self.native:  # closed meanwhile: a cached path would keep the maps, too
            self.stack_outtakes.clear()
        return made

    # The current state in the control file.

    @property
    def entry(self) -> int:
        """Our place in the registry."""
        return self.membership.entry

    @property
    def incarnation(self) -> int:
        """Our incarnation, which is unique in the directory, and the source of our items."""
        return self.membership.incarnation

    def state(self) -> BufferState:
        """Returns the state of the buffer."""
        found = int(self.control.runtime["state"][0])  # SYNC define, acquire
        try:
            return BufferState(found)
        except ValueError:
            raise BufferNeedsRestart(
                f"{self.where}: the buffer state {found:#x} is invalid, because another program "
                "wrote to the shared memory; close every handle, then recover the buffer"
            ) from None

    def has_its_pages(self) -> bool:
        """True if the memory of all slots that may be written was allocated in advance."""
        reserved = self.control.superblock().flags & (Flag.RESERVE | Flag.STEPS)
        return self.backing.in_memory and bool(reserved)

    def is_alone(self) -> bool:
        """True if no other handle exists, and none has joined since this one did."""
        last = int(self.control.runtime["next_incarnation"][0])
        return last == self.incarnation and len(self.registry.live()) == 1

    def was_joined(self) -> bool:
        """True if another handle has ever joined."""
        return int(self.control.runtime["next_incarnation"][0]) > 1

    def settled(self, head: int) -> int:
        """Returns a ticket below which no client is writing any more."""
        entries = self.control.entries
        claims = entries["first"][entries["phase"] != Phase.IDLE]
        return min([head, *map(int, claims)])

    def dictionary(self) -> bytes | None:
        """Returns the dictionary of records; None until one is published."""
        self.require_open()
        return self.backing.dictionary()

    def publish_dictionary(self, data: bytes, *, timeout: float = 60.0) -> bytes:
        """Publishes a dictionary for compressing records, or returns the one already published."""
        self.require_open()
        with self.backing.lock(timeout):
            self.require_there()
            return self.backing.publish_dictionary(data)

    # After a death, and after a removal.

    def reap_if_dead(self, entry: int, incarnation: int, *, timeout: float = 60.0) -> bool:
        """Completes the claim of a client and frees its entry, if it is proved to be dead."""
        if (entry, incarnation) not in self.registry.live():
            return True  # another process did it
        if entry == self.entry or not self.registry.is_dead(entry):
            return False
        self.catch_up()
        if self.native is not None:
            freed: int = self.native.reap(entry, incarnation, LOCK_TIMEOUT_NS)
            self.control.touch()
            return freed >= 0
        with self.backing.lock(timeout):  # without slots, it has no claim
            if (
                self.state() == BufferState.NO_SCHEMA
                and (entry, incarnation) in self.registry.live()
            ):
                self.registry.free(entry)
        return True

    def reap_dead(self) -> int:
        """Reaps all clients that are proved to be dead, and returns their number."""
        dead = [client for client in self.registry.live() if self.registry.is_dead(client[0])]
        return sum(self.reap_if_dead(*client) for client in dead)

    def require_open(self) -> None:
        """Raises BufferClosedError once the handle was closed."""
        if self.closed:
            raise BufferClosedError(f"{self.where}: this handle was closed; attach again")

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed, but not if it was moved."""
        if self.state() == BufferState.CLOSING:
            return
        try:
            self._require_control()
        except OSError:
            self.require_open()  # another thread closes the handle
            raise

    def require_there(self) -> None:
        """Raises BufferUnlinkedError unless the path still refers to the directory."""
        self._require_control()
        if isinstance(self.backing, Files) and not self.backing.still_there():
            raise BufferUnlinkedError(
                f"{self.where}: the directory was moved while this handle was open; close it, and "
                f"attach to {name_of(self.backing.directory.file.fd)}",
                path=self.where,
            )

    def _require_control(self) -> None:
        if isinstance(self.backing, Files) and not self.backing.has_control():
            raise unlinked(self.where)


def unlinked(where: str) -> BufferUnlinkedError:
    """Returns the error for a directory that no longer exists."""
    return BufferUnlinkedError(
        f"{where}: the directory was removed or replaced while this handle was open, so no other "
        "process sees new items; save the items with dumps() if you need them, then close the "
        "handle and create the buffer again",
        path=where,
    )


class Closed:
    """Replaces the native ring of a closed handle; every use of it raises BufferClosedError."""

    def __init__(self, where: str) -> None:
        self._where = where

    def give_up(self, timeout_ns: int) -> int:
        """Does nothing, because no call waits through it."""
        return 0

    def __getattr__(self, name: str) -> NoReturn:
        raise BufferClosedError(f"{self._where}: this handle was closed; attach again")


def _leave(membership: Membership) -> bool:
    """Frees an entry, or keeps the membership alive if a call still needs it."""
    left = membership.leave()
    (_staying.discard if left else _staying.add)(membership)
    return left


_taken: weakref.WeakSet[Membership] = weakref.WeakSet()

# Seats and memberships that could not leave. Their entries stay, and so must their liveness files.
_staying: set[object] = set()


@atexit.register
def _leave_at_exit() -> None:
    """Frees all entries when the interpreter exits."""
    for membership in list(_taken):
        _leave(membership)  # finalizers no longer run at this point
