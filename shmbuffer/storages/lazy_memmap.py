"""Storage in memory-mapped files. Its committed items are kept if all processes are killed."""

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
    can open and close it. If all of them are killed, the next process that opens the directory
    recovers it and continues. The files have tensordict's memmap layout, so
    ``TensorDict.load_memmap(scratch_dir)`` can read them at any time.

    The arguments determine where the bytes are stored, and what happens if the directory already
    contains a buffer:

    - Neither ``scratch_dir`` nor ``shared_init``: the bytes are in anonymous memory, which is
      shared with the processes that receive the storage.
    - ``shared_init=True``: the bytes are in a directory, which is temporary without
      ``scratch_dir``. The buffer is created, attached or recovered as needed, and ``existsok`` is
      ignored.
    - ``scratch_dir``: the first write creates the files, or raises RuntimeError if there is already
      a buffer.
    - ``scratch_dir`` and ``existsok=True``: an existing shmbuffer directory is attached or
      recovered, with its items. A plain tensordict directory is reused and starts empty.

    Args:
        max_size: capacity in elements.
        scratch_dir: directory of the files.
        device: device of the samples. The stored bytes stay on the CPU. None and ``"auto"`` mean
            the CPU.
        ndim: number of leading dimensions of the data that belong to the storage.
        existsok: see the list above.
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        shared_init: see the list above.
        auto_cleanup: if True, removes the files when the process that created them ends (at exit,
            SIGTERM, SIGINT). None means True only for a temporary directory. The directory itself
            is removed only if the storage created it and it contains no other files.
        checksum: if True, stores a CRC32C of every item, to detect damage after a power cut. This
            takes about 0.1 ns per byte.
        reserve: determines when disk space is allocated. ``"steps"`` allocates 32 MiB at a time,
            before they are needed. If the disk is full, the write that needs more space raises
            `SpaceError`. ``"all"`` allocates all space at the first write, so that a full disk
            cannot stop a writer later. False allocates single pages when they are written (sparse
            files), so that a full disk kills the writer with SIGBUS. None means ``"all"`` with
            ``shared_init`` or ``prefault``, otherwise ``"steps"``. An existing directory keeps its
            original setting.
        timeout: seconds to wait while another process creates or recovers the directory.
        prefault: determines whether this process allocates and maps the pages of the buffer in
            advance: ``"off"``, ``"background"`` (in a thread, after the files are created) or
            ``"full"`` (before the call that creates or opens the buffer returns). This takes about
            0.3 s per GiB in memory, and makes the first pass over the ring faster; see
            docs/memory.md.
        on_progress: function that is called with a `ProgressReport` a few times per second, while
            pages are prefaulted (in the thread that does this) and while a directory is recovered.
            The call that waits raises the function's exceptions.
        share_next: stores each observation only once. If a leaf ``("next", key)`` equals ``key`` of
            the next item in its stream, bit for bit, it is not stored again. Pass a list of keys,
            with or without "next", or True. True selects all leaves under "next" of at least 8
            bytes that have the dtype and shape of ``key``, except ``done``, ``terminated``,
            ``truncated`` and ``reward``. Samples and ``get`` return complete items. The selected
            leaves have no views.
        share_next_room: number of next observations that can be stored in full at the same time.
            These are needed for the newest item of each stream and the last step of each episode.
            None means a twentieth of the slots, but at least 64. If no space is left, a write waits
            until other writers have finished, or raises SpaceError. No item is dropped.

    Raises:
        SchemaMismatchError: the directory has a buffer with a different ``max_size`` or ``ndim``.
        BufferExistsError: raised by the first write if there is already a buffer. This class is
            derived from RuntimeError.
        SpaceError: raised by the first write if the disk has too little space. The message contains
            the numbers of needed and free bytes, and no files remain. Also raised by any write if
            ``share_next_room`` is used up or, with ``reserve="steps"``, if the disk is full. Such a
            write changes nothing.
        ValueError: ``share_next`` was passed with ``ndim`` above 1, ``share_next_room`` without
            ``share_next``, or ``reserve="steps"`` with ``prefault``.
        AttachTimeout, FormatError, CorruptBufferError, ReadOnlyError, UnsafePathError,
            UnsafeFilesystemError, RegistryFullError: see the documentation of these errors.

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
    _sharing_request: SharingRequest | None = None  # the ``share_next`` arguments for a new buffer

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
        self._sharing_request = SharingRequest.from_arguments(share_next, share_next_room, ndim)
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
        return f"{super().__repr__()[:-1]}, scratch_dir={self._directory_name()!r})"

    @classmethod
    def from_engine(
        cls, engine: Engine, *, device: torch.device | str = "cpu"
    ) -> LazyMemmapStorage:
        """Creates a storage for an open buffer, and takes ownership of its handle.

        ``device`` is the device of the samples.
        """
        settings = engine.settings
        storage = cls(settings.capacity, device=device, ndim=settings.ndim)
        storage._location, storage._engine = Location.of_engine(engine), engine
        return storage

    def _settings(self) -> Settings:
        settings = super()._settings()
        if self._sharing_request is None:
            return settings
        return replace(
            settings, extra={**settings.extra, "share_next": self._sharing_request.to_json()}
        )
