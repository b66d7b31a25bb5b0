"""Manages the seat of a handle: its registry entry, and the shared memory that it uses.

    taken (under init.lock) ──▶ connected, once there are slots ──▶ left

A handle reaches all data that it shares with other processes through its seat. The seat contains
the control file, the maps of slots and leaves, and the ring of the C core, which passes the
registry entry to every call. After ``fork``, the child has its parent's seat, and takes its own
seat on first use. When a handle is closed, `native` becomes an object that raises an error on any
use.

If a process dies, another process frees its entry. The C core first completes its claim or rolls
the claim back, under the mutex.
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
    """The shared memory of one handle: its registry entry, the control file and the maps.

    If the buffer is shared, the caller holds init.lock while it creates the seat.
    """

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
        self.not_durable: str | None = None  # the reason why the first failed sync failed
        self.native: Any = None  # the C core's ring for `entry`; None before there are slots
        # fast paths for writing batches, by the source of the priorities
        self.intakes: dict[int | str | None, _core.Intake] = {}
        self.outtake: _core.Outtake | None = None  # the fast path for reading batches
        # fast paths for reading frame stacks, by the number of frames and the layout of each leaf
        self.stack_outtakes: dict[tuple[int, tuple[int, ...]], _core.Outtake] = {}
        # the mapped file of the weights; see `weights`
        self.weights: WeightsFile | None = None
        # partial rollouts of this handle; another process may continue them after it was closed
        self.partial_files: weakref.WeakSet[PartialFile] = weakref.WeakSet()
        self._take()

    # Taking a seat, and leaving it.

    def _take(self) -> None:
        """Reaps dead clients, takes an entry of the registry, and connects to the slots."""
        # Held while the ring is created. An entry has one claim, so two rings must not share it.
        # The lock is new, because a lock that a forked child inherits may never be released.
        self.connecting = threading.RLock()
        self.load()
        for entry, incarnation in self.registry.live():
            if self.registry.is_dead(entry):
                self._retire(entry, incarnation)
        self.membership = self.registry.join(self.role)
        _taken.add(self.membership)
        self._guard()
        self.connect()

    def _guard(self) -> None:
        """Registers a finalizer, which frees the registry entry if the seat is not closed."""
        self._finalizer = weakref.finalize(self, _leave, self.membership)
        self._finalizer.atexit = False  # `_leave_at_exit` runs before the interpreter is torn down

    def _retire(self, entry: int, incarnation: int) -> None:
        """Reaps a dead client. Without slots it has no claim, so only its entry is freed."""
        if self.mapped is None:
            self.registry.free(entry)
        else:
            self._native_ring(self.mapped, entry).reap(entry, incarnation, LOCK_TIMEOUT_NS)

    def load(self) -> None:
        """Maps the slots and leaves, if they exist and are not mapped yet."""
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
        """Connects to the slots if another process has defined the schema in the meantime.

        In a forked child, a new seat is taken first.
        """
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
        """Creates the C core's ring for this registry entry, if the slots are mapped."""
        if self.mapped is not None:
            native = self._native_ring(self.mapped, self.entry)
            self.membership.native = native
            self.use(native)

    def _native_ring(self, mapped: Mapped, entry: int) -> _core.Ring:
        directory = self.backing.directory
        folder = None if directory is None else directory.file.fd
        return mapped.ring(self.control, entry=entry, folder=folder)

    def use(self, native: Any) -> None:
        """Replaces the native ring, and discards the fast paths that used the previous ring."""
        self.native = native
        self.outtake = None
        self.stack_outtakes.clear()
        self.intakes.clear()

    def unmapped(self) -> Seat:
        """Returns a copy of this seat that has no schema, to which the registry entry passes.

        The native ring of this object then raises BufferClosedError.
        """
        other = copy.copy(self)
        other.mapped, other.intakes, other.stack_outtakes = None, {}, {}
        self._finalizer.detach()
        self.membership.native = None
        self.use(Closed(self.where))
        other.use(None)
        other._guard()
        return other

    def is_ours(self) -> bool:
        """True if this process took the seat; False if the seat was inherited through fork."""
        return os.getpid() == self.membership.pid

    def rejoin(self, *, timeout: float = 60.0) -> None:
        """Takes a new seat in a forked child.

        Raises ForkedHandleError if the directory was removed, or the buffer was redefined or
        recovered, since the fork.
        """
        self.require_open()
        try:
            self.require_there()
        except BufferUnlinkedError as error:
            raise ForkedHandleError(
                f"{self.where}: this handle was inherited through fork, but its directory no "
                "longer exists; close the handle, and create the buffer again"
            ) from error
        with self.backing.lock(timeout):
            self.rejoin_locked()  # does nothing if another thread has taken the seat meanwhile

    def rejoin_locked(self) -> None:
        """Takes a new seat in a forked child, unless it has one; the caller holds init.lock."""
        if self.is_ours():
            return
        self._require_same_definition()
        _core.begin_process()
        self._finalizer.detach()
        if self.role is Role.COORDINATOR:
            # the child supervises no processes, and its exit must not count as the coordinator's
            self.role = Role.CLIENT
        self._take()

    def _require_same_definition(self) -> None:
        """Raises ForkedHandleError if the buffer was redefined since the fork, or is in recovery.

        This method compares the superblock, because a process may have died before it changed the
        runtime page. No process joins a buffer during a recovery, including a forked child.
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
                "recovered or redefined before its first use in this process; close the handle, "
                "and attach again"
            )

    def leave(self) -> bool:
        """Closes the handle and frees its registry entry.

        Returns False if a running call still needs the entry. The caller then has to try again.
        """
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
            _staying.add(self)  # a running call needs the directory
        return left

    # Fast paths, which are created once.

    def intake(self, priority: int | str | None, **form: Any) -> _core.Intake | None:
        """Creates the fast path for writing batches. Returns None if the handle is closed.

        Args:
            priority: The source of the priorities, by which the fast path is cached.
            form: The layout of the batches, as arguments of ``_core.Intake``.
        """
        native = self.native
        if isinstance(native, Closed):
            return None
        intake = _core.Intake(ring=native, priority=priority, timeout_ns=LOCK_TIMEOUT_NS, **form)
        self.intakes[priority] = intake
        if native is not self.native:  # closed meanwhile: a cached fast path would keep the maps
            self.intakes.clear()
        return intake

    def take_out(self, examples: tuple[Any, ...], tensors: type) -> _core.Outtake | None:
        """Creates the fast path for reading batches. Returns None if the handle is closed.

        Args:
            examples: One tensor per leaf, with the dtype and shape of a row.
            tensors: The class of the tensors in a batch.
        """
        native = self.native
        if isinstance(native, Closed):
            return None
        outtake = self.outtake = _core.Outtake(ring=native, examples=examples, tensors=tensors)
        if native is not self.native:  # closed meanwhile: a cached fast path would keep the maps
            self.outtake = None
        return outtake

    def take_stacks_out(
        self, examples: tuple[Any, ...], tensors: type, steps: int, stacks: tuple[int, ...]
    ) -> _core.Outtake | None:
        """Creates the fast path for reading frame stacks. Returns None if the handle is closed.

        Args:
            examples: As for `take_out`.
            tensors: As for `take_out`.
            steps: The number of frames in a stack.
            stacks: The layout of each leaf in a sample: stacked, or one row.
        """
        native = self.native
        if isinstance(native, Closed):
            return None
        outtake = _core.Outtake(
            ring=native, examples=examples, tensors=tensors, steps=steps, stacks=stacks
        )
        self.stack_outtakes[steps, stacks] = outtake
        if native is not self.native:  # closed meanwhile: a cached fast path would keep the maps
            self.stack_outtakes.clear()
        return outtake

    # The current state in the control file.

    @property
    def entry(self) -> int:
        """The index of this client's entry in the registry."""
        return self.membership.entry

    @property
    def incarnation(self) -> int:
        """The unique number of this client, which its items contain as their source."""
        return self.membership.incarnation

    def state(self) -> BufferState:
        """Returns the state of the buffer from the runtime page."""
        found = int(self.control.runtime["state"][0])  # SYNC define, acquire
        try:
            return BufferState(found)
        except ValueError:
            raise BufferNeedsRestart(
                f"{self.where}: the buffer state {found:#x} is invalid, because another program "
                "wrote to the shared memory; close every handle, then recover the buffer"
            ) from None

    def has_its_pages(self) -> bool:
        """True if the buffer is in memory and the space of slots is allocated before a write."""
        reserved = self.control.superblock().flags & (Flag.RESERVE | Flag.STEPS)
        return self.backing.in_memory and bool(reserved)

    def is_alone(self) -> bool:
        """True if this is the only handle, and no other handle has joined since it was created."""
        last = int(self.control.runtime["next_incarnation"][0])
        return last == self.incarnation and len(self.registry.live()) == 1

    def was_joined(self) -> bool:
        """True if a second handle has ever joined this buffer."""
        return int(self.control.runtime["next_incarnation"][0]) > 1

    def settled(self, head: int) -> int:
        """Returns the first ticket of the oldest claim, or ``head`` if no client is writing.

        No client is writing an item with a lower ticket.
        """
        entries = self.control.entries
        claims = entries["first"][entries["phase"] != Phase.IDLE]
        return min([head, *map(int, claims)])

    def dictionary(self) -> bytes | None:
        """Returns the dictionary for compressing records, or None before one is published."""
        self.require_open()
        return self.backing.dictionary()

    def publish_dictionary(self, data: bytes, *, timeout: float = 60.0) -> bytes:
        """Publishes a dictionary for compressing records, unless there is one.

        Returns the published dictionary.
        """
        self.require_open()
        with self.backing.lock(timeout):
            self.require_there()
            return self.backing.publish_dictionary(data)

    # After a death, and after a removal.

    def reap_if_dead(self, entry: int, incarnation: int, *, timeout: float = 60.0) -> bool:
        """Reaps a client that is proved to be dead. Returns True if its entry is now free."""
        if (entry, incarnation) not in self.registry.live():
            return True  # another process has reaped it
        if entry == self.entry or not self.registry.is_dead(entry):
            return False
        self.catch_up()
        if self.native is not None:
            freed: int = self.native.reap(entry, incarnation, LOCK_TIMEOUT_NS)
            self.control.touch()
            return freed >= 0
        with self.backing.lock(timeout):  # without slots, the client has no claim
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
        """Raises BufferClosedError if the handle is closed."""
        if self.closed:
            raise BufferClosedError(f"{self.where}: this handle was closed; attach again")

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed.

        If the directory was moved, or is being removed right now, no error is raised.
        """
        if self.state() == BufferState.CLOSING:
            return
        try:
            self._require_control()
        except OSError:
            self.require_open()  # another thread closes the handle
            raise

    def require_there(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed, moved or replaced."""
        self._require_control()
        if isinstance(self.backing, Files) and not self.backing.still_there():
            raise BufferUnlinkedError(
                f"{self.where}: the directory was moved while this handle was open; close the "
                f"handle, and attach to {name_of(self.backing.directory.file.fd)}",
                path=self.where,
            )

    def _require_control(self) -> None:
        if isinstance(self.backing, Files) and not self.backing.has_control():
            raise unlinked(self.where)


def unlinked(where: str) -> BufferUnlinkedError:
    """Returns the error for a directory that was removed or replaced."""
    return BufferUnlinkedError(
        f"{where}: the directory was removed or replaced while this handle was open, so no other "
        "process sees new items; save the items with dumps() if you need them, then close the "
        "handle and create the buffer again",
        path=where,
    )


class Closed:
    """Replaces the native ring of a closed handle, so that every use raises BufferClosedError."""

    def __init__(self, where: str) -> None:
        self._where = where

    def give_up(self, timeout_ns: int) -> int:
        """Returns 0, because no call waits through a closed handle."""
        return 0

    def __getattr__(self, name: str) -> NoReturn:
        raise BufferClosedError(f"{self._where}: this handle was closed; attach again")


def _leave(membership: Membership) -> bool:
    """Frees the registry entry of a membership, and returns True.

    If a call still needs the entry, the membership is kept in `_staying` and the result is False.
    """
    left = membership.leave()
    (_staying.discard if left else _staying.add)(membership)
    return left


_taken: weakref.WeakSet[Membership] = weakref.WeakSet()

# Seats and memberships whose entries could not be freed. Their liveness files must stay open.
_staying: set[object] = set()


@atexit.register
def _leave_at_exit() -> None:
    """Frees all registry entries of this process, because finalizers do not run after this."""
    for membership in list(_taken):
        _leave(membership)
