"""Creates the files that the first write needs, and removes them again for an empty buffer.

    NO_SCHEMA ──build (the first write)──▶ READY ──withdraw (empty, alone)──▶ NO_SCHEMA

Both operations run under init.lock. Both store the new state first in the superblock and last in
the runtime page. A process may die between these two stores. The next process that takes init.lock
then decides by the superblock:

    superblock NO_SCHEMA    the definition is unfinished or withdrawn: the files listed in made.json
                            are removed, and the next definition starts again
    superblock READY        every file is complete and on the disk: the files are loaded, and the
                            runtime page becomes READY too

Files are therefore removed only while both copies of the superblock have the state NO_SCHEMA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shmbuffer._native import _core
from shmbuffer.errors import DurabilityError
from shmbuffer.memory.directory import growth
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.settings import Settings
from shmbuffer.memory.system.prefault import Prefault

# Fields of the superblock that describe a definition.
_FIELDS = ("capacity", "lanes", "leaves", "schema_sha256", "slots_bytes", "salt")


def build(seat: Seat, schema: Schema, *, adopting: bool, prefault: Prefault) -> None:
    """Creates the files of the slots and leaves, and sets the state READY.

    The caller holds init.lock, and the runtime page has the state NO_SCHEMA. If the superblock is
    already READY, another process died after it had created the files. These files are then loaded.
    If the superblock is CLOSING, a process died while it removed the buffer, and this function does
    nothing.
    """
    superblock = seat.control.superblock()
    if superblock.state == BufferState.NO_SCHEMA:
        _publish(seat, *_build(seat, superblock, schema, adopting=adopting, prefault=prefault))
    elif superblock.state == BufferState.READY:
        _publish(seat, superblock, seat.backing.load(superblock))


def _build(
    seat: Seat, superblock: Superblock, schema: Schema, *, adopting: bool, prefault: Prefault
) -> tuple[Superblock, Mapped]:
    """Creates all files of the schema.

    Returns:
        The superblock with the schema, which is not written yet, and the maps of the files.
    """
    control, backing = seat.control, seat.backing
    settings = Settings.recorded(superblock.settings, seat.where)
    if prefault and not seat.has_its_pages() and not superblock.flags & Flag.STEPS:
        prefault.require_memory(schema.sections["bytes"] + sum(schema.map_bytes), seat.where)
    slots = schema.capacity if superblock.flags & Flag.RESERVE else 0
    if superblock.flags & Flag.STEPS and isinstance(backing, Files):
        slots = growth.first_step(backing, schema)
    mapped = backing.build(schema, slots=slots, adopt=adopting)
    runtime = control.runtime
    runtime["allocated"] = slots if superblock.flags & Flag.STEPS else schema.capacity
    _core.reached("define.allocated")
    # After the buffer was emptied, the head is at the start of a pass, and the capacity may differ.
    runtime["head"] += -int(runtime["head"][0]) % schema.capacity
    _core.reached("define.head")
    if settings.alpha is not None and not runtime["prioritized"][0]:
        fields = (("alpha", settings.alpha), ("eps", settings.eps), ("prioritized", 1))
        for name, value in fields:
            runtime[name] = value
            _core.reached("define.settings")
    return superblock.with_schema(schema, mapped.slots.nbytes), mapped


def _publish(seat: Seat, ready: Superblock, mapped: Mapped) -> None:
    """Sets the state READY in both copies of the superblock, then in the runtime page."""
    control = seat.control
    try:
        # Both copies are written, because a process that died may have written only one. If that
        # copy were lost, the other copy would have no schema, and recovery would remove all items.
        control.write(control.write(ready))
        control.sync()
    except DurabilityError as error:
        control.withdraw(_without_schema(ready))
        seat.backing.discard_unfinished()
        raise DurabilityError(
            f"{error}; the buffer still has no schema: write again, or choose another disk"
        ) from error
    _core.reached("define.superblock")
    seat.mapped = mapped
    control.runtime["state"] = BufferState.READY  # SYNC define, release
    _core.reached("define.ready")


def withdraw(seat: Seat) -> tuple[Seat, Callable[[], None]]:
    """Withdraws the schema of an empty buffer, so that the next write can define another one.

    Returns:
        The seat that replaces ``seat``, and a function that removes the files of the old schema.
    """
    control = seat.control
    discard = seat.backing.prepare_discard()  # first, because it can fail
    known = control.superblock()
    try:
        control.write(control.write(_without_schema(known)))
        control.sync()
    except DurabilityError:
        control.withdraw(known)
        raise
    _core.reached("undefine.superblock")
    control.runtime["state"] = BufferState.NO_SCHEMA
    _core.reached("undefine.state")
    return seat.unmapped(), discard


def _without_schema(superblock: Superblock) -> Superblock:
    """Returns a copy of a superblock with the state NO_SCHEMA and without a schema."""
    defaults = {name: getattr(Superblock(), name) for name in _FIELDS}
    return replace(superblock, state=BufferState.NO_SCHEMA, **defaults)
