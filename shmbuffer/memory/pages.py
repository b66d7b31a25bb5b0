"""Prefaults the pages of a handle's buffer in a thread, if the user requested it."""

from __future__ import annotations

import os
import weakref

from shmbuffer._native import _core
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.system.prefault import OFF, Populating, Prefault


class Pages:
    """The prefault of a handle's pages. It does nothing in the child of a fork."""

    def __init__(self, prefault: Prefault) -> None:
        self._prefault = prefault
        self._populating: Populating | None = None
        self._owner_pid = os.getpid()

    @property
    def prefault(self) -> Prefault:
        """The prefault settings of the handle, or `OFF` in the child of a fork."""
        return self._prefault if self._owner_pid == os.getpid() else OFF

    def start(self, seat: Seat, *, wait: bool = False) -> None:
        """Starts the prefault if it was requested and the files of the buffer are mapped.

        Args:
            seat: The seat of the handle.
            wait: Whether the call waits until all pages are mapped, if the mode is "full".
        """
        if not self.prefault or seat.mapped is None:
            return
        if self._populating is None:
            self._populating = Populating(
                _bytes_to_prefault(seat, seat.mapped),
                in_memory=seat.backing.in_memory,
                reserved=seat.has_its_pages(),
                prefault=self._prefault,
                where=seat.where,
            )
            weakref.finalize(self, self._populating.stop)
            self._populating.start()
        if wait and self._prefault.waits:
            self._populating.wait()

    def stop(self) -> None:
        """Stops the prefault. Pages that are already allocated stay allocated."""
        if self._populating is not None and self._owner_pid == os.getpid():
            self._populating.stop()


def _bytes_to_prefault(seat: Seat, mapped: Mapped) -> list[tuple[_core.Map, int]]:
    """Returns each map with the number of its first bytes that are prefaulted.

    If space is allocated in steps, only slots with allocated space are prefaulted.
    """
    slots = int(seat.control.runtime["allocated"][0])
    if slots >= mapped.schema.capacity:
        return [(mapped_file, mapped_file.nbytes) for mapped_file in mapped.maps]
    sizes = mapped.slots.nbytes, *mapped.schema.bytes_of_slots(slots)
    return list(zip(mapped.maps, sizes, strict=True))
