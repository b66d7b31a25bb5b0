"""The location of a storage's bytes, which is a directory or anonymous memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from shmbuffer.memory.mapped.recorded import read_storage_settings
from shmbuffer.memory.mapped.settings import Reserve, require_reserve
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import OnProgress, report_to


class Place(TypedDict, total=False):
    """Arguments of a storage that concern its directory; see `LazyMemmapStorage`."""

    scratch_dir: str | os.PathLike[str] | None
    shared_init: bool
    existsok: bool
    auto_cleanup: bool | None
    checksum: bool
    reserve: Reserve | None
    timeout: float
    prefault: str
    on_progress: OnProgress | None


class Location:
    """The location of a storage's bytes, from the arguments of the storage.

    Args:
        steps: if True, disk space is allocated in steps by default, unless several processes share
            the directory or pages are prefaulted.
        place: see `LazyMemmapStorage`. ``auto_cleanup=None`` removes only temporary directories.
    """

    def __init__(self, *, steps: bool = False, **place: Unpack[Place]) -> None:
        unknown = place.keys() - Place.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"the constructor of a storage got an unexpected keyword argument {min(unknown)!r}"
            )
        directory, cleanup = place.get("scratch_dir"), place.get("auto_cleanup")
        self.directory = None if directory is None else Path(directory).absolute()
        self.shared_init = bool(place.get("shared_init", False))
        self.existsok = bool(place.get("existsok", False))
        self.auto_cleanup = directory is None if cleanup is None else bool(cleanup)
        self.checksum = bool(place.get("checksum", True))
        self.timeout = place.get("timeout", 60.0)
        self.prefault = Prefault(place.get("prefault", "off"), place.get("on_progress"))
        self.reserve = self._reserve(place.get("reserve"), steps=steps)

    @classmethod
    def of_engine(cls, engine: Engine) -> Location:
        """Returns the location of an open buffer."""
        settings = engine.settings
        return cls(
            scratch_dir=engine.path,
            shared_init=True,
            auto_cleanup=False,
            checksum=settings.checksum,
            reserve=settings.reserve,
        )

    def _reserve(self, requested: Reserve | None, *, steps: bool) -> Reserve:
        """Returns the value of ``reserve``, or its default if ``requested`` is None.

        Raises ValueError if the value is unknown, or if it cannot be combined with ``prefault``.
        """
        if requested is None:
            return "steps" if steps and not (self.shared_init or self.prefault) else "all"
        require_reserve(requested)
        if requested == "steps" and self.prefault:
            raise ValueError(
                f"prefault={self.prefault.mode!r} allocates the pages of all items, but "
                "reserve='steps' allocates space only when it is needed; pass reserve='all', or "
                "leave prefault out"
            )
        return requested

    @property
    def is_directory(self) -> bool:
        """True if the bytes are in a directory, or will be after the first write."""
        return self.directory is not None or self.shared_init

    @property
    def opens_at_once(self) -> bool:
        """True if the constructor opens the buffer, not the first write."""
        return self.shared_init or (self.existsok and self.directory is not None)

    def open(self, settings: Settings, *, existsok: bool = False) -> Engine:
        """Opens or creates the buffer at this location.

        ``existsok`` overrides the storage's own argument if it is True.
        """
        if not self.is_directory:
            settings = replace(settings, checksum=False, reserve=False)
            return Engine.anonymous(settings, prefault=self.prefault)
        existing: Literal["attach", "error", "adopt"] = "error"
        if existsok or self.existsok:
            existing = "attach" if settings.record_bytes else "adopt"
        with report_to(self.prefault.on_progress):
            engine = Engine.open(
                temporary_directory() if self.directory is None else self.directory,
                replace(settings, checksum=self.checksum, reserve=self.reserve),
                existing="attach" if self.shared_init else existing,
                timeout=self.timeout,
                temporary=self.directory is None and self.auto_cleanup,
                auto_cleanup=self.auto_cleanup,
                prefault=self.prefault,
            )
        try:
            check_recorded(engine.settings, settings, str(engine.path))
        except BaseException:
            engine.close()
            raise
        return engine


def check_recorded(recorded: Settings, requested: Settings, where: str) -> None:
    """Raises SchemaMismatchError if an existing buffer cannot be used with the requested settings.

    ``where`` is the name of the buffer in messages.
    """
    kinds = _kind_of(recorded, where), _kind_of(requested, where)
    if kinds[0] != kinds[1]:
        raise SchemaMismatchError(
            f"{where}: the buffer in this directory contains {kinds[0]}, not {kinds[1]}; use "
            "attach(), which chooses the right storage, or use another directory",
            expected=kinds[0],
            found=kinds[1],
        )
    wanted, found = (one.extra.get("share_next") for one in (requested, recorded))
    if wanted is not None and wanted != found:
        creation = "without share_next" if found is None else f"with share_next={found}"
        raise SchemaMismatchError(
            f"{where}: the buffer in this directory was created {creation}, but this storage was "
            f"created with share_next={wanted}; use the same value, or another directory",
            expected=found,
            found=wanted,
        )
    names = ("max_size", "ndim", "max_bytes")
    sizes = [
        (one.capacity, one.ndim, one.record_bytes) if one.record_bytes else (one.capacity, one.ndim)
        for one in (recorded, requested)
    ]
    if sizes[0] != sizes[1]:
        found, wanted = (
            [f"{name} {size}" for name, size in zip(names, values, strict=False)]
            for values in sizes
        )
        raise SchemaMismatchError(
            f"{where}: the buffer in this directory has {_listed(found)}, but this storage was "
            f"created with {_listed(wanted)}; use the same values, or another directory",
            expected=sizes[0],
            found=sizes[1],
        )


def _kind_of(settings: Settings, where: str) -> str:
    if not settings.record_bytes:
        return "rows, as in a LazyMemmapStorage"
    return (
        f"records, as in a {read_storage_settings(settings, where).get('kind', 'LazyStackStorage')}"
    )


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def remove_new_buffer(engine: Engine) -> bool:
    """Removes a buffer that this process has just created.

    Returns False if another client has created it or uses it.
    """
    if engine.seat.incarnation != 1 or not engine.seat.is_alone():
        return False
    engine.cleanup()
    engine.close()
    return True
