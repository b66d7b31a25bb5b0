"""Growth: space is taken in steps, ahead of the slots that are written.

    claim ──past `allocated`──▶ refused ──▶ growth lock ──▶ fallocate, file after file
      ▲                                                               │
      └────────────── asked again ◀────────── `allocated`, last ◀─────┘

`allocated`, in the runtime page, is the number of slots that have their space in the files. No
process stores into a later slot, so a full disk is an error of the write that needs more, and never
a SIGBUS. A refused claim has changed nothing. Its writer holds neither the mutex nor a turn while
it takes space.

Always true
  1. All slots below `allocated` have their space in every leaf file. It is raised after the space
     was taken, under the growth lock (`Files.lock_growth`), and only grows while the schema stays.
  2. The slots file has all of its space from the definition on: words, sums and priorities of any
     slot are stored under the mutex.
  3. A process that withdraws the schema holds the growth lock, so that no `allocated` of the schema
     before is stored for the next one.
If a process dies here: the kernel gives up its lock. Some files may have space that `allocated`
does not name; the next growth takes it again, which costs nothing. After a power cut, or in a copy,
recovery takes the space of all slots below `allocated`, and of those in use, once more.
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
"""Bytes of a step, over all files: on tmpfs some milliseconds."""

TIMEOUT_S = 60.0
"""How long a write waits for another process that takes space."""

log = logging.getLogger("shmbuffer.memory")


def grow(seat: Seat, needed: int, *, timeout: float | None = None) -> None:
    """Takes the space of the first ``needed`` slots, and of a step ahead if there is enough.

    Returns at once if another process has taken it, or is removing the buffer.

    Raises:
        SpaceError: bytes needed and free; nothing was changed.
        AttachTimeout: a living process takes space for longer than ``timeout``, by default
            `TIMEOUT_S`.
        BufferUnlinkedError: the files were removed or replaced.
    """
    files, mapped, runtime = seat.ground, seat.mapped, seat.control.runtime
    assert mapped is not None
    schema = mapped.schema
    if not isinstance(files, Files):  # memory without a name has no space to take
        runtime["allocated"] = schema.capacity
        _core.reached("grow.raised")
        return
    try:
        lock = files.lock_growth(TIMEOUT_S if timeout is None else timeout)
    except BufferNotFoundError:
        seat.require_linked()
        if seat.state() == BufferState.READY:
            raise
        return  # the claim is asked again, and says so
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
    """The slots of a step; at least one."""
    return max(1, STEP_BYTES // max(1, sum(schema.bytes_of_slots(1)) - _whole(schema)))


def first_step(files: Files, schema: Schema) -> int:
    """The slots whose space the definition takes; warns if there is too little for all of them."""
    free, slots = files.directory.free_bytes(), schema.sections["bytes"]
    if (whole := slots + sum(schema.map_bytes)) > free:
        log.warning(
            "%s: all %d slots need %s, and %s are free; writes raise SpaceError once the disk is "
            "full. Make room, make the buffer smaller, or pass reserve='all' to take all space now",
            *(files.path, schema.capacity, human_size(whole), human_size(free)),
        )
    first = min(schema.capacity, step(schema))
    return first if slots + sum(schema.bytes_of_slots(first)) <= free else 1


def slots_to_allocate(superblock: Superblock, allocated: int, used: int, capacity: int) -> int:
    """The slots whose space a buffer has to have, when it is opened again.

    Args:
        superblock: its flags say when space is taken.
        allocated: as the runtime page says, which may be older than the slots.
        used: the end of the slots in use.
        capacity: all slots.
    """
    if superblock.flags & Flag.RESERVE:
        return capacity
    return max(min(allocated, capacity), used) if superblock.flags & Flag.STEPS else 0


def _whole(schema: Schema) -> int:
    """The bytes of rows for whole next observations, which are no part of a step."""
    return sum(
        nbytes
        for leaf, nbytes in zip(schema.leaves, schema.leaf_bytes, strict=True)
        if leaf.path in schema.sharing.paths
    )
