"""Reserves space before a rollout, and continues rollouts of dead processes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.buffers.data_path.parts import shareable
from shmbuffer.buffers.flow.reservation import Reservation
from shmbuffer.errors import (
    CorruptBufferError,
    ReservationLostError,
    ShmBufferError,
    UnsafePathError,
)
from shmbuffer.items.indices import as_int
from shmbuffer.memory import Engine, Ring, consumer_version
from shmbuffer.memory.clients import partials
from shmbuffer.memory.clients.partials import Partial, PartialFile
from shmbuffer.memory.system.deadline import limit_waits, require_time
from shmbuffer.memory.system.region import Directory
from shmbuffer.storages.storage import Storage

_log = logging.getLogger(__name__)

_BESIDE_TENSORS = 200
"""Approximate size of an item's record without its tensors; see `ReplayBuffer.reserve`."""


def reserve(
    rb: Any,  # the buffer
    n: int,
    bytes: int | None,
    timeout: float | None,
    lease: float | None,
    version: int | None,
) -> Reservation:
    """Reserves space; `ReplayBuffer.reserve` describes the arguments."""
    n = _whole("n", n)
    engine, ring = _shared_ring(rb.storage)
    capacity = ring.capacity if ring else engine.settings.capacity
    if n > capacity:
        raise ValueError(
            f"{engine.where}: reserve({n:,}): the buffer has room for only {capacity:,} items; "
            "reserve fewer at once, or make the buffer larger"
        )
    if bytes is not None and (ring is None or ring.records is None):
        raise ValueError(
            f"{engine.where}: reserve(bytes={bytes:,}): this buffer stores rows of equal size, so "
            "bytes cannot be reserved; leave bytes= out"
        )
    if lease is not None:
        require_time("lease", lease)
    if version is not None:
        version = consumer_version.require_version(version, "reserve: version")
    nbytes = 0 if bytes is None else _whole("bytes", bytes)
    granted = np.zeros(1, np.uint64)
    # This is created before the grant, so that an interrupt after the grant ends the reservation.
    room = Reservation(rb, engine, n, granted, version, nbytes)
    if ring is not None:
        with limit_waits(timeout):
            _reserve(engine, ring, n, nbytes, lease, granted)
    return room


def unfinished(storage: Storage) -> list[Partial]:
    """Returns the rollouts that other processes left unfinished."""
    engine, ring = _shared_ring(storage)
    directory = engine.seat.backing.directory
    if directory is None or ring is None:
        return []
    engine.seat.reap_dead()
    _forget_done(engine, ring)
    found = []
    for number in partials.orphans(directory):
        try:
            partial = partials.read_partial(directory, number)
            if partial is not None:
                _require_possible(directory, ring, partial)
        except (CorruptBufferError, UnsafePathError) as error:
            # Logging the exception object would keep the buffer mapped.
            _log.warning("%s", str(error))
            continue
        if partial is None or not partial.pieces or ring.reservations.is_done(number):
            _see_off(engine, ring, number)
        else:
            found.append(partial)
    return found


def resume(rb: Any, partial: Partial | int, timeout: float | None) -> Reservation:
    """Continues an unfinished rollout; `ReplayBuffer.resume` describes the arguments."""
    number = partial.id if isinstance(partial, Partial) else _whole("partial", partial)
    engine, ring = _shared_ring(rb.storage)
    directory = engine.seat.backing.directory
    file = None if directory is None or ring is None else PartialFile.take(directory, number)
    if file is None or ring is None:
        raise ReservationLostError(
            f"{engine.where}: resume({number}): the pieces were removed, or another process has "
            "resumed them; choose another one of partials()"
        )
    try:
        engine.seat.reap_dead()
        told = file.summarize()
        if told is None or ring.reservations.is_done(number):
            file.remove()
            ring.reservations.is_done(number, forget=True)
            raise ReservationLostError(
                f"{engine.where}: resume({number}): its items have been committed already; choose "
                "another one of partials()"
            )
        assert directory is not None
        _require_possible(directory, ring, told)
        file.cut()
        granted = np.zeros(1, np.uint64)
        nbytes = _bytes_of(ring, told)
        room = Reservation(rb, engine, told.reserved, granted, told.version, nbytes, file)
        given = told.reserved, nbytes
        with limit_waits(timeout):
            ring.reservations.reserve(*given, number=number, name=granted)
    except BaseException:
        file.close()
        raise
    return room


def _shared_ring(storage: Storage) -> tuple[Engine, Ring | None]:
    engine = shareable(storage, "reserve needs")
    ring = engine.ring()
    if ring is not None and not engine.seat.is_ours():
        engine.seat.rejoin()  # for a forked child, before the holder of the reservation is recorded
    return engine, ring


def _reserve(
    engine: Engine,
    ring: Ring,
    n: int,
    nbytes: int,
    lease: float | None,
    granted: NDArray[np.uint64],
) -> None:
    try:
        ring.reservations.reserve(n, nbytes, seconds=lease, name=granted)
        return
    except ShmBufferError as error:
        if "reservations" not in error.parts:
            raise
    engine.seat.reap_dead()  # dead processes may hold reservations
    _forget_done(engine, ring)
    ring.reservations.reserve(n, nbytes, seconds=lease, name=granted)


def _forget_done(engine: Engine, ring: Ring) -> None:
    """Cleans up after processes that died after their commit, before their files are removed."""
    done, directory = ring.reservations.list_committed(), engine.seat.backing.directory
    if done and directory is not None:
        for number in set(done).difference(partials.numbers(directory)):
            ring.reservations.is_done(number, forget=True)
        for number in done:
            _see_off(engine, ring, number)


def _see_off(engine: Engine, ring: Ring, number: int) -> None:
    """Removes a file that is empty or committed, unless another process holds it."""
    directory = engine.seat.backing.directory
    file = None if directory is None else PartialFile.take(directory, number)
    if file is not None:
        with file:
            told = file.summarize()
            if told is None or not told.pieces or ring.reservations.is_done(number):
                file.remove()
                ring.reservations.is_done(number, forget=True)


def _require_possible(directory: Directory, ring: Ring, partial: Partial) -> None:
    """Raises CorruptBufferError if the reservation in a file exceeds the size of the buffer."""
    partials.require_possible(directory, partial, ring.capacity, _max_bytes(ring))


def _max_bytes(ring: Ring) -> int:
    return 0 if ring.records is None else ring.records.max_bytes


def _bytes_of(ring: Ring, partial: Partial) -> int:
    """Returns the bytes to reserve: those reserved before, or those that the pieces need."""
    if not partial.nbytes:
        return 0  # unknown, so that any number of bytes can be committed
    needed = partial.appended_bytes + _BESIDE_TENSORS * partial.items
    return max(partial.nbytes, min(needed, _max_bytes(ring)))


def _whole(name: str, value: Any) -> int:
    found = as_int(name, value)
    if found < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    return found
