"""``attach``: opens the buffer of a directory, from any process of the machine."""

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
"""Arguments of a `Coordinator` that ``attach`` does not take."""


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
    """Opens the buffer of a directory that any process has created, or is about to create.

    The buffer has the recorded class, alpha, eps, beta, ``batch_size`` and ``priority_key``. The
    first write (``extend`` or ``add``) defines the form of the items; before it, it is empty.
    If the processes of the directory were killed, it is recovered first. The process is in the
    registry until the buffer is closed or the process ends.

    A save of ``dumps`` is opened for reading. Samples, priorities and passes work, but changes stay
    in this process: no lock is taken, and the save is not modified. Writes raise ReadOnlyError.

    Args:
        scratch_dir: the directory, which need not exist yet; or the path of a save.
        timeout: seconds to wait until another process has created or recovered it.
        role: of this process in the registry; "collector" if a coordinator has spawned it, else
            "client".
        on_existing: "recover" continues in a save: it becomes a live buffer that other processes
            can attach to. No process may have it open for reading then.
        prefault: allocate and map the pages of the buffer before they are needed: "off";
            "background"; "full" waits for it, if the buffer has items. See docs/memory.md.
        on_progress: called with a `ProgressReport` several times a second, during recovery and
            while pages are allocated, in the working thread. If this call waits for the work, it
            raises the callback's exceptions.
        **options: options of this process: ``sampler``, ``sample_unit``, ``transform``,
            ``collate_fn``, ``prefetch``, ``generator``, ``rank``, ``batch_size``, ``beta``, and
            other arguments of the class. A prioritized sampler needs the recorded alpha and eps.
            ``device`` is the device of samples, while the items stay in the directory. Records also
            have ``pad_output``, and the ``compression_fn`` and ``decompression_fn`` of the buffer.

    Returns:
        The buffer, for instance a ``TensorDictPrioritizedReplayBuffer``.

    Raises:
        AttachTimeout: no process has created it in time, or one has locked it all the time.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: it cannot be used.
        RegistryFullError: 256 living handles use it.
        ValueError: an invalid ``timeout``, ``role``, ``on_existing`` or ``prefault``; a ``sampler``
            with another alpha or eps.
        TypeError: an unknown argument, or one of the `Coordinator`.

    Cost: about a millisecond, in addition to the import of torch and the recovery.
    """
    if decided := sorted(options.keys() & OF_COORDINATOR):
        raise TypeError(
            f"attach() got an unexpected argument {decided[0]!r}, which is decided when the buffer "
            f"is created: Coordinator(..., {decided[0]}=...)"
        )
    pages = Prefault(prefault, on_progress)
    engine = attach_engine(Path(scratch_dir), timeout, role, pages, on_existing)
    return _buffer_of(engine, **options)


def open_to_read(
    scratch_dir: str | os.PathLike[str], *, timeout: float, on_progress: OnProgress | None
) -> tuple[ReplayBuffer, int | None]:
    """Attaches to a buffer, or opens a private copy of it if this process can only read there.

    Returns:
        The buffer, and the number of items that were overwritten while they were copied; None if
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
    """Returns a buffer that owns the engine."""
    try:
        from shmbuffer.buffers.reopened import from_engine

        return from_engine(engine, **options)
    except BaseException:
        engine.close()
        raise
