"""``attach``: one directory in, one buffer of the family out, from any process of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.memory.attaching import OnExisting, Role, attached, copied
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.directory.neighbours import directory_of
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import hearing
from shmbuffer.memory.system.region import Directory

if TYPE_CHECKING:
    from shmbuffer.buffers import ReplayBuffer
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
    """Opens the buffer of a directory that any process has made, or is about to make.

    It has the recorded class, alpha, eps, beta, ``batch_size`` and ``priority_key``. Before the
    first write it is empty, and that write (``extend`` or ``add``) defines the form of the items.
    If the processes of the directory were killed, it is recovered first. The process is in the
    registry until the buffer is closed or the process ends.

    A save of ``dumps`` is opened for reading. Samples, priorities and passes work, and what changes
    stays in this process: no lock is taken, and the save stays as it is. Writes raise
    ReadOnlyError.

    Args:
        scratch_dir: the directory, which need not exist yet; or the path of a save.
        timeout: seconds to wait until it is made, or recovered, by another process.
        role: of this process in the registry; "collector" if a coordinator has spawned it, else
            "client".
        on_existing: "recover" continues in a save: it becomes a live buffer that other processes
            can attach to. No process may have it open for reading then.
        prefault: make and map the pages of the buffer before they are needed: "off"; "background";
            "full" waits for it, if the buffer has items. See docs/memory.md.
        on_progress: called with a `ProgressReport` several times a second, during recovery and
            while pages are made, in the working thread. Its exceptions come out of this call, if
            that waits for the work.
        **options: local options: ``sampler`` (of any kind; a prioritized one with the recorded
            alpha and eps), ``sample_unit``, ``transform``, ``collate_fn``, ``prefetch``,
            ``generator``, ``rank``, ``batch_size``, ``beta``, and other arguments of the buffer's
            class; ``device``, where samples are sent, while the items stay in the directory; for
            records also ``pad_output``, and the ``compression_fn`` and ``decompression_fn`` of the
            buffer.

    Returns:
        The buffer, for instance a ``TensorDictPrioritizedReplayBuffer``.

    Raises:
        AttachTimeout: no process has made it in time, or one has held it all the time.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: it cannot be used.
        RegistryFullError: 256 living handles use it.
        ValueError: an invalid ``timeout``, ``role``, ``on_existing`` or ``prefault``; a ``sampler``
            with another alpha or eps.
        TypeError: an unknown argument, or one of the `Coordinator`.

    Cost: about a millisecond, after the import of torch, and the recovery.
    """
    if decided := sorted(options.keys() & OF_COORDINATOR):
        raise TypeError(
            f"attach() takes no {decided[0]!r}: it is decided when the buffer is made, "
            f"Coordinator(..., {decided[0]}=...)"
        )
    pages = Prefault(prefault, on_progress)
    engine = attached(Path(scratch_dir), timeout, role, pages, on_existing)
    return _buffer_of(engine, **options)


def open_to_read(
    scratch_dir: str | os.PathLike[str], *, timeout: float, on_progress: OnProgress | None
) -> tuple[ReplayBuffer, int | None]:
    """Attaches to a buffer, or opens a private copy of it if this process can only read there.

    Returns:
        The buffer, and how many items of a copy were overwritten while they were copied; None if it
        is no copy.
    """
    scratch_dir = directory_of(scratch_dir)
    with Directory.open(scratch_dir, reading=True) as directory:
        copying = directory.copying
    if not copying or is_save(scratch_dir):
        return attach(scratch_dir, timeout=timeout, on_progress=on_progress), None
    with hearing(on_progress):
        engine, changed = copied(Path(scratch_dir))
    return _buffer_of(engine), changed


def _buffer_of(engine: Engine, **options: Any) -> ReplayBuffer:
    """The buffer of an engine, which it owns from now on."""
    try:
        from shmbuffer.buffers.reopened import from_engine

        return from_engine(engine, **options)
    except BaseException:
        engine.close()
        raise
