"""One process's handle on one buffer: creating it, joining it, leaving it.

    Engine.anonymous(settings)       memory without a name, for one process and its children
    Engine.open(path, settings)      a directory: created, attached to or recovered, as is right

    nothing ──create──▶ NO_SCHEMA ──define (the first write)──▶ READY ──remove──▶ CLOSING
                            ▲                                   │  ▲
                            └──── undefine (empty, alone) ──────┘  └──▶ RECOVERING (all died)

Creation has two steps. The control file comes first, so that clients may join before anything is
known of the items; the first write brings the schema, and whoever comes first builds the files
under init.lock while the others wait, with a deadline, and load them.

If a process dies while creating or defining: the next one that takes init.lock removes what is
unfinished and starts again. After ``fork`` the child joins with an entry of its own on first use.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferClosedError,
    BufferNeedsRestart,
    BufferNotFoundError,
    BufferUnlinkedError,
    CorruptBufferError,
    DurabilityError,
    ForkedHandleError,
    UnsupportedPlatformError,
)
from shmbuffer.memory import cleanup, counters, layout, limiter, removal
from shmbuffer.memory.anonymous import WHERE, Anonymous
from shmbuffer.memory.barrier import raise_barrier
from shmbuffer.memory.check import (
    NO_SCHEMA,
    CheckReport,
    compare_checksums,
    compare_slots,
    impossible_fields,
)
from shmbuffer.memory.control import Control, Superblock
from shmbuffer.memory.files import Files, require_same_schema
from shmbuffer.memory.layout import BufferState, Flag, Phase, Role
from shmbuffer.memory.limiter import RateLimiter
from shmbuffer.memory.native import native_ring
from shmbuffer.memory.opening import Existing, clear_the_way, create_or_open
from shmbuffer.memory.patience import LOCK_TIMEOUT_NS
from shmbuffer.memory.prefault import OFF, Populating, Prefault
from shmbuffer.memory.recovery import RecoveryReport
from shmbuffer.memory.refusals import unlinked
from shmbuffer.memory.region import Directory, name_of
from shmbuffer.memory.registry import Client, Membership, Registry
from shmbuffer.memory.ring import ClosedRing, Ring
from shmbuffer.memory.schema import Schema
from shmbuffer.memory.settings import Settings


@dataclass
class _Seat:
    """What there is to give back when a handle ends: kept apart, so that it outlives the handle."""

    membership: Membership
    control: Control
    native: _core.Ring | None
    pid: int

    def leave(self) -> bool:
        """Frees the entry, and returns whether that could be done; else it can be asked again.

        In the child of a fork nothing: it is its parent's.
        """
        if os.getpid() != self.pid:
            return True
        if self.native is not None:
            if self.native.leave(LOCK_TIMEOUT_NS) not in (0, -_core.LEFT):
                _staying.update({id(self): self.membership})
                return False  # a claim may be open, or the mutex asked for: so we live on
        else:
            entry = self.control.entries[self.membership.entry]
            if entry["incarnation"] == self.membership.incarnation:
                self.control.touch()
                self.control.entries["state"][self.membership.entry] = layout.EntryState.FREE
                _core.reached("leave.freed")
        _staying.pop(id(self), None)
        if self.membership.liveness is not None:
            self.membership.liveness.close()
        return True


class Engine:
    """A handle on a buffer. Use `anonymous` or `open`.

    Attributes:
        where: for messages: the directory, or "anonymous memory".
        path: the directory; None in anonymous memory.
        control: the mapped control file.
        registry: the clients.
        report: what recovery did, if this handle recovered the directory.
        prefault: what it does about the pages of the buffer.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        ground: Files | Anonymous,
        control: Control,
        role: Role,
        *,
        adopting: bool = False,
        prefault: Prefault = OFF,
    ) -> None:
        self._ground = ground
        self._role = role
        self._adopting = adopting
        self._schema: Schema | None = None
        self._parts: tuple[_core.Map, list[_core.Map]] | None = None
        self._ring: Ring | None = None
        self._populating: Populating | None = None
        self._ownership: cleanup.Ownership | None = None
        self._not_durable: str | None = None
        self.control = control
        self.registry = Registry(control, ground.directory)
        self.path: Path | None = ground.path
        self.where = str(ground.path) if ground.path else WHERE
        self.report: RecoveryReport | None = None
        self.prefault = prefault
        self.closed = False
        self._take_seat()

    # Creating and joining.

    @classmethod
    def anonymous(
        cls,
        settings: Settings,
        *,
        role: str = "client",
        prefault: Prefault = OFF,
    ) -> Engine:
        """A buffer in memory without a name."""
        require_platform()
        ground, control = Anonymous.create(asdict(settings), settings.flags & ~Flag.RESERVE)
        return cls(ground, control, Role[role.upper()], prefault=prefault)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: Settings | None,
        *,
        existing: Existing = "attach",
        role: str = "client",
        timeout: float = 60.0,
        temporary: bool = False,
        auto_cleanup: bool = False,
        prefault: Prefault = OFF,
    ) -> Engine:
        """Opens a directory: creates the buffer, attaches to it, or recovers it.

        Args:
            path: the scratch directory.
            settings: of a buffer that is created; None: only attach.
            existing: what to do with a buffer that is there. ``"attach"``, ``"recover"``: join it,
                after recovering it if nobody alive uses it. ``"verify"``: the same, with every item
                compared with its checksum, and only if nobody alive uses it. ``"error"``: refuse.
                ``"overwrite"``: remove it first, if nobody alive uses it. ``"adopt"``: as attach;
                leaf files of a bare tensordict directory are taken over, with no items.
            role: ``client``, ``collector``, ``learner`` or ``coordinator``; for display.
            timeout: seconds to wait for another process that creates or recovers it.
            temporary: the directory is ours: removed at the end of this process.
            auto_cleanup: a directory that the user named is cleaned up at the end of this process.
            prefault: what to do about the pages, now or once the schema is there. Where another
                process defines it, "full" is as "background": any call may be the first to see it.

        Raises:
            BufferNotFoundError: ``settings`` is None and there is no buffer.
            BufferExistsError: with ``existing="error"``.
            BufferInUseError: with ``existing="overwrite"`` or ``"verify"``.
            AttachTimeout: somebody holds init.lock.
            CorruptBufferError, FormatError, UnsafePathError, UnsafeFilesystemError, ReadOnlyError,
            SpaceError, RegistryFullError: as they say; nothing was changed.
        """
        require_platform()
        if settings is not None:
            removal.sweep(besides=Path(path))
        while True:
            try:
                engine = cls._open_once(
                    path, settings, existing, role, timeout, temporary, prefault
                )
                break
            except BufferUnlinkedError:
                continue  # removed between our look at it and the lock: look again
        if temporary or auto_cleanup:
            engine._own()
        if engine._parts is not None:
            try:
                engine._populate(wait=True)
            except BaseException:
                engine.close()
                raise
        return engine

    @classmethod
    def _open_once(
        cls,
        path: str | os.PathLike[str],
        settings: Settings | None,
        existing: Existing,
        role: str,
        timeout: float,
        temporary: bool,
        prefault: Prefault,
    ) -> Engine:
        directory = Directory.open(path, create=settings is not None)
        files = Files(directory)
        try:
            if settings is None:
                files.require_control(
                    "check the path, or create one with Coordinator or "
                    "LazyMemmapStorage(scratch_dir=..., shared_init=True)"
                )
            with suppress(BufferNotFoundError):
                files.open_control().superblock()  # of a foreign file not even the lock is touched
            with files.lock(timeout, creating=settings is not None):
                _core.reached("open.locked")
                report = clear_the_way(files, existing, creating=settings is not None)
                control = create_or_open(files, settings, temporary=temporary)
                engine = cls(
                    files,
                    control,
                    Role[role.upper()],
                    adopting=existing == "adopt",
                    prefault=prefault,
                )
        except BaseException:
            files.close()
            raise
        engine.report = report
        return engine

    def _take_seat(self) -> None:
        """Joins the registry; under init.lock, or before anybody else has the memory."""
        self._map()
        for entry, incarnation in self.registry.live():
            if self.registry.is_dead(entry):
                self._retire(entry, incarnation)
        membership = self.registry.join(self._role)
        self._seat = _Seat(membership, self.control, None, os.getpid())
        self._finalizer = weakref.finalize(self, self._seat.leave)
        self._finalizer.atexit = False  # `_leave_at_exit`: before the interpreter is taken apart
        _open_engines.add(self)
        if self._parts is not None:
            self._connect()

    def _retire(self, entry: int, incarnation: int) -> None:
        if self._parts is None:
            self.registry.free(entry)
        else:
            self._native(entry).reap(entry, incarnation, LOCK_TIMEOUT_NS)

    def _map(self) -> None:
        """Maps slots and leaves if they are there by now."""
        if self._parts is None and self._state in (BufferState.READY, BufferState.CLOSING):
            try:
                self._schema, slots, leaves = self._ground.load(self.superblock)
            except CorruptBufferError as error:
                if self._state != BufferState.CLOSING:
                    raise
                raise BufferClosedError(f"{self.where}: the buffer is being removed") from error
            self._parts = (slots, leaves)

    def _native(self, entry: int) -> _core.Ring:
        if self._parts is None or self._schema is None:
            raise RuntimeError(f"{self.where}: there is no schema yet")
        directory = self._ground.directory
        return native_ring(
            self.control,
            self._schema,
            *self._parts,
            entry=entry,
            folder=None if directory is None else directory.file.fd,
        )

    def _connect(self) -> None:
        """Makes the ring of our entry, once there are slots."""
        self._seat.native = native = self._native(self._seat.membership.entry)
        if self._ring is not None:
            self._ring.use(native)
        elif self._parts is not None and self._schema is not None:
            slots, leaves = self._parts
            self._ring = Ring(self, native, self._schema, (slots, *leaves))

    @property
    def _state(self) -> BufferState:
        found = int(self.control.runtime["state"][0])  # SYNC define, acquire
        try:
            return BufferState(found)
        except ValueError:
            raise BufferNeedsRestart(
                f"{self.where}: the state of the buffer is {found:#x}, which is none: something "
                "else has written over the shared memory; close every handle, then recover"
            ) from None

    @property
    def ring(self) -> Ring | None:
        """The ring, once the schema is there; None before."""
        if self._ring is None and not self.closed and self._state != BufferState.NO_SCHEMA:
            if os.getpid() != self._seat.pid:
                self.attach_again()
            else:
                self.require_there()
                with _connecting:
                    if self._ring is None:
                        self._map()
                        self._connect()
                        self._populate()
        return self._ring

    @property
    def schema(self) -> Schema | None:
        """What an item is made of; None before the first write by anyone."""
        ring = self.ring
        return ring.schema if ring else None

    @property
    def superblock(self) -> Superblock:
        """Identity and life cycle, decoded."""
        return self.control.superblock()

    @property
    def settings(self) -> Settings:
        """As recorded."""
        return Settings.recorded(self.superblock.settings, self.where)

    @property
    def epoch(self) -> int:
        """Number of recoveries of the directory."""
        return self.superblock.epoch

    @property
    def incarnation(self) -> int:
        """Our own; unique in the directory."""
        return self._seat.membership.incarnation

    @property
    def is_first_and_alone(self) -> bool:
        """Whether this handle made the buffer, and nobody else has joined since."""
        return self._seat.membership.incarnation == 1 and len(self.registry.alive()) == 1

    @property
    def on_disk(self) -> bool:
        """Whether a disk is below the bytes, so that the kernel writes them back."""
        return not self._ground.in_memory

    @property
    def shared(self) -> bool:
        """Whether it is a directory, which any process may attach to."""
        return self.path is not None

    def define(self, schema: Schema, *, timeout: float = 60.0) -> Ring:
        """Builds what the first write needs, or loads what another process built meanwhile.

        Raises:
            SchemaMismatchError: another process defined another schema.
            SpaceError: bytes needed and free; the buffer has no schema still, unless memory ran out
                while its pages were made ahead.
            AttachTimeout: another process is building for longer than ``timeout``.
        """
        self._require_open()
        ring = self.ring
        if ring is None:
            with self._ground.lock(timeout):
                _core.reached("define.locked")
                if os.getpid() != self._seat.pid:
                    self._join_in_child()
                self.require_there()
                if self._state == BufferState.NO_SCHEMA:
                    self._build(schema)
            ring = self.ring
        if ring is None:
            raise BufferClosedError(f"{self.where}: the buffer is being removed")
        require_same_schema(ring.schema, schema, self.where)
        self._populate(wait=True)
        return ring

    def undefine(self, *, timeout: float = 60.0) -> bool:
        """Forgets what an item is made of: the next write says so, of whichever process.

        Returns:
            False, and nothing was changed, if there are items, or anybody else has the buffer.

        Raises:
            AttachTimeout, DurabilityError: as in `define`.
        """
        self._require_open()
        ring = self.ring
        with self._ground.lock(timeout):
            alone = self.registry.alive() == [(self.entry, self.incarnation)]
            if ring is None or ring.length or not alone:
                return False
            discard = self._ground.discarding()  # what can fail, first
            nothing = {name: getattr(Superblock(), name) for name in _OF_THE_SCHEMA}
            known = self.superblock
            unknown = replace(known, state=BufferState.NO_SCHEMA, **nothing)
            try:
                self.control.write(self.control.write(unknown))
                self.control.sync()
            except DurabilityError:
                self.control.withdraw(known)
                raise
            _core.reached("undefine.superblock")
            self.control.runtime["state"] = BufferState.NO_SCHEMA
            _core.reached("undefine.state")
            if self._populating is not None:
                self._populating.stop()
            ring.use(ClosedRing(self.where))
            self._seat.native, self._ring, self._schema, self._parts = None, None, None, None
            self._populating = None
            discard()
        return True

    def _build(self, schema: Schema) -> None:
        settings, superblock = self.settings, self.superblock
        if self.prefault and not self._has_its_pages:
            self.prefault.require_memory(
                schema.sections["bytes"] + sum(schema.map_bytes), self.where
            )
        slots, leaves = self._ground.build(
            schema, reserve=bool(superblock.flags & Flag.RESERVE), adopt=self._adopting
        )
        runtime = self.control.runtime
        # Behind an emptying the head is at the beginning of a lap, which may be longer now.
        runtime["head"] += -int(runtime["head"][0]) % schema.capacity
        _core.reached("define.head")
        if settings.alpha is not None and not runtime["prioritized"][0]:
            given = (("alpha", settings.alpha), ("eps", settings.eps), ("prioritized", 1))
            for name, value in given:
                runtime[name] = value
                _core.reached("define.settings")
        ready = replace(
            superblock,
            state=BufferState.READY,
            capacity=schema.capacity,
            lanes=schema.width,
            leaves=len(schema.leaves),
            schema_sha256=schema.digest,
            slots_bytes=slots.nbytes,
            salt=_core.crc32c(schema.digest),
        )
        try:
            # Both copies: were one lost, an older one would say that there is no schema, and
            # recovery would remove all that was written.
            self.control.write(self.control.write(ready))
            self.control.sync()
        except DurabilityError as error:
            self.control.withdraw(superblock)
            self._ground.discard_unfinished()
            raise DurabilityError(
                f"{error}; so the buffer has no schema still: write again, or choose another disk"
            ) from error
        _core.reached("define.superblock")
        self._schema, self._parts = schema, (slots, leaves)
        runtime["state"] = BufferState.READY  # SYNC define, release
        _core.reached("define.ready")

    @property
    def _has_its_pages(self) -> bool:
        """Whether all memory was taken when the files were made."""
        return self._ground.in_memory and bool(self.superblock.flags & Flag.RESERVE)

    def _populate(self, *, wait: bool = False) -> None:
        """Begins to make and map the pages, if that is wished; once."""
        if not self.prefault or self._parts is None or self._seat.pid != os.getpid():
            return
        if self._populating is None:
            slots, leaves = self._parts
            self._populating = Populating(
                (slots, *leaves),
                in_memory=self._ground.in_memory,
                reserved=self._has_its_pages,
                prefault=self.prefault,
                where=self.where,
            )
            weakref.finalize(self, self._populating.stop)
            self._populating.start()
        if wait and self.prefault.waits:
            self._populating.wait()

    def dictionary(self) -> bytes | None:
        """What records are compressed with; None as long as nobody has published it."""
        self._require_open()
        return self._ground.dictionary()

    def publish_dictionary(self, data: bytes, *, timeout: float = 60.0) -> bytes:
        """Makes it what records are compressed with from now on, if there is none yet.

        Returns:
            What is there now: this one, or that of whoever came first.
        """
        self._require_open()
        with self._ground.lock(timeout):
            self.require_there()
            return self._ground.publish_dictionary(data)

    def update_settings(self, *, timeout: float = 60.0, **changes: Any) -> Settings:
        """Changes what is recorded; ``extra`` is merged.

        Raises:
            ValueError: it does not fit the superblock.
        """
        self._require_open()
        with self._ground.lock(timeout):
            superblock, recorded = self.superblock, asdict(self.settings)
            settings = {**recorded, **changes}
            settings["extra"] = {**recorded["extra"], **changes.get("extra", {})}
            self.control.write(replace(superblock, settings=asdict(Settings(**settings))))
            self.control.touch()
        return self.settings

    # After a death, after a fork.

    def reap_if_dead(self, entry: int, incarnation: int, *, timeout: float = 60.0) -> bool:
        """Finishes the claim of a client and frees its entry, if it is proven dead."""
        if (entry, incarnation) not in self.registry.live():
            return True  # somebody else did
        if entry == self._seat.membership.entry or not self.registry.is_dead(entry):
            return False
        ring = self.ring
        if ring is not None:
            freed: int = ring._native.reap(entry, incarnation, LOCK_TIMEOUT_NS)
            self.control.touch()
            return freed >= 0
        with self._ground.lock(timeout):  # without slots it has no claim
            if (
                self._state == BufferState.NO_SCHEMA
                and (entry, incarnation) in self.registry.live()
            ):
                self.registry.free(entry)
        return True

    def reap_dead(self) -> int:
        """Does so for every client that is proven dead, and returns how many there were."""
        dead = [client for client in self.registry.live() if self.registry.is_dead(client[0])]
        return sum(self.reap_if_dead(*client) for client in dead)

    def attach_again(self, *, timeout: float = 60.0) -> None:
        """Joins anew, in the child of a fork: the entry that it inherited is its parent's.

        Raises:
            ForkedHandleError: the directory is gone.
        """
        self._require_open()
        try:
            self.require_there()
        except BufferUnlinkedError as error:
            raise ForkedHandleError(
                f"{self.where}: this handle came through fork and its directory is gone; "
                "create the buffer again"
            ) from error
        with self._ground.lock(timeout):
            if os.getpid() != self._seat.pid:  # another thread may have done it meanwhile
                self._join_in_child()

    def _join_in_child(self) -> None:
        _core.begin_life()
        self._finalizer.detach()
        self._ownership = None
        self.prefault, self._populating = OFF, None  # its thread is the parent's
        if self._role is Role.COORDINATOR:
            self._role = Role.CLIENT  # it looks after nobody, and its end is not the coordinator's
        self._take_seat()

    # Flow control.

    @property
    def entry(self) -> int:
        """Our place in the registry."""
        return self._seat.membership.entry

    @property
    def limiter(self) -> RateLimiter | None:
        """What limits writes and samples; None: nothing does."""
        self._require_open()
        return limiter.read(self.control.runtime[0])

    def set_limiter(self, wanted: RateLimiter | None, *, timeout: float = 60.0) -> None:
        """Sets what limits writes and samples, for all processes; None: nothing.

        The ratio counts from now on. What a queue has handed out stays so; one that is switched on
        has all items that are there.

        Raises:
            ValueError: ``min_size`` is larger than the buffer; or a queue was asked for, and there
                are priorities.
            LockTimeout, AttachTimeout, BufferClosedError: as they say; nothing was changed.
        """
        self._require_open()
        ring = self.ring
        if wanted is not None:
            wanted.require_room(ring.elements if ring else self.settings.capacity, self.where)
            prioritized = ring.prioritized if ring else self.settings.alpha is not None
            if wanted.max_times_sampled is not None and prioritized:
                raise ValueError(
                    f"{self.where}: a queue hands items out first in, first out, and this buffer "
                    "has priorities; make it without (alpha=None), or leave max_times_sampled out"
                )
        if ring is None:
            with self._ground.lock(timeout):
                if self._state == BufferState.NO_SCHEMA:
                    self.control.limit(wanted)
                    return
            ring = self.ring
        if ring is None:
            raise BufferClosedError(f"{self.where}: the buffer is being removed")
        ring.limit(wanted)

    # Looking at it.

    def stats(self) -> dict[str, int | float]:
        """One consistent snapshot of the counters, flat. Holds the mutex while 69 KB are copied.

        Returns:
            `counters.totals`, and ``clients_alive``, ``clients_dead`` (not reaped yet), ``p_sum``,
            ``epoch``, ``bytes`` (mapped) and ``time_ns`` (monotonic).
        """
        self._require_open()
        ring = self.ring
        if ring is None:
            runtime, entries = self.control.runtime[0], self.control.entries
        else:
            runtime, entries = counters.of_snapshot(ring.snapshot())
        live = set((entries["state"] == layout.EntryState.LIVE).nonzero()[0].tolist())
        alive = live & {entry for entry, _ in self.registry.alive()}
        slots, leaves = self._parts if self._parts else (None, [])
        return {
            **self._totals(ring, runtime, entries),
            "clients_alive": len(alive),
            "clients_dead": len(live) - len(alive),
            "bytes": layout.CONTROL_BYTES + sum(m.nbytes for m in (slots, *leaves) if m),
            "time_ns": time.monotonic_ns(),
        }

    def glance(self) -> dict[str, int | float]:
        """The counters without the mutex: each number is whole, and of its own moment.

        Returns:
            `counters.totals`, ``p_sum`` and ``epoch``.
        """
        self._require_open()
        return self._totals(self.ring, self.control.runtime[0], self.control.entries)

    def _totals(self, ring: Ring | None, runtime: Any, entries: Any) -> dict[str, int | float]:
        totals = counters.totals(
            runtime,
            entries,
            width=ring.width if ring else 1,
            elements=ring.elements if ring else self.settings.capacity,
        )
        return {**totals, "p_sum": ring.p_sum if ring else 0.0, "epoch": self.epoch}

    def clients(self) -> list[Client]:
        """Every client, the dead that nobody has reaped yet included."""
        self._require_open()
        return self.registry.clients()

    def check(self) -> CheckReport:
        """Verifies everything and changes nothing; see `check.check`."""
        self._require_open()
        if os.getpid() != self._seat.pid:
            self.attach_again()
        report = CheckReport(self.where, alive=True)
        report.problems += impossible_fields(self.control, self.superblock)
        ring = self.ring
        if ring is None or self._parts is None:
            report.notes.append(NO_SCHEMA)
        else:
            mapped = (ring.schema, ring._native, self._parts[0])
            compare_slots(report, self.control, *mapped)
            compare_checksums(report, self.control, *mapped)
        return report

    def flush(self, *, timeout: float = 60.0) -> None:
        """The durability barrier: what is committed now survives a power cut until overwritten.

        Waits for the disk: some milliseconds, more for many dirty pages. Writers go on meanwhile.

        Raises:
            DurabilityError: a sync failed. It is not tried again, neither by this handle later:
                the kernel may have dropped the pages, and a second success would prove nothing
                (fsync(2), EIO).
            BufferUnlinkedError: the directory is gone.
        """
        self._require_open()
        ring = self.ring
        if not self.shared or ring is None or self._parts is None:
            return
        if os.getpid() != self._seat.pid:
            self.attach_again(timeout=timeout)
        with self._ground.lock(timeout):
            self.require_there()
            if self._not_durable is not None:
                raise DurabilityError(self._not_durable)
            runtime, entries = counters.of_snapshot(ring.snapshot())
            # What is being written now may reach the disk in part.
            claims = entries["first"][entries["phase"] == Phase.PAYLOAD]
            ticket = min([int(runtime["head"]), *map(int, claims)])
            try:
                raise_barrier(self.control, *self._parts, ticket=ticket, where=self.where)
            except DurabilityError as error:
                self._not_durable = str(error)
                raise

    # Leaving, and removing.

    def close(self) -> None:
        """Leaves: calls in flight end first, then every use raises BufferClosedError. Idempotent.

        Views keep what they look at mapped. Interrupted, it is finished by the next call.
        """
        self.closed = True
        _open_engines.discard(self)
        if self._populating is not None:
            self._populating.stop()
        if self._ring is not None:
            self._ring.use(ClosedRing(self.where))
        left = self._seat.leave()
        self._finalizer.detach()
        if left:
            _staying.pop(id(self), None)
            self._ground.close()
        else:
            _staying.update({id(self): self._ground})  # a call in flight looks for the directory

    def cleanup(self, *, timeout: float = removal.TIMEOUT_S) -> bool:
        """Removes the files that we made, by list; then the directory, if it is ours and empty.

        Whoever has it open keeps its maps: reads go on, writes raise BufferClosedError.

        Returns:
            Whether there was something to remove. Idempotent.
        """
        if self.path is None:
            return False
        if self._ownership is not None:
            return self._ownership.remove()
        return removal.remove(self.path, self.superblock.uuid, timeout=timeout)

    def take_ownership(self, *, timeout: float = 60.0) -> bool:
        """Takes over a temporary directory whose owner is dead.

        Returns:
            False if it is not temporary, or its owner lives.
        """
        self._require_open()
        with self._ground.lock(timeout):
            taken = self.shared and removal.take_ownership(self.control, self.registry)
        if taken:
            self._own()
        return taken

    def _own(self) -> None:
        """This process removes the directory at its end."""
        if self.path is not None:
            self._ownership = removal.own(self.path, self.superblock.uuid)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._require_open()
        if isinstance(self._ground, Files):
            return _attach, (str(self.path), self._role.name.lower())
        from multiprocessing import context, reduction

        context.assert_spawning(self)
        return _adopt_memory, (reduction.DupFd(self._ground.file.fd), self._role.name.lower())

    def _require_open(self) -> None:
        if self.closed:
            raise BufferClosedError(f"{self.where}: this handle was closed; attach again")

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed; one that was moved is there.

        What is removed with `cleanup` is CLOSING, which is another error.
        """
        if self._state == BufferState.CLOSING:
            return
        try:
            self._require_control()
        except OSError:
            self._require_open()  # another thread closes the handle
            raise

    def _require_control(self) -> None:
        if isinstance(self._ground, Files) and not self._ground.has_control():
            raise unlinked(self.where)

    def require_there(self) -> None:
        """Raises BufferUnlinkedError unless the directory is there, and its path leads to it."""
        self._require_control()
        if isinstance(self._ground, Files) and not self._ground.still_there():
            raise BufferUnlinkedError(
                f"{self.where}: the directory was moved while this handle was open; close it, and "
                f"attach to {name_of(self._ground.directory.file.fd)}",
                path=self.where,
            )


#: Fields of the superblock that say what is built.
_OF_THE_SCHEMA = ("capacity", "lanes", "leaves", "schema_sha256", "slots_bytes", "salt")

_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()

#: Of handles that could not leave: their entries stay, and so does what says that we live.
_staying: dict[int, object] = {}

#: Held to make a handle's ring: an entry has one claim, so that two rings must not share it.
_connecting = threading.RLock()


def _forget_threads_of_parent() -> None:
    global _connecting
    _connecting = threading.RLock()


os.register_at_fork(after_in_child=_forget_threads_of_parent)


@atexit.register
def _leave_at_exit() -> None:
    for engine in list(_open_engines):
        engine._seat.leave()  # a finalizer does nothing any more by now


def _attach(path: str, role: str) -> Engine:
    return Engine.open(path, None, role=role)


def _adopt_memory(duplicate: Any, role: str) -> Engine:
    ground = Anonymous(_core.Descriptor())
    ground.file.take(duplicate.detach)
    with ground.lock(60.0):
        return Engine(ground, ground.open_control(), Role[role.upper()])


def require_platform(machine: Callable[[], int] = lambda: layout.ARCHITECTURE) -> None:
    """Raises UnsupportedPlatformError where the engine's locks are not known to work."""
    if os.name != "posix" or not os.path.exists("/proc/self/stat") or machine() == 0:
        raise UnsupportedPlatformError(
            "shmbuffer needs Linux with glibc on x86-64 or aarch64; on this machine its locks "
            "would not survive the death of their holder"
        )
