"""Raises the errors that belong to the status codes of the C core."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferClosedError,
    BufferNeedsRestart,
    ConsumerError,
    CorruptBufferError,
    EmptyBufferError,
    LockTimeout,
    ReadOnlyError,
    RecordTooLargeError,
    ReservationLostError,
    ShmBufferError,
    SpaceError,
)
from shmbuffer.memory.directory.seat import Seat, unlinked
from shmbuffer.memory.format import ledger
from shmbuffer.memory.format.layout import BufferState
from shmbuffer.memory.format.ledger import RESERVATIONS
from shmbuffer.memory.format.priorities import largest_mass
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.identity import process_of, process_state


class TooOld(Exception):  # noqa: N818 - not an error: the other items are written
    """Raised by a write from a reservation if the policy versions of some items are too old."""


def require_linked(seat: Seat) -> None:
    """Raises BufferUnlinkedError if the directory was removed.

    The directory is checked once per second. Cost: 0.1 µs.
    """
    if seat.native is None:
        seat.require_linked()
    elif (status := seat.native.check_directory()) < 0:
        raise_for_status(seat, -status, "check_directory")


def raise_for_status(
    seat: Seat, status: int, what: str, priorities: object = None, index: object = None
) -> NoReturn:
    """Raises the error that belongs to a status of the C core.

    Args:
        seat: The seat whose native ring returned the status.
        status: The status code, as a positive number.
        what: Name of the operation for the message.
        priorities: Array of priorities that the call received, for the message.
        index: Array of indices that the call received, for the message.
    """
    where, native, mapped = seat.where, seat.native, seat.mapped
    assert mapped is not None
    schema = mapped.schema
    if status == _core.BAD_PRIORITY:
        if not (0 <= native.alpha < math.inf and 0 <= native.eps < math.inf):
            raise CorruptBufferError(
                f"{where}: {what}: alpha={native.alpha:g} and eps={native.eps:g} in shared memory "
                "are invalid, because another program wrote to the memory; close every handle, "
                "then recover the buffer",
                path=where,
            )
        at = native.bad_at
        value = f" {priorities[at]}" if isinstance(priorities, np.ndarray) else ""
        raise ValueError(
            f"{where}: priority{value} at position {at} is not a number from 0 to "
            f"{largest_mass(schema.elements):.0e} (also after ** alpha); nothing was changed"
        )
    if status == _core.BAD_INDEX:
        at = native.bad_at
        value = f" {index[at]}" if isinstance(index, np.ndarray) else ""
        raise IndexError(
            f"{where}: index{value} at position {at} is out of range for a buffer of "
            f"{schema.elements} elements; nothing was changed"
        )
    if status == _core.TOO_LARGE:
        needed, there = native.needed, schema.record_bytes
        raise RecordTooLargeError(
            f"{where}: {what} needs {needed} bytes, but the byte ring has only {there}; write "
            "fewer items at once, or create the buffer with a larger max_bytes. Nothing was "
            "changed",
            needed_bytes=needed,
            max_bytes=there,
        )
    if status == _core.NO_OWN_ROWS:
        sharing = schema.sharing
        nbytes = sum(leaf.nbytes for leaf in schema.leaves if leaf.path in sharing.paths)
        raise SpaceError(
            f"{where}: {what} needs {native.needed} own rows for next observations, but too few of "
            f"the {sharing.own_rows} own rows are free, because more items than expected are the "
            "newest of their stream, or differ from the observation that follows. Create the "
            "buffer with a larger share_next_room, or without share_next. Nothing was changed",
            needed_bytes=native.needed * nbytes,
        )
    if status == _core.BAD_BATCH:
        raise ValueError(
            f"{where}: record {native.bad_at} is not within the bytes of the batch; "
            "nothing was changed"
        )
    if status == _core.NO_RESERVATION:
        raise ReservationLostError(
            f"{where}: {what}: this reservation has ended; reserve again. Nothing was changed"
        )
    if status == _core.OVER_RESERVED:
        unit = "bytes" if native.why else "items"
        raise ValueError(
            f"{where}: {what} needs {native.bad_at:,} {unit}, but the reservation has only "
            f"{native.needed:,}; reserve more, or write fewer items. Nothing was changed"
        )
    if status == _core.ALL_RESERVED:
        raise ShmBufferError(
            f"{where}: {what}: all {RESERVATIONS:,} reservations are in use; commit or abort some. "
            "`shmbuffer inspect` shows which processes hold them",
            reservations=RESERVATIONS,
        )
    if status == _core.TOO_OLD:
        raise TooOld
    if status == _core.NOTHING:
        raise EmptyBufferError(f"{where}: Cannot sample from an empty storage; write to it first")
    if status == _core.IN_QUEUE:
        raise ShmBufferError(
            f"{where}: {what}: the buffer is a queue, so items can only be added at its end; "
            "remove max_times_sampled first. Nothing was changed"
        )
    if status == _core.CONSUMED:
        raise ShmBufferError(
            f"{where}: {what}: items cannot be overwritten by index, because consumers receive "
            "items in the order of the writes; remove the consumers first (shmbuffer consumers "
            "DIRECTORY --remove NAME). Nothing was changed"
        )
    if status == _core.CONSUMER_GONE:
        raise ConsumerError(
            f"{where}: {what}: the consumer was removed while this handle used it; to continue, "
            "create the consumer again with a new sampler. Nothing was changed"
        )
    if status == _core.NO_LEASE:
        raise ConsumerError(
            f"{where}: {what}: {ledger.LEASES} batches of this consumer are not acknowledged, "
            "which is the limit; call ack() after training on each batch. Nothing was changed"
        )
    if status == _core.OTHER_SETTINGS:
        raise ValueError(
            f"{where}: the priorities of this buffer use alpha={native.alpha:g} and "
            f"eps={native.eps:g}; use the same values, or change them with set_alpha"
        )
    if status == _core.LOCK_TIMEOUT:
        tid = seat.control.mutex_owner()
        pid, state = process_of(tid), process_state(tid)
        raise LockTimeout(
            f"{where}: {what} waited {LOCK_TIMEOUT_NS / 1e9:g} s for the buffer's mutex, which "
            f"thread {tid} of process {pid} ({state}) holds; continue or end that process",
            tid=tid,
            pid=pid,
            state=state,
        )
    if status == _core.LEFT:
        raise BufferClosedError(f"{where}: this handle was closed; attach again")
    if status == _core.UNLINKED:
        raise unlinked(where)
    if status == _core.CLOSED and seat.state() == BufferState.READ_ONLY:
        raise ReadOnlyError(
            f"{where}: {what}: this save is open for reading only, and nothing was written; to "
            "continue in it, pass on_existing='recover' to attach(), or load it into a new buffer "
            "with loads()",
            path=where,
        )
    if status == _core.CLOSED:
        raise BufferClosedError(
            f"{where}: the buffer is being removed, so nothing was written; create it again"
        )
    if status == _core.NO_TICKETS:
        raise BufferNeedsRestart(
            f"{where}: {what}: this buffer has used up its 2**62 tickets; copy its items to a new "
            "buffer"
        )
    if status == _core.REENTERED:
        raise ShmBufferError(
            f"{where}: {what}: a signal handler used the handle through which this thread was "
            "writing; let the handler set a flag, or attach a second handle for it"
        )
    if status == _core.BAD_ALPHA:
        raise ValueError(
            f"{where}: {what}: alpha and eps must be numbers of at least 0, and the sum of "
            "(priority + eps) ** alpha must be finite; nothing was changed"
        )
    if status == _core.FENCED:
        raise BufferNeedsRestart(
            f"{where}: another process considered this process dead and rolled its write back; "
            "attach again"
        )
    if status == _core.DAMAGED:
        at = native.bad_at
        slot = at if at < schema.capacity else None
        found = (
            "the head and tail of the byte ring are impossible"
            if slot is None
            else f"slot {slot} does not contain the expected item"
        )
        raise CorruptBufferError(
            f"{where}: {what}: {found}, because another program wrote to the shared memory; close "
            "every handle, then recover the buffer",
            path=where,
            slot=slot,
        )
    if status == _core.NO_MEMORY:
        raise MemoryError(
            f"{where}: {what} could not allocate memory; free some memory, and try again"
        )
    if status == _core.NO_CLAIM:
        raise ShmBufferError(f"{where}: {what}: no slot is claimed; call claim first")
    raise BufferNeedsRestart(
        f"{where}: {what}: the mutex of the buffer cannot be repaired; close every handle, then "
        "recover the buffer"
    )
