"""Defines ``attach``, which opens the buffer in a directory from any process on the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.memory.attaching import OnExisting, Role, attach_engine, open_copy
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.directory.neighbours import directory_of
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import report_to
from shmbuffer.memory.system.region import Directory

if TYPE_CHECKING:
    from shmbuffer.buffers.replay_buffer import ReplayBuffer
    from shmbuffer.memory.engine import Engine
    from shmbuffer.memory.system.progress import OnProgress

OF_COORDINATOR = frozenset(
    (
        *("auto_cleanup", "capacity", "checksum", "example", "grace_s", "max_bytes"),
        *("metrics_port", "ndim", "reserve", "storage"),
    )
)
"""Arguments of a `Coordinator` that ``attach`` does not accept."""


def attach(
    scratch_dir: str | os.PathLike[str],
    *,
    timeout: float = 60.0,
    role: Role | None = None,
    on_existing: OnExisting = "attach",
    prefault: str = "off",
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ReplayBuffer:
    """Opens the buffer in a directory. Waits until another process has created the buffer.

    The buffer has the recorded class, alpha, eps, beta, ``batch_size`` and ``priority_key``. The
    first write (``extend`` or ``add``) defines the schema. Until then, the buffer is empty. If all
    processes that used the directory were killed, the buffer is recovered first. The process is
    listed in the registry until it closes the buffer or ends.

    A save made by ``dumps`` is opened for reading. Sampling, priority updates and passes work, but
    their changes stay in this process: no lock is taken, and the save is not modified. Writes raise
    ReadOnlyError.

    Args:
        scratch_dir: the directory, which need not exist yet, or the path of a save.
        timeout: seconds to wait until another process has created or recovered the buffer.
        role: role of this process in the registry. By default, "collector" if a coordinator has
            spawned the process, otherwise "client".
        on_existing: "recover" turns a save into a live buffer that other processes can attach to.
            No process may have the save open for reading.
        prefault: when the pages of the buffer are allocated and mapped. "off" allocates them when
            they are first used, "background" does it in advance in a thread, and "full" waits until
            it is done if the buffer has items. See docs/memory.md.
        on_progress: function that is called with a `ProgressReport` several times per second,
            during recovery and while pages are allocated. The function runs in the thread that does
            the work. If ``attach`` waits for the work, it raises the function's exceptions.
        **options: options for this process alone: ``sampler``, ``sample_unit``, ``transform``,
            ``collate_fn``, ``prefetch``, ``generator``, ``rank``, ``batch_size``, ``beta``, and
            other arguments of the class. A prioritized sampler must have the recorded alpha and
            eps. ``device`` is the device of samples; the items stay in the directory. For records
            also ``pad_output``, and the ``compression_fn`` and ``decompression_fn`` of the buffer.

    Returns:
        The buffer, for example a ``TensorDictPrioritizedReplayBuffer``.

    Raises:
        AttachTimeout: no process created the buffer in time, or another process kept the directory
            locked.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: the directory cannot be
            used.
        RegistryFullError: the buffer already has 256 living handles.
        ValueError: ``timeout``, ``role``, ``on_existing`` or ``prefault`` is invalid, or the
            ``sampler`` has a different alpha or eps.
        TypeError: an argument is unknown, or is an argument of the `Coordinator`.

    Cost: about a millisecond, plus the import of torch and the recovery.
    """
    if decided := sorted(options.keys() & OF_COORDINATOR):
        raise TypeError(
            f"attach() got an unexpected argument {decided[0]!r}; pass it when the buffer is "
            f"created, to Coordinator(..., {decided[0]}=...)"
        )
    pages = Prefault(prefault, on_progress)
    engine = attach_engine(Path(scratch_dir), timeout, role, pages, on_existing)
    return _buffer_of(engine, **options)


def open_to_read(
    scratch_dir: str | os.PathLike[str], *, timeout: float, on_progress: OnProgress | None
) -> tuple[ReplayBuffer, int | None]:
    """Attaches to a buffer, or opens a private copy if this process cannot write to the directory.

    Returns:
        The buffer, and the number of items that were overwritten while they were copied, or None if
        no copy was made.
    """
    scratch_dir = directory_of(scratch_dir)
    with Directory.open(scratch_dir, reading=True) as directory:
        copying = directory.copying
    if not copying or is_save(scratch_dir):
        return attach(scratch_dir, timeout=timeout, on_progress=on_progress), None
    with report_to(on_progress):
        engine, changed = open_copy(Path(scratch_dir))
    return _buffer_of(engine), changed


def _buffer_of(engine: Engine, **options: Any) -> ReplayBuffer:
    """Returns a buffer that owns the engine. Closes the engine if this fails."""
    try:
        from shmbuffer.buffers.reopened import from_engine

        return from_engine(engine, **options)
    except BaseException:
        engine.close()
        raise
