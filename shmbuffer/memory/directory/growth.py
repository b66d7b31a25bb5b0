"""Allocates the space of slots in steps, before they are written.

    claim ──past `allocated`──▶ refused ──▶ growth lock ──▶ fallocate, file after file
      ▲                                                               │
      └────────────── claimed again ◀──────── `allocated`, last ◀─────┘

The field `allocated` of the runtime page is the number of slots whose space in the files is
allocated. No process stores into a later slot. If the disk is full, the write that needs more space
therefore raises an error, and no process is killed by SIGBUS. A refused claim has changed nothing.
Its writer holds neither the mutex nor a queue position while it allocates space.

Always true
  1. The space of all slots below `allocated` is allocated in every leaf file. `allocated` is
     increased after the space was allocated, under the growth lock (`Files.lock_growth`). It does
     not decrease until the schema is withdrawn.
  2. The whole slots file is allocated when the schema is defined, because words, sums and
     priorities of any slot are stored under the mutex.
  3. A process that withdraws the schema holds the growth lock. The value of `allocated` for the old
     schema is therefore never stored for a new one.
If a process dies here, the kernel frees its lock. Some files may have space beyond `allocated`. The
next growth allocates it again, which costs nothing. After a power cut, or in a copy, recovery
allocates the space of all slots below `allocated`, and of the slots in use, once more.
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
"""Bytes that one step allocates in all files together, which takes a few milliseconds on tmpfs."""

TIMEOUT_S = 60.0
"""Seconds that a write waits for another process that allocates space."""

log = logging.getLogger("shmbuffer.memory")


def grow(seat: Seat, needed: int, *, timeout: float | None = None) -> None:
    """Allocates the space of the first ``needed`` slots.

    If the disk has enough space, at least a whole step is allocated. Returns immediately if another
    process has already allocated the space, or is removing the buffer.

    Raises:
        SpaceError: The disk is full. The error contains the numbers of needed and free bytes.
            Nothing was changed.
        AttachTimeout: Another process has been allocating space for ``timeout`` seconds, by default
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
        return  # the caller repeats its claim, which then raises the error for the removal
    with lock:
        _core.reached("grow.locked")
        allocated = min(int(runtime["allocated"][0]), schema.capacity)
        if allocated >= needed:
            return
        used = SlotsFile(mapped.slots, schema, lambda: int(seat.native.head)).used
        ahead = min(schema.capacity, max(needed, allocated + slots_per_step(schema)))
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


def slots_per_step(schema: Schema) -> int:
    """Returns the number of slots whose space one step allocates; at least 1."""
    return max(1, STEP_BYTES // slot_bytes(schema))


def slot_bytes(schema: Schema) -> int:
    """Returns the size of a slot in all leaf files together, in bytes; at least 1.

    Leaves with own rows are not counted, because any slot may use any own row.
    """
    return max(1, sum(schema.bytes_of_slots(1)) - _own_row_bytes(schema))


def first_step(files: Files, schema: Schema) -> int:
    """Returns the number of slots whose space the first write allocates.

    Logs a warning if the disk has too little free space for all slots.
    """
    free, slots = files.directory.free_bytes(), schema.sections["bytes"]
    if (needed := slots + sum(schema.map_bytes)) > free:
        log.warning(
            "%s: all %d slots need %s, but only %s are free; writes raise SpaceError once the disk "
            "is full. Free some space, make the buffer smaller, or pass reserve='all' to allocate "
            "all space now",
            *(files.path, schema.capacity, human_size(needed), human_size(free)),
        )
    first = min(schema.capacity, slots_per_step(schema))
    return first if slots + sum(schema.bytes_of_slots(first)) <= free else 1


def slots_to_allocate(superblock: Superblock, allocated: int, used: int, capacity: int) -> int:
    """Returns the number of slots whose space is allocated when a buffer is opened again.

    Args:
        superblock: The superblock, whose flags define when space is allocated.
        allocated: The value of the runtime page, which may be older than the slots.
        used: The number of slots up to the last slot in use.
        capacity: The capacity of the ring in slots.
    """
    if superblock.flags & Flag.RESERVE:
        return capacity
    return max(min(allocated, capacity), used) if superblock.flags & Flag.STEPS else 0


def _own_row_bytes(schema: Schema) -> int:
    """Returns the size in bytes of all own rows, which the first write allocates completely."""
    return sum(
        nbytes
        for leaf, nbytes in zip(schema.leaves, schema.leaf_bytes, strict=True)
        if leaf.path in schema.sharing.paths
    )
