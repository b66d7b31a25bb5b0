"""Allocates the space of slots in steps, before they are written.

    claim ──past `allocated`──▶ refused ──▶ growth lock ──▶ fallocate, file after file
      ▲                                                               │
      └────────────── claimed again ◀──────── `allocated`, last ◀─────┘

`allocated`, in the runtime page, is the number of slots that have their space in the files. No
process stores into a later slot. A full disk is therefore an error of the write that needs more
space, and never a SIGBUS. A refused claim has changed nothing. Its writer holds neither the mutex
nor a place in the queue while it allocates space.

Always true
  1. All slots below `allocated` have their space in every leaf file. It is raised after the space
     was allocated, under the growth lock (`Files.lock_growth`), and only grows while the schema
     stays.
  2. The slots file has all of its space from the definition on, because words, sums and priorities
     of any slot are stored under the mutex.
  3. A process that withdraws the schema holds the growth lock, so an `allocated` of the old schema
     is never stored for a new one.
If a process dies here: the kernel frees its lock. Some files may have space beyond `allocated`. The
next growth allocates it again, which costs nothing. After a power cut, or in a copy, recovery
allocates the space of all slots below `allocated`, and of those in use, once more.
"""

from __future__ import annotations

import logging

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError, SpaceError
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Superblock
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.system.filesystem import human_size

STEP_BYTES = 32 * 2**20
"""The bytes of a step, over all files; allocating them takes some milliseconds on tmpfs."""

TIMEOUT_S = 60.0
"""Maximum time that a write waits for another process that allocates space."""

log = logging.getLogger("shmbuffer.memory")


def grow(seat: Seat, needed: int, *, timeout: float | None = None) -> None:
    """Allocates the space of the first ``needed`` slots, and of a step ahead if possible.

    Returns at once if another process has allocated it, or is removing the buffer.

    Raises:
        SpaceError: The disk is full; the error has the needed and free bytes. Nothing was changed.
        AttachTimeout: Another process allocates space for longer than ``timeout``, by default
            `TIMEOUT_S`.
        BufferUnlinkedError: The files were removed or replaced.
    """
    files, mapped, runtime = seat.backing, seat.mapped, seat.control.runtime
    assert mapped is not None
    schema = mapped.schema
    if not isinstance(files, Files):  # anonymous memory has no space to allocate
        runtime["allocated"] = schema.capacity
        _core.reached("grow.raised")
        return
    try:
        lock = files.lock_growth(TIMEOUT_S if timeout is None else timeout)
    except BufferNotFoundError:
        seat.require_linked()
        if seat.state() == BufferState.READY:
            raise
        return  # the claim is repeated, and reports the removal
    with lock:
        _core.reached("grow.locked")
        allocated = min(int(runtime["allocated"][0]), schema.capacity)
        if allocated >= needed:
            return
        used = SlotsFile(mapped.slots, schema, lambda: int(seat.native.head)).used
        ahead = min(schema.capacity, max(needed, allocated + step(schema)))
        try:
            files.grow(schema, allocated, ahead, used)
        except SpaceError:
            if ahead == needed:
                raise
            ahead = needed
            files.grow(schema, allocated, ahead, used)
        runtime["allocated"] = ahead  # SYNC allocate, release
        _core.reached("grow.raised")
        seat.control.touch()


def step(schema: Schema) -> int:
    """Returns the number of slots of a step, at least one."""
    return max(1, STEP_BYTES // slot_bytes(schema))


def slot_bytes(schema: Schema) -> int:
    """Returns the bytes that a slot takes in all files, without own rows; at least one."""
    return max(1, sum(schema.bytes_of_slots(1)) - _own_row_bytes(schema))


def first_step(files: Files, schema: Schema) -> int:
    """Returns how many slots the definition allocates; warns if the disk is too small for all."""
    free, slots = files.directory.free_bytes(), schema.sections["bytes"]
    if (needed := slots + sum(schema.map_bytes)) > free:
        log.warning(
            "%s: all %d slots need %s, but only %s are free; writes raise SpaceError once the disk "
            "is full. Free some space, make the buffer smaller, or pass reserve='all' to allocate "
            "all space now",
            *(files.path, schema.capacity, human_size(needed), human_size(free)),
        )
    first = min(schema.capacity, step(schema))
    return first if slots + sum(schema.bytes_of_slots(first)) <= free else 1


def slots_to_allocate(superblock: Superblock, allocated: int, used: int, capacity: int) -> int:
    """Returns how many slots must have their space when a buffer is opened again.

    Args:
        superblock: The superblock, whose flags define when space is allocated.
        allocated: The value of the runtime page, which may be older than the slots.
        used: The end of the slots in use.
        capacity: The number of all slots.
    """
    if superblock.flags & Flag.RESERVE:
        return capacity
    return max(min(allocated, capacity), used) if superblock.flags & Flag.STEPS else 0


def _own_row_bytes(schema: Schema) -> int:
    """Returns the bytes of the own rows of next observations, which are not part of a step."""
    return sum(
        nbytes
        for leaf, nbytes in zip(schema.leaves, schema.leaf_bytes, strict=True)
        if leaf.path in schema.sharing.paths
    )
