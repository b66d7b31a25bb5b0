"""Handles to a buffer, which create it, attach to it, and detach from it.

    Engine.anonymous(settings)       in anonymous memory, for one process and its children
    Engine.open(path, settings)      in a directory: creates, attaches to or recovers the buffer

    nothing ──create──▶ NO_SCHEMA ──define (the first write)──▶ READY ──remove──▶ CLOSING
                            ▲                                   │  ▲
                            └ undefine (empty, no other client) ┘  └──▶ RECOVERING (all died)

A buffer is created in two steps. First, the control file is created, so that clients can join
before the schema is known. The first write then defines the schema: its process creates the other
files under init.lock. Other processes wait, with a time limit, and then map these files.

If a process dies while it creates or defines a buffer, the next process that takes init.lock reads
the state in the superblock. It then either removes incomplete files and starts again, or publishes
complete files (`definition`). After a fork, the child registers its own client at its first use of
the handle.
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
    """A handle to a buffer, created by `anonymous` or `open`.

    Attributes:
        seat: The seat of the handle: its registry entry, the control file and the maps.
        where: Name of the buffer for messages: its directory, or "anonymous memory".
        path: The directory of the buffer. None in anonymous memory.
        report: Report of the recovery, if this handle has recovered the buffer. Otherwise None.
        pages: The prefault of the buffer's pages.
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
        """Creates a buffer in anonymous memory and returns a handle on it."""
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
        """Opens the buffer in a directory: creates it, attaches to it, or recovers it.

        Args:
            path: The directory of the buffer.
            settings: Settings of a new buffer. If None, no buffer is created.
            existing: What to do if there is a buffer already.

                * ``"attach"``, ``"recover"``: Join the buffer. If no living client uses the buffer,
                  it is recovered first.
                * ``"verify"``: Like ``"recover"``, but compare every item with its checksum. Raises
                  an error if a living client uses the buffer.
                * ``"error"``: Raise BufferExistsError.
                * ``"overwrite"``: Remove the buffer first. Raises an error if a living client uses
                  it.
                * ``"adopt"``: Like ``"attach"``, but a new buffer uses the leaf files of a
                  tensordict that is saved in the directory. The buffer then contains no items.

            role: ``client``, ``collector``, ``learner`` or ``coordinator``, for display only.
            timeout: Seconds to wait for another process that creates or recovers the buffer.
            temporary: If True, the whole directory is removed when this process ends.
            auto_cleanup: If True, the files of the buffer are removed when this process ends.
            prefault: Whether pages are prefaulted, now or when the schema is defined. If another
                process defines the schema, "full" has the same effect as "background", because any
                call can be the first one that maps the files.

        Raises:
            BufferNotFoundError: ``settings`` is None and there is no buffer.
            BufferExistsError: There is a buffer, and ``existing`` is "error".
            BufferInUseError: A living client uses the buffer, and ``existing`` is "overwrite" or
                "verify".
            AttachTimeout: Another process has held init.lock for ``timeout`` seconds.
            CorruptBufferError, FormatError, UnsafePathError, UnsafeFilesystemError, ReadOnlyError:
                The directory cannot be used. Nothing was changed.
            SpaceError, RegistryFullError: There is no space, or no free entry. Nothing was changed.
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
        """Returns the ring of the buffer, or None before the first write.

        If another process has defined the schema, the files are mapped first.
        """
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
        """The superblock of the buffer: its identity, state and settings."""
        return self.seat.control.superblock()

    @property
    def settings(self) -> Settings:
        """The settings that are stored in the superblock of the buffer."""
        return Settings.recorded(self.superblock.settings, self.where)

    @property
    def on_disk(self) -> bool:
        """True if the files are on a disk, to which the kernel writes changed pages."""
        return not self.seat.backing.in_memory

    @property
    def shared(self) -> bool:
        """True if the buffer is in a directory, so that other processes can attach to it."""
        return self.path is not None

    def define(self, schema: Schema, *, timeout: float = 60.0) -> Ring:
        """Defines the schema of the buffer, and creates the files that items need.

        If another process has already defined the same schema, its files are mapped instead.

        Args:
            schema: The schema of the items that this process writes.
            timeout: Seconds to wait for another process that creates the files.

        Returns:
            The ring of the buffer.

        Raises:
            SchemaMismatchError: Another process has defined a different schema.
            SpaceError: There is not enough space. The buffer then has no schema, unless memory ran
                out while its pages were prefaulted.
            AttachTimeout: Another process has held init.lock for ``timeout`` seconds.
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
        """Removes the schema of an empty buffer. The next write of any process defines a new one.

        Args:
            timeout: Seconds to wait for init.lock, and then for the lock on growth.

        Returns:
            False if nothing was changed, because the buffer contains items or another client is
            attached.

        Raises:
            AttachTimeout: Another process has held a lock for ``timeout`` seconds.
            DurabilityError: A sync to the disk failed.
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
        """Changes the settings in the superblock.

        Args:
            timeout: Seconds to wait for init.lock.
            changes: New values by name. The entries of ``extra`` are merged into the existing ones.

        Returns:
            The new settings.

        Raises:
            ValueError: A setting is invalid, or the settings do not fit into the superblock.
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
        """The rate limiter of the buffer, or None if there is none."""
        self.seat.require_open()
        return self.seat.control.limits()

    def set_limiter(self, wanted: RateLimiter | Quota | None, *, timeout: float = 60.0) -> None:
        """Sets the limits for writes and samples in all processes.

        Items and samples are counted from the time of this call. If the buffer was a queue before,
        items that it has already delivered are not delivered again. A new queue contains all
        existing items.

        Args:
            wanted: The new limits. If None, removes all limits.
            timeout: Seconds to wait for init.lock, if the buffer has no schema yet.

        Raises:
            ValueError: ``min_size`` is larger than the buffer, or a buffer with priorities cannot
                become a queue.
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
        """Returns consistent counters as a flat dict. The mutex is held for a copy of 69 KB.

        Returns:
            The counters of `counters.totals`, `weights.stats` and `consumer_stats`, and
            ``clients_alive``, ``clients_dead`` (not reaped yet), ``p_sum`` (sum of all masses),
            ``epoch``, ``bytes`` (size of all files) and ``time_ns`` (monotonic clock).
        """
        self.seat.require_open()
        found = counters.snapshot(self.seat, self.ring(), self.settings.capacity)
        return found | weights.stats(self.seat) | consumer_stats(self.seat)

    def glance(self) -> dict[str, int | float]:
        """Returns counters without taking the mutex, so they may not be consistent.

        Returns:
            The counters of `counters.totals`, ``p_sum`` and ``epoch``.
        """
        self.seat.require_open()
        return counters.glance(self.seat, self.ring(), self.settings.capacity)

    def clients(self) -> list[registry.Client]:
        """Returns all clients of the buffer, including dead ones that were not reaped yet."""
        self.seat.require_open()
        return self.seat.registry.clients()

    def check(self) -> CheckReport:
        """Verifies the whole buffer without changing it (`check.check`)."""
        self.seat.require_open()
        if not self.seat.is_ours():
            self.seat.rejoin()
        self.ring()
        return check_living(self.seat)

    def flush(self, *, timeout: float = 60.0) -> None:
        """Writes all committed items to the disk, so that they survive a power cut.

        The call waits for the disk: a few milliseconds, or longer if many pages are dirty. Writers
        are not blocked.

        Args:
            timeout: Seconds to wait for init.lock.

        Raises:
            DurabilityError: A sync failed. Neither this call nor later calls of this handle retry
                it. The kernel may have dropped the pages, so a second sync could succeed although
                they are not on the disk (fsync(2), EIO).
            BufferUnlinkedError: The directory was removed.
        """
        self.seat.require_open()
        if self.shared and (ring := self.ring()) is not None:
            flush.flush(self.seat, ring, timeout)

    # Leaving and removing.

    def close(self) -> None:
        """Waits for running calls, and then detaches from the buffer. Idempotent.

        Later calls of other methods raise BufferClosedError. Views of the buffer stay valid. If
        this call is interrupted, the next call completes it.
        """
        self.pages.stop()
        self.seat.leave()

    def cleanup(self, *, timeout: float = removal.TIMEOUT_S) -> bool:
        """Removes the files of the buffer. Idempotent.

        The directory is removed, too, if this package created it and it is empty. Processes that
        have the buffer open keep their maps: they can read items, and their writes raise
        BufferClosedError.

        Args:
            timeout: Seconds to wait for init.lock.

        Returns:
            True if there was a buffer to remove.
        """
        if self.path is None:
            return False
        if self._ownership is not None and self._ownership.is_ours():
            return self._ownership.remove()
        return removal.remove(self.path, self.superblock.uuid, timeout=timeout)

    def take_ownership(self, *, timeout: float = 60.0) -> bool:
        """Makes this process the owner of a temporary directory whose owner is dead.

        The owner removes the directory when it ends.

        Args:
            timeout: Seconds to wait for init.lock.

        Returns:
            False if the directory is not temporary, or if its owner is alive.
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
        """Arranges that the buffer is removed when this process ends."""
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
    """Attaches to the buffer of an unpickled handle."""
    return Engine.open(path, None, role=role)


def _adopt_memory(duplicate: Any, role: str) -> Engine:
    """Joins the buffer of an unpickled handle in anonymous memory.

    Args:
        duplicate: Object that passes the descriptor of the memory between processes.
        role: Role of the client.
    """
    backing = Anonymous(_core.Descriptor())
    backing.file.take(duplicate.detach)
    with backing.lock(60.0):
        return Engine(Seat(backing, backing.open_control(), Role[role.upper()]))
