"""The durability barrier: the files that must be on the disk, and the order of syncing them.

    leaves ──▶ slots ──▶ ledger ──▶ superblock copy with the ticket ──▶ control file

Always true: a superblock has a durable ticket only after everything below it was synced. If a
covered item is overwritten meanwhile, its slot may reach the disk in part, which its checksum
reveals.
If the process dies before the end: the older superblock copy is used, with the previous barrier.
"""

from __future__ import annotations

from dataclasses import replace

from shmbuffer._native import _core
from shmbuffer.errors import DurabilityError
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format.layout import Phase
from shmbuffer.memory.ring import counters
from shmbuffer.memory.ring.ring import Ring


def flush(seat: Seat, ring: Ring, timeout: float) -> None:
    """Raises the barrier; see `Engine.flush`."""
    if not seat.is_ours():
        seat.rejoin(timeout=timeout)
    with seat.backing.lock(timeout):
        seat.require_there()
        if seat.not_durable is not None:
            raise DurabilityError(seat.not_durable)
        try:
            _raise(seat, ring.snapshot())
        except DurabilityError as error:
            seat.not_durable = str(error)
            raise


def _raise(seat: Seat, snapshot: bytes) -> None:
    """Syncs all files, which then cover the items of the snapshot; under init.lock."""
    control, mapped = seat.control, seat.mapped
    assert mapped is not None
    runtime, entries = counters.split_snapshot(snapshot)
    # Items that are being written now may reach the disk in part.
    claims = entries["first"][entries["phase"] == Phase.PAYLOAD]
    ticket = min([int(runtime["head"]), *map(int, claims)])
    _core.reached("flush.locked")
    try:
        for leaf in mapped.leaves:
            leaf.sync()
            _core.reached("flush.leaf")
        mapped.slots.sync()
        _core.reached("flush.slots")
        mapped.ledger.sync()
        _core.reached("flush.ledger")
        superblock = control.superblock()
        control.write(replace(superblock, durable_ticket=ticket, durable_epoch=superblock.epoch))
        _core.reached("flush.superblock")
        control.touch()
        control.sync()
        _core.reached("flush.synced")
    except DurabilityError:
        raise
    except OSError as error:
        raise DurabilityError(
            f"{seat.where}: a sync failed ({error.strerror}); the data in memory are usable, but "
            "may never reach this disk, so copy the buffer to another disk"
        ) from error
