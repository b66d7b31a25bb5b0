"""Reserving room before a rollout, and going on with what dead processes began."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmbuffer.errors import ReservationLostError, ShmBufferError
from shmbuffer.memory import consumer_version, partials
from shmbuffer.memory.deadline import within
from shmbuffer.memory.partials import Partial, Pieces
from shmbuffer.numpy.indices import as_int
from shmbuffer.replay.buffers.parts import Parts, shareable
from shmbuffer.replay.buffers.reservation import Reservation
from shmbuffer.replay.storages.ring_backed import RingBacked

if TYPE_CHECKING:
    from typing import Any

    from shmbuffer.memory import Engine, Ring


class Reserving(Parts):
    """The part of a buffer that holds room for items to come."""

    def reserve(
        self,
        n: int,
        bytes: int | None = None,
        timeout: float | None = None,
        *,
        lease: float | None = None,
        version: int | None = None,
    ) -> Reservation:
        """Hold room for ``n`` items that a rollout is about to make.

        It waits as a write of them would: for a queue that is full, a ratio, ``max_staleness``.
        From then on others are admitted as if the items were there, and `Reservation.commit` does
        not wait for the other side any more. A reservation has no slot, so a slow rollout stops
        nobody. A handle may hold many, all handles 4096.

        Args:
            n: items, of a storage with lanes steps; at most the capacity.
            bytes: of the byte ring, where items have any size; headers included (some 200 bytes an
                item beside its tensors). None: bytes are not held, and `commit` waits for them.
            timeout: seconds to wait; None: as long as it takes.
            lease: seconds until it ends by itself, also while the machine sleeps. None: it ends
                when this handle does, or its process.
            version: of the policy that makes the items; `Reservation.commit` compares it.

        Returns:
            The reservation: commit it, or abort it.

        Raises:
            RateLimitTimeout, RateLimitError: as of `extend`; nothing is held.
            ShmBufferError: all reservations are in use.
            ValueError: more items than there is room for; no number.
            TypeError, RuntimeError: the storage is not one that processes can share.

        Cost: some microseconds. Before the first write to a buffer whose items are not known
            nothing can be full, and nothing is held: `Reservation.commit` is a write then.
        """
        n = _whole("n", n)
        engine, ring = self._shared_ring()
        room = ring.capacity if ring else engine.settings.capacity
        if n > room:
            raise ValueError(
                f"{engine.where}: reserve({n:,}): the buffer has room for {room:,}; reserve fewer "
                "at once, or make it larger"
            )
        if bytes is not None and (ring is None or ring.records is None):
            raise ValueError(
                f"{engine.where}: reserve(bytes={bytes:,}): bytes are of items that have any size, "
                "and these are rows; leave it out"
            )
        if lease is not None:
            _require_time(lease)
        if version is not None:
            version = consumer_version.require_version(version, "reserve: version")
        nbytes = 0 if bytes is None else _whole("bytes", bytes)
        name = None
        if ring is not None:
            with within(timeout):
                name = self._reserved(engine, ring, n, nbytes, lease)
        return Reservation(self, engine, n, name, version)

    def partials(self) -> list[Partial]:
        """Rollouts whose process died, or closed its handle, between `append` and `commit`.

        One process may go on with each: `resume`. Costs a look at each file.
        """
        engine, ring = self._shared_ring()
        directory = engine.seat.ground.directory
        if directory is None or ring is None:
            return []
        engine.seat.reap_dead()
        self._forget_done(engine, ring)
        found = []
        for number in partials.orphans(directory):
            partial = partials.look(directory, number)
            if partial is None or not partial.pieces or ring.reservations.is_done(number):
                self._see_off(engine, ring, number)
            else:
                found.append(partial)
        return found

    def resume(self, partial: Partial | int, timeout: float | None = None) -> Reservation:
        """Go on with a rollout of somebody who died: its pieces are `Reservation.pieces`.

        Room is reserved as by `reserve`, for as many items as its owner had reserved.

        Args:
            partial: one of `partials`, or its id.
            timeout: seconds to wait for room; None: as long as it takes.

        Raises:
            ReservationLostError: it is committed, or gone, or another process goes on with it.
            RateLimitTimeout, RateLimitError: as of `reserve`; the pieces stay for others.
        """
        number = partial.id if isinstance(partial, Partial) else _whole("partial", partial)
        engine, ring = self._shared_ring()
        directory = engine.seat.ground.directory
        pieces = None if directory is None or ring is None else Pieces.take(directory, number)
        if pieces is None or ring is None:
            raise ReservationLostError(
                f"{engine.where}: resume({number}): its pieces are gone, or another process goes "
                "on with them; take another one of partials()"
            )
        try:
            engine.seat.reap_dead()
            told = pieces.told()
            if told is None or ring.reservations.is_done(number):
                pieces.remove()
                ring.reservations.is_done(number, forget=True)
                raise ReservationLostError(
                    f"{engine.where}: resume({number}): its items were committed; take another one "
                    "of partials()"
                )
            pieces.cut()
            with within(timeout):
                name = ring.reservations.reserve(told.reserved, told.nbytes, number=number)
        except BaseException:
            pieces.close()
            raise
        return Reservation(self, engine, told.reserved, name, told.version, pieces)

    def _shared_ring(self) -> tuple[Engine, Ring | None]:
        storage = self._storage
        if not isinstance(storage, RingBacked):
            raise TypeError(
                f"reserve needs a storage of this package; {type(storage).__name__} is not one"
            )
        engine = shareable(storage)
        return engine, engine.ring()

    def _reserved(
        self, engine: Engine, ring: Ring, n: int, nbytes: int, lease: float | None
    ) -> int:
        try:
            return ring.reservations.reserve(n, nbytes, seconds=lease)
        except ShmBufferError as error:
            if "reservations" not in error.parts:
                raise
        engine.seat.reap_dead()  # all are in use: by the dead, perhaps
        self._forget_done(engine, ring)
        return ring.reservations.reserve(n, nbytes, seconds=lease)

    def _forget_done(self, engine: Engine, ring: Ring) -> None:
        """Of those who died between their commit and the end of their files."""
        done, directory = ring.reservations.done(), engine.seat.ground.directory
        if done and directory is not None:
            for number in set(done).difference(partials.numbers(directory)):
                ring.reservations.is_done(number, forget=True)
            for number in done:
                self._see_off(engine, ring, number)

    def _see_off(self, engine: Engine, ring: Ring, number: int) -> None:
        """Removes a file that has nothing, or nothing more to give, unless somebody holds it."""
        directory = engine.seat.ground.directory
        pieces = None if directory is None else Pieces.take(directory, number)
        if pieces is not None:
            with pieces:
                told = pieces.told()
                if told is None or not told.pieces or ring.reservations.is_done(number):
                    pieces.remove()
                    ring.reservations.is_done(number, forget=True)


def _require_time(lease: Any) -> None:
    problem = f"lease is a number of seconds from 0 on, or None; got {lease!r}"
    try:
        is_time = lease >= 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)


def _whole(name: str, value: Any) -> int:
    found = as_int(name, value)
    if found < 1:
        raise ValueError(f"{name} has to be at least 1, got {found}")
    return found
