"""Storage in memory-mapped files: committed items survive a kill, and any process may open them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.sharing import SharingRequest
from shmbuffer.memory.mapped.settings import Reserve
from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.storages.location import Location


class LazyMemmapStorage(LazyTensorStorage):
    """A storage in memory-mapped files.

    The first write defines the structure of the items and creates the files.

    A directory contains the items, their order, the cursor and the priorities. Unrelated processes
    may open and close it. If all of them are killed, the next process that opens the directory
    recovers it and continues. The files have tensordict's memmap layout, so
    ``TensorDict.load_memmap(scratch_dir)`` can read them at any time.

    The arguments decide where the bytes are, and what happens if the directory already has a
    buffer:

    - neither ``scratch_dir`` nor ``shared_init``: anonymous memory, shared by this process and
      those that the storage is passed to.
    - ``shared_init=True``: a directory, which is temporary without ``scratch_dir``. The buffer is
      created, attached to or recovered as needed; ``existsok`` is ignored.
    - ``scratch_dir``: the first write creates the files, and raises RuntimeError if there is
      already a buffer.
    - ``scratch_dir`` and ``existsok=True``: an existing shmbuffer directory is attached to or
      recovered, with its items. A plain tensordict directory is reused, and starts empty.

    Args:
        max_size: capacity in elements.
        scratch_dir: the directory of the files.
        device: where samples are sent. The bytes stay on the CPU; None and ``"auto"`` are the CPU
            too.
        ndim: leading dimensions of the data that belong to the storage.
        existsok: see the list above.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        shared_init: see the list above.
        auto_cleanup: remove the files when the process that created them ends (at exit, SIGTERM,
            SIGINT). None: only in a temporary directory. The directory itself is removed only if
            the storage created it and it contains no other files.
        checksum: store a CRC32C of every item, to detect damage after a power cut. Costs about 0.1
            ns per byte.
        reserve: when the files take their space. ``"steps"``: in steps of 32 MiB, ahead of the
            items that are written. A full disk is then a `SpaceError` of the write that needs more.
            ``"all"``: at the first write, so that a disk that becomes full later stops no writer.
            False: page by page (sparse files); a full disk then kills the writer with SIGBUS. None:
            ``"all"`` with ``shared_init`` or ``prefault``, else ``"steps"``. An existing directory
            keeps what it was created with.
        timeout: seconds to wait while another process creates or recovers the directory.
        prefault: whether this process allocates and maps the pages of the buffer before they are
            needed: ``"off"``, ``"background"`` (in a thread, once the files exist) or ``"full"``
            (creating or opening the buffer waits for it). Takes about 0.3 s per GiB in memory, and
            speeds up the first lap there; see docs/memory.md.
        on_progress: called with a `ProgressReport` a few times per second while pages are
            prefaulted, in the thread that does so, and while a directory is recovered. Its
            exceptions are raised by the waiting call.
        share_next: store observations once. A leaf ``("next", key)`` that equals ``key`` of the
            following item of its stream, bit for bit, is not stored again. Either a list of keys,
            with or without the "next", or True. True shares all such leaves of at least 8 bytes
            with the dtype and shape of ``key``, except ``done``, ``terminated``, ``truncated`` and
            ``reward``. Samples and ``get`` return complete items; these leaves have no views.
        share_next_room: number of next observations that can be stored in full at the same time:
            those of the newest item of each stream and of the last step of each episode. None: a
            twentieth of the slots, at least 64. A write that finds no room waits for active
            writers, or raises SpaceError; nothing is dropped.

    Raises:
        SchemaMismatchError: the directory has a buffer with a different ``max_size`` or ``ndim``.
        BufferExistsError: (at the first write) there is already a buffer; also a RuntimeError.
        SpaceError: (at the first write) bytes needed and bytes free; nothing is left behind. (At
            any write) ``share_next_room`` is full; with ``reserve="steps"``, the disk is full.
            Nothing was changed.
        ValueError: ``share_next`` with ``ndim`` above 1; ``share_next_room`` without
            ``share_next``; ``reserve="steps"`` with ``prefault``.
        AttachTimeout, FormatError, CorruptBufferError, ReadOnlyError, UnsafePathError,
            UnsafeFilesystemError, RegistryFullError: as their names say.

    A pickled storage contains its path and arguments, not its items. The process that unpickles it
    opens the same directory.

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
    _asked: SharingRequest | None = None  # leaves that a new buffer is asked to store once

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
        reserve: Reserve | None = None,
        timeout: float = 60.0,
        prefault: str = "off",
        on_progress: OnProgress | None = None,
        share_next: bool | Sequence[Any] = False,
        share_next_room: int | None = None,
    ) -> None:
        self._asked = SharingRequest.from_arguments(share_next, share_next_room, ndim)
        self._location = Location(
            steps=True,
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
        """Returns the storage of an open buffer and takes ownership of its handle.

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
