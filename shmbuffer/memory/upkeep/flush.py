"""Implements the durability barrier: syncs the files of a buffer to the disk in a fixed order.

    leaves ──▶ slots ──▶ ledger ──▶ superblock copy with the ticket ──▶ control file

Always true: a superblock contains a durable ticket only after all items with lower tickets were
synced. If one of these items is overwritten during the flush, its slot may be written to the disk
only in part. Its checksum detects this.

If the process dies before the end, the other superblock copy, with the previous barrier, is used.
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
    """Syncs all items to the disk, and moves the durability barrier; see `Engine.flush`."""
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
    """Syncs all files, then stores the ticket below which all items are on the disk.

    Args:
        seat: The seat of the handle. The caller holds init.lock.
        snapshot: The runtime page and the registry, as they were before the sync.
    """
    control, mapped = seat.control, seat.mapped
    assert mapped is not None
    runtime, entries = counters.split_snapshot(snapshot)
    # Items that are being written may reach the disk only in part, so the ticket stays below them.
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
            "may never reach this disk; copy the buffer to another disk"
        ) from error
