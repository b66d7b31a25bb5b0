"""The durability barrier: what has to be on the disk, and in which order.

    leaves ──▶ slots ──▶ superblock copy with the ticket ──▶ control file

Always true: a superblock names a durable ticket only after everything below it was synced. What is
written over a covered item meanwhile may reach the disk in part: its checksum tells.
If the process dies on the way: the older superblock copy counts, with the barrier before.
"""

from __future__ import annotations

from dataclasses import replace

from shmbuffer._native import _core
from shmbuffer.errors import DurabilityError
from shmbuffer.memory.control import Control
from shmbuffer.memory.native import Mapped


def raise_barrier(control: Control, mapped: Mapped, *, ticket: int, where: str) -> None:
    """Syncs all files; under init.lock. Tickets below ``ticket`` are covered then.

    Raises:
        DurabilityError: a sync failed. It is not tried again: the kernel may have dropped the
            pages, and a second success would prove nothing (fsync(2), EIO).
    """
    _core.reached("flush.locked")
    try:
        for leaf in mapped.leaves:
            leaf.sync()
            _core.reached("flush.leaf")
        mapped.slots.sync()
        _core.reached("flush.slots")
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
            f"{where}: a sync failed ({error.strerror}); what is in memory is usable, but may "
            "never reach this disk: copy the buffer to another one"
        ) from error
