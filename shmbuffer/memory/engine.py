"""Gives a process a handle on a buffer: creates the buffer, attaches to it, and detaches.

    Engine.anonymous(settings)       anonymous memory, for one process and its children
    Engine.open(path, settings)      a directory: created, attached to or recovered, as needed

    nothing ──create──▶ NO_SCHEMA ──define (the first write)──▶ READY ──remove──▶ CLOSING
                            ▲                                   │  ▲
                            └──── undefine (empty, alone) ──────┘  └──▶ RECOVERING (all died)

Creation has two steps. The control file is created first, so that clients can join before the form
of the items is known. The first write defines the schema. The first process that writes creates the
files under init.lock. Other processes wait, with a timeout, and then load the files.

If a process dies while creating or defining, the superblock decides what the next process under
init.lock does. It removes unfinished files and starts again, or publishes complete ones: see
`definition`. After ``fork``, the child joins with its own entry on first use.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import BufferClosedError
from shmbuffer.memory import weights
from shmbuffer.memory.clients import registry
from shmbuffer.memory.directory import cleanup, definition, diagnosis, removal
from shmbuffer.memory.directory.anonymous import Anonymous
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.consumer_status import consumer_stats
from shmbuffer.memory.format.layout import BufferState, Flag, Role
from shmbuffer.memory.format.limiter import Quota, RateLimiter
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.format.sharing import SharingRequest
from shmbuffer.memory.mapped.control import Superblock
from shmbuffer.memory.mapped.recorded import to_record
from shmbuffer.memory.mapped.settings import Settings
from shmbuffer.memory.opening import Existing, open_seat, require_platform
from shmbuffer.memory.pages import Pages
from shmbuffer.memory.ring import counters
from shmbuffer.memory.ring.ring import Ring
from shmbuffer.memory.system.prefault import OFF, Prefault
from shmbuffer.memory.upkeep import flush
from shmbuffer.memory.upkeep.check import CheckReport, check_living
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport


class Engine:
    """A handle on a buffer. Created by `anonymous` or `open`.

    Attributes:
        seat: The seat of the handle: its entry, the control file and the maps.
        where: For messages: the directory, or "anonymous memory".
        path: The directory; None in anonymous memory.
        report: The report of the recovery, if this handle recovered the directory.
        pages: The prefault of the pages of the buffer.
    """

    def __init__(self, seat: Seat, *, adopting: bool = False, prefault: Prefault = OFF) -> None:
        self._adopting = adopting
        self.pages = Pages(prefault)
        self._ring = Ring(seat) if seat.mapped else None
        self._ownership: cleanup.Ownership | None = None
        self.seat = seat
        self.where = seat.where
        self.path: Path | None = seat.backing.path
        self.report: RecoveryReport | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.seat.state().name
        capacity = "" if self.closed or self._ring is None else f", capacity={self._ring.capacity}"
        return f"Engine({self.where!r}, {state}{capacity})"

    # Creating and joining.

    @classmethod
    def anonymous(cls, settings: Settings, *, prefault: Prefault = OFF) -> Engine:
        """Creates a buffer in anonymous memory."""
        require_platform()
        backing, control = Anonymous.create(
            asdict(settings), settings.flags & ~(Flag.RESERVE | Flag.STEPS)
        )
        return cls(Seat(backing, control, Role.CLIENT), prefault=prefault)

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
            path: The scratch directory.
            settings: The settings of a new buffer. None: do not create a buffer.
            existing: The treatment of an existing buffer.

                * ``"attach"``, ``"recover"``: join the buffer. If no living client uses the buffer,
                  recover it first.
                * ``"verify"``: like ``"recover"``, but compare every item with its checksum. An
                  error if a living client uses the buffer.
                * ``"error"``: raise BufferExistsError.
                * ``"overwrite"``: remove the buffer first. An error if a living client uses it.
                * ``"adopt"``: like ``"attach"``, but also use the leaf files of a plain tensordict
                  directory, without items.

            role: ``client``, ``collector``, ``learner`` or ``coordinator``; for display.
            timeout: Seconds to wait for another process that creates or recovers the buffer.
            temporary: If True, the whole directory is removed when this process ends.
            auto_cleanup: If True, the buffer's files are removed when this process ends.
            prefault: Whether to prefault the pages, now or once there is a schema. If another
                process defines the schema, "full" is treated like "background", because any call
                may be the first one that maps the files.

        Raises:
            BufferNotFoundError: ``settings`` is None and there is no buffer.
            BufferExistsError: With ``existing="error"``.
            BufferInUseError: With ``existing="overwrite"`` or ``"verify"``.
            AttachTimeout: Another process holds init.lock.
            CorruptBufferError, FormatError, UnsafePathError, UnsafeFilesystemError, ReadOnlyError:
                Nothing was changed.
            SpaceError, RegistryFullError: Nothing was changed.
        """
        require_platform()
        if settings is not None:
            removal.sweep(excluding=Path(path))
        seat, report = open_seat(
            path, settings, existing, Role[role.upper()], timeout=timeout, temporary=temporary
        )
        engine = cls(seat, adopting=existing == "adopt", prefault=prefault)
        engine.report = report
        if temporary or auto_cleanup:
            engine._register_ownership()
        if seat.mapped is not None:
            try:
                engine.pages.start(seat, wait=True)
            except BaseException:
                engine.close()
                raise
        return engine

    # The shared parts.

    def ring(self) -> Ring | None:
        """Returns the ring, and maps the files if they are new; None before the first write."""
        if self._ring is None and not self.closed:
            self.seat.catch_up()
            with self.seat.connecting:
                # Another thread may have created the ring in the meantime.
                if self.seat.mapped is not None and self._ring is None:
                    self._ring = Ring(self.seat)
                    self.pages.start(self.seat)
        return self._ring

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self.seat.closed

    @property
    def superblock(self) -> Superblock:
        """The decoded identity and life cycle of the buffer."""
        return self.seat.control.superblock()

    @property
    def settings(self) -> Settings:
        """The recorded settings of the buffer."""
        return Settings.recorded(self.superblock.settings, self.where)

    @property
    def on_disk(self) -> bool:
        """True if there is a disk below the files, so that the kernel writes pages back."""
        return not self.seat.backing.in_memory

    @property
    def shared(self) -> bool:
        """True if the buffer is in a directory, to which any process may attach."""
        return self.path is not None

    def define(self, schema: Schema, *, timeout: float = 60.0) -> Ring:
        """Builds the files that the first write needs, or loads those of another process.

        Raises:
            SchemaMismatchError: Another process defined another schema.
            SpaceError: There is not enough space. The buffer still has no schema, unless memory ran
                out while its pages were prefaulted.
            AttachTimeout: Another process has been building for longer than ``timeout``.
        """
        seat = self.seat
        seat.require_open()
        request = SharingRequest.from_settings(self.settings.extra)
        if request is not None:
            schema = replace(schema, sharing=request.choose_leaves(schema.leaves, schema.capacity))
        ring = self.ring()
        if ring is None:
            with seat.backing.lock(timeout):
                _core.reached("define.locked")
                seat.rejoin_locked()
                seat.require_there()
                if seat.state() == BufferState.NO_SCHEMA:
                    pages = self.pages.prefault
                    definition.build(seat, schema, adopting=self._adopting, prefault=pages)
            ring = self.ring()
        if ring is None:
            raise BufferClosedError(f"{self.where}: the buffer is being removed; create it again")
        ring.schema.require_same(schema, self.where)
        self.pages.start(seat, wait=True)
        return ring

    def undefine(self, *, timeout: float = 60.0) -> bool:
        """Removes the schema of an empty buffer; the next write of any process defines a new one.

        Returns:
            False, without any change, if there are items, or another client is attached.

        Raises:
            AttachTimeout, DurabilityError: As in `define`.
        """
        self.seat.require_open()
        ring, registry = self.ring(), self.seat.registry
        with self.seat.backing.lock(timeout):
            alone = registry.alive() == [(self.seat.entry, self.seat.incarnation)]
            if ring is None or ring.length or not alone:
                return False
            self.pages.stop()
            with self.seat.backing.lock_growth(timeout):
                self.seat, discard = definition.withdraw(self.seat)
                self._ring, self.pages = None, Pages(self.pages.prefault)
                discard()
        return True

    def update_settings(self, *, timeout: float = 60.0, **changes: Any) -> Settings:
        """Changes the recorded settings; ``extra`` is merged.

        Raises:
            ValueError: The settings do not fit into the superblock, or no process could read them
                back.
        """
        self.seat.require_open()
        with self.seat.backing.lock(timeout):
            extra = {**self.settings.extra, **changes.pop("extra", {})}
            values = to_record(replace(self.settings, **changes, extra=extra), self.where)
            self.seat.control.write(replace(self.superblock, settings=values))
            self.seat.control.touch()
        return self.settings

    # Flow control.

    @property
    def limiter(self) -> RateLimiter | None:
        """The limiter of writes and samples; None if there is no limiter."""
        self.seat.require_open()
        return self.seat.control.limits()

    def set_limiter(self, wanted: RateLimiter | Quota | None, *, timeout: float = 60.0) -> None:
        """Sets the limits of writes and samples for all processes; None removes them.

        The ratio is counted from the time of this call. Items that a queue has already returned are
        not returned again. A new queue contains all existing items.

        Raises:
            ValueError: ``min_size`` is larger than the buffer, or a queue was requested for a
                buffer with priorities.
            LockTimeout, AttachTimeout, BufferClosedError: Nothing was changed.
        """
        self.seat.require_open()
        ring = self.ring()
        if wanted is not None:
            wanted.require_fits(
                ring.elements if ring else self.settings.capacity,
                self.where,
                prioritized=ring.tree.prioritized if ring else self.settings.alpha is not None,
            )
        if ring is None:
            with self.seat.backing.lock(timeout):
                if self.seat.state() == BufferState.NO_SCHEMA:
                    self.seat.control.limit(wanted)
                    return
            ring = self.ring()
        if ring is None:
            raise BufferClosedError(f"{self.where}: the buffer is being removed; create it again")
        ring.limit(wanted)

    # Inspection.

    def stats(self) -> dict[str, int | float]:
        """Returns consistent counters in a flat dict; holds the mutex for a copy of 69 KB.

        Returns:
            `counters.totals`, ``clients_alive``, ``clients_dead`` (not reaped yet), ``p_sum``,
            ``epoch``, ``bytes`` (of all files), ``time_ns`` (monotonic), `weights.stats` and
            `consumer_stats`.
        """
        self.seat.require_open()
        found = counters.snapshot(self.seat, self.ring(), self.settings.capacity)
        return found | weights.stats(self.seat) | consumer_stats(self.seat)

    def glance(self) -> dict[str, int | float]:
        """Returns the counters without the mutex, so they may not be consistent with each other.

        Returns:
            `counters.totals`, ``p_sum`` and ``epoch``.
        """
        self.seat.require_open()
        return counters.glance(self.seat, self.ring(), self.settings.capacity)

    def clients(self) -> list[registry.Client]:
        """Returns all clients, including dead ones that are not reaped yet."""
        self.seat.require_open()
        return self.seat.registry.clients()

    def check(self) -> CheckReport:
        """Verifies all parts of the buffer and changes nothing; see `check.check`."""
        self.seat.require_open()
        if not self.seat.is_ours():
            self.seat.rejoin()
        self.ring()
        return check_living(self.seat)

    def flush(self, *, timeout: float = 60.0) -> None:
        """Writes committed items to the disk, so that they survive a power cut until overwritten.

        Waits for the disk, which takes a few milliseconds, or longer for many dirty pages. Writers
        are not blocked.

        Raises:
            DurabilityError: A sync failed. It is not retried, even by later calls of this handle:
                the kernel may have dropped the pages, so a second success would prove nothing
                (fsync(2), EIO).
            BufferUnlinkedError: The directory was removed.
        """
        self.seat.require_open()
        if self.shared and (ring := self.ring()) is not None:
            flush.flush(self.seat, ring, timeout)

    # Leaving and removing.

    def close(self) -> None:
        """Waits for running calls, then detaches; later calls raise BufferClosedError. Idempotent.

        Views keep their memory mapped. If this call is interrupted, the next call completes it.
        """
        self.pages.stop()
        self.seat.leave()

    def cleanup(self, *, timeout: float = removal.TIMEOUT_S) -> bool:
        """Removes the buffer's files, and the directory if this package created it and it is empty.

        Processes that have the buffer open keep their maps: reads continue, and writes raise
        BufferClosedError. Idempotent.

        Returns:
            True if there was a buffer to remove.
        """
        if self.path is None:
            return False
        if self._ownership is not None and self._ownership.is_ours():
            return self._ownership.remove()
        return removal.remove(self.path, self.superblock.uuid, timeout=timeout)

    def take_ownership(self, *, timeout: float = 60.0) -> bool:
        """Takes over a temporary directory whose owner is dead.

        Returns:
            False if the directory is not temporary, or its owner is alive.
        """
        self.seat.require_open()
        with self.seat.backing.lock(timeout):
            taken = isinstance(files := self.seat.backing, Files) and removal.take_ownership(
                diagnosis.Diagnosis.from_control(files, self.seat.control)
            )
        if taken:
            self._register_ownership()
        return taken

    def _register_ownership(self) -> None:
        if self.path is not None:
            self._ownership = removal.own(self.path, self.superblock.uuid)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self.seat.require_open()
        if isinstance(self.seat.backing, Files):
            return _attach, (str(self.path), self.seat.role.name.lower())
        return _adopt_memory, (self.seat.backing.to_picklable(), self.seat.role.name.lower())


def _attach(path: str, role: str) -> Engine:
    return Engine.open(path, None, role=role)


def _adopt_memory(duplicate: Any, role: str) -> Engine:
    """Joins the anonymous memory that a parent process has passed."""
    backing = Anonymous(_core.Descriptor())
    backing.file.take(duplicate.detach)
    with backing.lock(60.0):
        return Engine(Seat(backing, backing.open_control(), Role[role.upper()]))
