"""Definition: builds what the first write needs, and withdraws it again.

    NO_SCHEMA ──build (the first write)──▶ READY ──withdraw (empty, alone)──▶ NO_SCHEMA

Both run under init.lock, and both store the new state in the superblock first and in the runtime
page last. A process may die between the two, so the superblock decides for the next process that
takes init.lock:

    superblock NO_SCHEMA    the definition is unfinished or withdrawn: its files are removed by
                            list, and the next definition starts again
    superblock READY        every file is complete and on the disk: the files are loaded, and the
                            runtime page says READY too

So files are removed only while the superblock says NO_SCHEMA, in both copies.
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

#: Fields of the superblock that say what is built.
_FIELDS = ("capacity", "lanes", "leaves", "schema_sha256", "slots_bytes", "salt")


def build(seat: Seat, schema: Schema, *, adopting: bool, prefault: Prefault) -> None:
    """Builds slots and leaves, and says READY; under init.lock, while the runtime says NO_SCHEMA.

    Publishes the definition of a dead process instead if the superblock says READY. Does nothing
    if a process died while it removed the buffer: the superblock says CLOSING.
    """
    superblock = seat.control.superblock()
    if superblock.state == BufferState.NO_SCHEMA:
        _publish(seat, *_built(seat, superblock, schema, adopting=adopting, prefault=prefault))
    elif superblock.state == BufferState.READY:
        _publish(seat, superblock, seat.ground.load(superblock))


def _built(
    seat: Seat, superblock: Superblock, schema: Schema, *, adopting: bool, prefault: Prefault
) -> tuple[Superblock, Mapped]:
    """Builds every file; returns the superblock that names them, and the maps."""
    control, ground = seat.control, seat.ground
    settings = Settings.recorded(superblock.settings, seat.where)
    if prefault and not seat.has_its_pages() and not superblock.flags & Flag.STEPS:
        prefault.require_memory(schema.sections["bytes"] + sum(schema.map_bytes), seat.where)
    slots = schema.capacity if superblock.flags & Flag.RESERVE else 0
    if superblock.flags & Flag.STEPS and isinstance(ground, Files):
        slots = growth.first_step(ground, schema)
    mapped = ground.build(schema, slots=slots, adopt=adopting)
    runtime = control.runtime
    runtime["allocated"] = slots if superblock.flags & Flag.STEPS else schema.capacity
    _core.reached("define.allocated")
    # Behind an emptying the head is at the beginning of a lap, which may be longer now.
    runtime["head"] += -int(runtime["head"][0]) % schema.capacity
    _core.reached("define.head")
    if settings.alpha is not None and not runtime["prioritized"][0]:
        given = (("alpha", settings.alpha), ("eps", settings.eps), ("prioritized", 1))
        for name, value in given:
            runtime[name] = value
            _core.reached("define.settings")
    return superblock.defined(schema, mapped.slots.nbytes), mapped


def _publish(seat: Seat, ready: Superblock, mapped: Mapped) -> None:
    """Says READY in both copies of the superblock, then in the runtime page."""
    control = seat.control
    try:
        # Both copies: were one lost, an older one would say that there is no schema, and
        # recovery would remove all that was written. A dead process may have stored only one.
        control.write(control.write(ready))
        control.sync()
    except DurabilityError as error:
        control.withdraw(_withdrawn(ready))
        seat.ground.discard_unfinished()
        raise DurabilityError(
            f"{error}; the buffer still has no schema: write again, or choose another disk"
        ) from error
    _core.reached("define.superblock")
    seat.mapped = mapped
    control.runtime["state"] = BufferState.READY  # SYNC define, release
    _core.reached("define.ready")


def withdraw(seat: Seat) -> tuple[Seat, Callable[[], None]]:
    """Undoes the definition of an empty buffer, under init.lock; returns seat and file removal."""
    control = seat.control
    discard = seat.ground.discarding()  # what can fail, first
    known = control.superblock()
    try:
        control.write(control.write(_withdrawn(known)))
        control.sync()
    except DurabilityError:
        control.withdraw(known)
        raise
    _core.reached("undefine.superblock")
    control.runtime["state"] = BufferState.NO_SCHEMA
    _core.reached("undefine.state")
    return seat.unmapped(), discard


def _withdrawn(superblock: Superblock) -> Superblock:
    """The superblock without a schema."""
    nothing = {name: getattr(Superblock(), name) for name in _FIELDS}
    return replace(superblock, state=BufferState.NO_SCHEMA, **nothing)
