"""Where a storage has its bytes: in a directory, or in memory without a name.

neither scratch_dir nor shared_init   anonymous memory
shared_init                           a directory, temporary without scratch_dir: created,
                                      attached to or recovered, whatever is right; opened at once
scratch_dir                           made by the first write; a buffer that is there is an error
scratch_dir, existsok                 the same, and a buffer that is there is opened at once
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.cleanup import temporary_directory
from shmbuffer.memory.prefault import OFF, Prefault
from shmbuffer.memory.progress import OnProgress, hearing
from shmbuffer.memory.recorded import of_storage


@dataclass(frozen=True)
class Location:
    """The arguments of a storage that concern its directory.

    Attributes:
        scratch_dir: absolute; None: a temporary directory, or anonymous memory.
        shared_init: see the table of the module.
        existsok: see there.
        auto_cleanup: the files go with the process that made them.
        checksum: keep a CRC32C of every item.
        reserve: take all space when the files are made.
        timeout: seconds to wait for another process that creates or recovers the directory.
        prefault: what to do about the pages, and who hears how far long work is.
    """

    scratch_dir: Path | None = None
    shared_init: bool = False
    existsok: bool = False
    auto_cleanup: bool = True
    checksum: bool = True
    reserve: bool = True
    timeout: float = 60.0
    prefault: Prefault = OFF

    @classmethod
    def of(
        cls,
        scratch_dir: str | os.PathLike[str] | None,
        *,
        shared_init: bool,
        existsok: bool,
        auto_cleanup: bool | None,
        checksum: bool,
        reserve: bool,
        timeout: float,
        prefault: str,
        on_progress: OnProgress | None,
    ) -> Location:
        """From the arguments of a storage; ``auto_cleanup`` None is only a temporary directory."""
        return cls(
            None if scratch_dir is None else Path(scratch_dir).absolute(),
            bool(shared_init),
            bool(existsok),
            scratch_dir is None if auto_cleanup is None else bool(auto_cleanup),
            bool(checksum),
            bool(reserve),
            timeout,
            Prefault(prefault, on_progress),
        )

    @classmethod
    def of_engine(cls, engine: Engine) -> Location:
        """Of a buffer that is open already."""
        settings = engine.settings
        return cls(
            engine.path,
            shared_init=True,
            auto_cleanup=False,
            checksum=settings.checksum,
            reserve=settings.reserve,
        )

    @property
    def is_directory(self) -> bool:
        """Whether it is one, or will be."""
        return self.scratch_dir is not None or self.shared_init

    @property
    def opens_at_once(self) -> bool:
        """Whether the constructor opens it.

        A directory that must not hold a buffer waits for the first write, as in TorchRL; of any
        other, what is in it is to be seen, and a temporary one needs its name.
        """
        return self.shared_init or (self.existsok and self.scratch_dir is not None)

    @property
    def taken_as_it_is(self) -> Location:
        """The same place, where a buffer that is there is opened."""
        return replace(self, existsok=True)

    def open(self, settings: Settings) -> Engine:
        """Open it.

        Args:
            settings: of a buffer that is created; one that is there has to agree.

        Raises:
            SchemaMismatchError: the buffer there has another size.
            BufferExistsError, AttachTimeout, ...: see `Engine.open`.
        """
        if not self.is_directory:
            settings = replace(settings, checksum=False, reserve=False)
            return Engine.anonymous(settings, prefault=self.prefault)
        existing: Literal["attach", "error", "adopt"] = "error"
        if self.existsok:
            existing = "attach" if settings.record_bytes else "adopt"
        with hearing(self.prefault.on_progress):
            engine = Engine.open(
                temporary_directory() if self.scratch_dir is None else self.scratch_dir,
                replace(settings, checksum=self.checksum, reserve=self.reserve),
                existing="attach" if self.shared_init else existing,
                timeout=self.timeout,
                temporary=self.scratch_dir is None and self.auto_cleanup,
                auto_cleanup=self.auto_cleanup,
                prefault=self.prefault,
            )
        try:
            check_recorded(engine.settings, settings, str(engine.path))
        except BaseException:
            engine.close()
            raise
        return engine


def check_recorded(recorded: Settings, asked: Settings, where: str) -> None:
    """SchemaMismatchError where a buffer is there that is another one than was asked for."""
    kinds = _kind_of(recorded, where), _kind_of(asked, where)
    if kinds[0] != kinds[1]:
        raise SchemaMismatchError(
            f"{where}: the buffer there is one of {kinds[0]}, and not of {kinds[1]}; attach() "
            "finds the right storage, or use another directory",
            expected=kinds[0],
            found=kinds[1],
        )
    names = ("max_size", "ndim", "max_bytes")
    sizes = [
        (one.capacity, one.ndim, one.record_bytes) if one.record_bytes else (one.capacity, one.ndim)
        for one in (recorded, asked)
    ]
    if sizes[0] != sizes[1]:
        found, wanted = (
            [f"{name} {size}" for name, size in zip(names, some, strict=False)] for some in sizes
        )
        raise SchemaMismatchError(
            f"{where}: the buffer there has {_listed(found)}, asked for were {_listed(wanted)}; "
            "ask for the same, or use another directory",
            expected=sizes[0],
            found=sizes[1],
        )


def _kind_of(settings: Settings, where: str) -> str:
    """What a buffer is made of, in words."""
    if not settings.record_bytes:
        return "rows, as in a LazyMemmapStorage"
    return f"records, as in a {of_storage(settings, where).get('kind', 'LazyStackStorage')}"


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def unmade(engine: Engine) -> bool:
    """Remove a buffer that was made just now and has nothing in it, if nobody else has joined.

    Returns:
        Whether that was so; the engine is closed then.
    """
    if not engine.is_first_and_alone:
        return False
    engine.cleanup()
    engine.close()
    return True
