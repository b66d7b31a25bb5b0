"""The storage in files: what was committed is there after a kill, and anybody may open it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.sharing import Asked
from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.storages.location import Location


class LazyMemmapStorage(LazyTensorStorage):
    """A storage in memory-mapped files.

    The first process that writes says what an item is and makes the files.

    In a directory everything is in the files: items, their order, the cursor, priorities. Processes
    come and go, related or not; when all of them were killed, the next one to open the directory
    recovers it and carries on. The files are tensordict's memmap layout, so
    ``TensorDict.load_memmap(scratch_dir)`` reads them at any time.

    Where the bytes are, and what a buffer that is there already means:

    - neither ``scratch_dir`` nor ``shared_init``: anonymous memory of this process, and of those
      that it is passed to.
    - ``shared_init=True``: a directory, without ``scratch_dir`` a temporary one. The buffer is
      created, attached to or recovered, whatever is right; ``existsok`` is ignored.
    - ``scratch_dir``: the first write makes the files. A buffer that is there is a RuntimeError
      then.
    - ``scratch_dir`` and ``existsok=True``: one of ours is attached to or recovered, and its items
      are visible. A bare tensordict directory is taken over, empty.

    Args:
        max_size: capacity in elements.
        scratch_dir: the directory of the files.
        device: where samples are sent. The bytes stay on the CPU; None and ``"auto"`` are the CPU
            too.
        ndim: leading dimensions of the data that belong to the storage.
        existsok: see the table.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        shared_init: see the table.
        auto_cleanup: remove the files when the process that made them ends (at exit, SIGTERM,
            SIGINT). None: only in a temporary directory. The directory itself goes only if we made
            it and nothing foreign is in it.
        checksum: keep a CRC32C of every item, so that damage after a power cut is found. Costs
            about 0.1 ns a byte.
        reserve: take all space at the first write. Without it the files are sparse, and a disk that
            becomes full kills the writer with SIGBUS.
        timeout: seconds to wait for another process that creates or recovers the directory right
            now.
        prefault: have this process make and map the pages of the buffer before they are needed:
            ``"off"``, ``"background"`` (a thread does it, once the files are there) or ``"full"``
            (who creates or opens the buffer waits for it). Takes about 0.3 s a GiB in memory, and
            pays there for the first lap; see docs/memory.md.
        on_progress: called with a `ProgressReport`, some times a second: while pages are made, in
            the thread that does it, and where a directory is recovered. What it raises comes out of
            the call that waits.
        share_next: store observations once. A leaf ``("next", key)`` that equals ``key`` of the
            following item of its stream, bit for bit, is not stored again. True: all such leaves of
            the same dtype and shape as ``key``, of 8 bytes or more, but for ``done``,
            ``terminated``, ``truncated`` and ``reward``; or a list of keys, with or without the
            "next". Samples and ``get`` give whole items; there are no views of these leaves.
        share_next_room: next observations that can be whole at the same time: the newest item of
            each stream, and those that no item follows (the last step of an episode). None: a
            twentieth of the slots, and at least 64. A write that finds it full waits for writers
            that are at it, or is a SpaceError; nothing is dropped.

    Raises:
        SchemaMismatchError: the directory holds a buffer of another ``max_size`` or ``ndim``.
        BufferExistsError: (at the first write) there is a buffer; also a RuntimeError.
        SpaceError: (at the first write) bytes needed and bytes free; nothing is left behind. (At
            any write) ``share_next_room`` is full.
        ValueError: ``share_next`` with ``ndim`` above 1; ``share_next_room`` without it.
        AttachTimeout, FormatError, CorruptBufferError, ReadOnlyError, UnsafePathError,
            UnsafeFilesystemError, RegistryFullError: as their names say.

    It pickles to its path and arguments, never to its contents: a process that gets it opens the
    same directory.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyMemmapStorage
        >>> storage = LazyMemmapStorage(100)
        >>> data = TensorDict({"some data": torch.randn(10, 11)}, [10, 11])
        >>> storage.set(range(10), data)
        >>> len(storage)
        10
        >>> storage.get(0).batch_size
        torch.Size([11])

    Source: ``torchrl.data.LazyMemmapStorage``.
    """

    _memory_mapped = True
    _asked: Asked | None = None  # to be stored once, of a buffer that is made

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
        checksum: bool = True,
        reserve: bool = True,
        timeout: float = 60.0,
        prefault: str = "off",
        on_progress: OnProgress | None = None,
        share_next: bool | Sequence[Any] = False,
        share_next_room: int | None = None,
    ) -> None:
        self._asked = Asked.given(share_next, share_next_room, ndim)
        self._location = Location(
            scratch_dir=scratch_dir,
            shared_init=shared_init,
            existsok=existsok,
            auto_cleanup=auto_cleanup,
            checksum=checksum,
            reserve=reserve,
            timeout=timeout,
            prefault=prefault,
            on_progress=on_progress,
        )
        on_cpu = device is None or device == "auto"
        super().__init__(
            max_size, device="cpu" if on_cpu else device, ndim=ndim, compilable=compilable
        )

    def __repr__(self) -> str:
        if not self.shared:
            return super().__repr__()
        return f"{super().__repr__()[:-1]}, scratch_dir={self._place()!r})"

    @classmethod
    def from_engine(
        cls, engine: Engine, *, device: torch.device | str = "cpu"
    ) -> LazyMemmapStorage:
        """The storage of an open buffer, whose handle it owns from now on.

        ``device`` is where samples are sent.
        """
        settings = engine.settings
        storage = cls(settings.capacity, device=device, ndim=settings.ndim)
        storage._location, storage._engine = Location.of_engine(engine), engine
        return storage

    def _settings(self) -> Settings:
        settings = super()._settings()
        if self._asked is None:
            return settings
        return replace(settings, extra={**settings.extra, "share_next": self._asked.to_json()})
