"""Definition: what the first write needs is built, and withdrawn again where nothing needs it.

    NO_SCHEMA ──build (the first write)──▶ READY ──withdraw (empty, alone)──▶ NO_SCHEMA

Both under init.lock. If a process dies while building, the state is NO_SCHEMA still: the next
one to take init.lock removes what is unfinished and starts again. If it dies while withdrawing, the
superblock says NO_SCHEMA before the first file goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shmbuffer._native import _core
from shmbuffer.errors import DurabilityError
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format.control import Superblock
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.format.settings import Settings
from shmbuffer.memory.system.prefault import Prefault

#: Fields of the superblock that say what is built.
_FIELDS = ("capacity", "lanes", "leaves", "schema_sha256", "slots_bytes", "salt")


def build(seat: Seat, schema: Schema, *, adopting: bool, prefault: Prefault) -> None:
    """Builds slots and leaves, and says READY; under init.lock, in state NO_SCHEMA."""
    control, ground = seat.control, seat.ground
    superblock = control.superblock()
    settings = Settings.recorded(superblock.settings, seat.where)
    if prefault and not seat.has_its_pages():
        prefault.require_memory(schema.sections["bytes"] + sum(schema.map_bytes), seat.where)
    reserve = bool(superblock.flags & Flag.RESERVE)
    mapped = ground.build(schema, reserve=reserve, adopt=adopting)
    runtime = control.runtime
    # Behind an emptying the head is at the beginning of a lap, which may be longer now.
    runtime["head"] += -int(runtime["head"][0]) % schema.capacity
    _core.reached("define.head")
    if settings.alpha is not None and not runtime["prioritized"][0]:
        given = (("alpha", settings.alpha), ("eps", settings.eps), ("prioritized", 1))
        for name, value in given:
            runtime[name] = value
            _core.reached("define.settings")
    ready = replace(
        superblock,
        state=BufferState.READY,
        capacity=schema.capacity,
        lanes=schema.width,
        leaves=len(schema.leaves),
        schema_sha256=schema.digest,
        slots_bytes=mapped.slots.nbytes,
        salt=_core.crc32c(schema.digest),
    )
    try:
        # Both copies: were one lost, an older one would say that there is no schema, and
        # recovery would remove all that was written.
        control.write(control.write(ready))
        control.sync()
    except DurabilityError as error:
        control.withdraw(superblock)
        ground.discard_unfinished()
        raise DurabilityError(
            f"{error}; so the buffer has no schema still: write again, or choose another disk"
        ) from error
    _core.reached("define.superblock")
    seat.mapped = mapped
    runtime["state"] = BufferState.READY  # SYNC define, release
    _core.reached("define.ready")


def withdraw(seat: Seat) -> tuple[Seat, Callable[[], None]]:
    """Undoes the definition of an empty buffer, under init.lock; returns seat and file removal."""
    control = seat.control
    discard = seat.ground.discarding()  # what can fail, first
    known = control.superblock()
    nothing = {name: getattr(Superblock(), name) for name in _FIELDS}
    try:
        unknown = control.write(replace(known, state=BufferState.NO_SCHEMA, **nothing))
        control.write(unknown)
        control.sync()
    except DurabilityError:
        control.withdraw(known)
        raise
    _core.reached("undefine.superblock")
    control.runtime["state"] = BufferState.NO_SCHEMA
    _core.reached("undefine.state")
    return seat.unmapped(), discard
