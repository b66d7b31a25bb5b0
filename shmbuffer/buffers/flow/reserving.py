"""Reserves space for rollouts, and continues rollouts of processes that died."""

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
"""Approximate number of bytes in an item's record besides its tensors."""


def reserve(
    rb: Any,
    n: int,
    bytes: int | None,
    timeout: float | None,
    lease: float | None,
    version: int | None,
) -> Reservation:
    """Reserves space in the buffer ``rb``; `ReplayBuffer.reserve` describes the arguments."""
    n = _whole("n", n)
    engine, ring = _shared_ring(rb.storage)
    capacity = ring.capacity if ring else engine.settings.capacity
    if n > capacity:
        raise ValueError(
            f"{engine.where}: reserve({n:,}): the buffer has a capacity of only {capacity:,} "
            "items; reserve fewer items, or create a larger buffer"
        )
    if bytes is not None and (ring is None or ring.records is None):
        raise ValueError(
            f"{engine.where}: reserve(bytes={bytes:,}): this buffer stores rows of equal size, so "
            "bytes cannot be reserved; omit bytes"
        )
    if lease is not None:
        require_time("lease", lease)
    if version is not None:
        version = consumer_version.require_version(version, "reserve: version")
    nbytes = 0 if bytes is None else _whole("bytes", bytes)
    granted = np.zeros(1, np.uint64)
    # The object is created before the space is reserved. If an exception such as Ctrl-C occurs
    # afterwards, its finalizer releases the space.
    room = Reservation(rb, engine, n, granted, version, nbytes)
    if ring is not None:
        with limit_waits(timeout):
            _reserve(engine, ring, n, nbytes, lease, granted)
    return room


def unfinished(storage: Storage) -> list[Partial]:
    """Returns the uncommitted rollouts of other processes; see `ReplayBuffer.partials`."""
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
            # Only the text is logged, because the exception object would keep the buffer mapped.
            _log.warning("%s", str(error))
            continue
        if partial is None or not partial.pieces or ring.reservations.is_done(number):
            _see_off(engine, ring, number)
        else:
            found.append(partial)
    return found


def resume(rb: Any, partial: Partial | int, timeout: float | None) -> Reservation:
    """Continues an uncommitted rollout; `ReplayBuffer.resume` describes the arguments."""
    number = partial.id if isinstance(partial, Partial) else _whole("partial", partial)
    engine, ring = _shared_ring(rb.storage)
    directory = engine.seat.backing.directory
    file = None if directory is None or ring is None else PartialFile.take(directory, number)
    if file is None or ring is None:
        raise ReservationLostError(
            f"{engine.where}: resume({number}): the rollout was removed, or another process has "
            "resumed it; choose another rollout from partials()"
        )
    try:
        engine.seat.reap_dead()
        told = file.summarize()
        if told is None or ring.reservations.is_done(number):
            file.remove()
            ring.reservations.is_done(number, forget=True)
            raise ReservationLostError(
                f"{engine.where}: resume({number}): the items of the rollout have already been "
                "committed; choose another rollout from partials()"
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
        # A forked child needs its own registry entry, which is recorded as the reservation's owner.
        engine.seat.rejoin()
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
    engine.seat.reap_dead()  # releases the reservations of dead processes
    _forget_done(engine, ring)
    ring.reservations.reserve(n, nbytes, seconds=lease, name=granted)


def _forget_done(engine: Engine, ring: Ring) -> None:
    """Cleans up after processes that died between a commit and the removal of its file."""
    done, directory = ring.reservations.list_committed(), engine.seat.backing.directory
    if done and directory is not None:
        for number in set(done).difference(partials.numbers(directory)):
            ring.reservations.is_done(number, forget=True)
        for number in done:
            _see_off(engine, ring, number)


def _see_off(engine: Engine, ring: Ring, number: int) -> None:
    """Removes the file of a rollout that is empty or committed.

    Does nothing if another process uses the file.
    """
    directory = engine.seat.backing.directory
    file = None if directory is None else PartialFile.take(directory, number)
    if file is not None:
        with file:
            told = file.summarize()
            if told is None or not told.pieces or ring.reservations.is_done(number):
                file.remove()
                ring.reservations.is_done(number, forget=True)


def _require_possible(directory: Directory, ring: Ring, partial: Partial) -> None:
    """Raises CorruptBufferError if the file of a rollout reserves more than the buffer holds."""
    partials.require_possible(directory, partial, ring.capacity, _max_bytes(ring))


def _max_bytes(ring: Ring) -> int:
    return 0 if ring.records is None else ring.records.max_bytes


def _bytes_of(ring: Ring, partial: Partial) -> int:
    """Returns the number of bytes to reserve when a rollout is resumed.

    This is the number that was reserved before, or more if the appended pieces need more. If no
    bytes were reserved, it is 0.
    """
    if not partial.nbytes:
        return 0
    needed = partial.appended_bytes + _BESIDE_TENSORS * partial.items
    return max(partial.nbytes, min(needed, _max_bytes(ring)))


def _whole(name: str, value: Any) -> int:
    found = as_int(name, value)
    if found < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    return found
