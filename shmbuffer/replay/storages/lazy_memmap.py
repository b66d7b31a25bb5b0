"""The storage in files: what was committed is there after a kill, and anybody may open it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch

from shmbuffer.memory import Engine
from shmbuffer.memory.cleanup import temporary_directory
from shmbuffer.replay.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.replay.storages.ring_storage import RingStorage, check_recorded
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.tensor import to_device


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

    Raises:
        SchemaMismatchError: the directory holds a buffer of another ``max_size`` or ``ndim``.
        BufferExistsError: (at the first write) there is a buffer; also a RuntimeError.
        SpaceError: (at the first write) bytes needed and bytes free; nothing is left behind.
        AttachTimeout, FormatError, CorruptBufferError, ReadOnlyError, UnsafePathError,
        UnsafeFilesystemError,
            RegistryFullError: as their names say.

    It pickles to its path and arguments, never to its contents: a process that gets it opens the
    same directory.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyMemmapStorage
        >>> storage = LazyMemmapStorage(100)
        >>> data = TensorDict({"some data": torch.randn(10, 11)}, batch_size=[10, 11])
        >>> storage.set(range(10), data)
        >>> len(storage)
        10
        >>> storage.get(0).batch_size
        torch.Size([11])

    Source: ``torchrl.data.LazyMemmapStorage``.
    """

    _memory_mapped = True

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
    ) -> None:
        on_cpu = device is None or device == "auto"
        RingStorage.__init__(
            self,
            max_size,
            ndim=ndim,
            device="cpu" if on_cpu else device,
            compilable=compilable,
        )
        self._scratch_dir = None if scratch_dir is None else Path(scratch_dir).absolute()
        self._shared_init = shared_init
        self._existsok = existsok
        self._auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self._checksum = checksum
        self._reserve = reserve
        self._timeout = timeout
        # A directory that must not hold a buffer waits for the first write, as in TorchRL; any
        # other is opened now: what is in it is to be seen, and a temporary one needs its name.
        if shared_init or (existsok and scratch_dir is not None):
            self._engine = self._open()

    @classmethod
    def from_engine(
        cls, engine: Engine, *, device: torch.device | str = "cpu"
    ) -> LazyMemmapStorage:
        """The storage of a buffer that is open already, as ``attach`` and the coordinator have it.

        Args:
            engine: the open handle; the storage owns it from now on.
            device: where samples are sent.
        """
        settings = engine.settings
        storage = cls(
            settings.capacity,
            scratch_dir=engine.path,
            device=device,
            ndim=settings.ndim,
            checksum=settings.checksum,
            reserve=settings.reserve,
        )
        storage._shared_init = True
        storage._engine = engine
        return storage

    @property
    def scratch_dir(self) -> Path | None:
        """The directory; None in anonymous memory."""
        return self._scratch_dir if self._engine is None else self._engine.path

    @property
    def shared(self) -> bool:
        """Whether the bytes are in a directory, where any process may open them."""
        return self._scratch_dir is not None or super().shared

    def to_device(self, data: Any) -> Any:
        """``data`` on the storage's device."""
        return data if self._on_cpu(self.device) else to_device(data, self.device)

    def _define(self, data: Any, single: bool) -> Rows:
        return RingStorage._define(
            self, data, single
        )  # the bytes are on the CPU, whatever ``device`` is

    def open_there(self) -> None:
        """Open what ``scratch_dir`` has, whatever ``existsok`` says: for a load in place."""
        if self._engine is None:
            before, self._existsok = self._existsok, True
            try:
                self._engine = self._open()
            finally:
                self._existsok = before

    def _open(self) -> Engine:
        if self._scratch_dir is None and not self._shared_init:
            return Engine.anonymous(self._settings(checksum=False, reserve=False))
        existing: Literal["attach", "error", "adopt"] = "adopt" if self._existsok else "error"
        engine = Engine.open(
            temporary_directory() if self._scratch_dir is None else self._scratch_dir,
            self._settings(checksum=self._checksum, reserve=self._reserve),
            existing="attach" if self._shared_init else existing,
            timeout=self._timeout,
            temporary=self._scratch_dir is None and self._auto_cleanup,
            auto_cleanup=self._auto_cleanup,
        )
        try:
            check_recorded(engine.settings, self._max_size, self.ndim, str(engine.path))
        except BaseException:
            engine.close()
            raise
        return engine
