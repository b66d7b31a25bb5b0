"""``attach``: one directory in, one buffer of the family out, from any process of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.memory.attaching import Role, attached
from shmbuffer.memory.prefault import Prefault

if TYPE_CHECKING:
    from shmbuffer.memory.progress import OnProgress
    from shmbuffer.replay.buffers import ReplayBuffer

OF_COORDINATOR = frozenset(
    (
        *("auto_cleanup", "capacity", "checksum", "example", "grace_s", "max_bytes"),
        *("metrics_port", "ndim", "on_existing", "reserve", "storage"),
    )
)
"""Arguments of a `Coordinator` that have no meaning in ``attach``."""


def attach(
    scratch_dir: str | os.PathLike[str],
    *,
    timeout: float = 60.0,
    role: Role | None = None,
    prefault: str = "off",
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ReplayBuffer:
    """Opens the buffer of a directory that this or any other process made, or is about to make.

    The class of the buffer, alpha, eps, beta, ``batch_size`` and ``priority_key`` are those that
    were recorded when it was made. Before the first write by anyone it is there, but empty: ``len``
    is 0, and the first ``extend`` or ``add`` defines what an item is. A directory whose processes
    were killed is recovered first.

    The process is in the registry until the buffer is closed or the process ends; it may come and
    go at will.

    Args:
        scratch_dir: the directory. It need not exist yet.
        timeout: seconds to wait for it to be made, or for another process that makes or recovers it
            right now.
        role: what this process is called in the registry; "collector" in one that a coordinator
            spawned, else "client".
        prefault: have this process make and map the pages of the buffer before it needs them:
            "off"; "background"; "full" waits for it, where somebody has written already. See
            docs/memory.md.
        on_progress: called with a `ProgressReport` some times a second: while the directory is
            recovered, and while pages are made, in the thread that does it. What it raises comes
            out of this call, if it waits for that work.
        **options: what cannot be recorded, or is to differ in this process: ``sampler`` (of any
            kind, also of a prioritized buffer; a prioritized one with its alpha and eps),
            ``sample_unit``, ``transform``, ``collate_fn``, ``prefetch``, ``generator``, ``rank``,
            ``batch_size``, ``beta``, and other arguments of the buffer's class; of a buffer of
            records also ``device``, ``pad_output``, and the ``compression_fn`` and
            ``decompression_fn`` that it was made with.

    Returns:
        The buffer, for instance a ``TensorDictPrioritizedReplayBuffer``.

    Raises:
        AttachTimeout: nobody made it in time, or somebody held it all the time.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: it cannot be used.
        RegistryFullError: 256 living handles use it.
        ValueError: ``timeout`` is not a number of seconds; there is no such ``role`` or
            ``prefault``; a ``sampler`` has another alpha or eps.
        TypeError: an argument that only the `Coordinator` takes, or none at all.

    Cost: about a millisecond, after the import of torch; recovery comes on top where it is needed.
    """
    if decided := sorted(options.keys() & OF_COORDINATOR):
        raise TypeError(
            f"attach() takes no {decided[0]!r}: it is decided where the buffer is made, "
            f"Coordinator(..., {decided[0]}=...)"
        )
    engine = attached(Path(scratch_dir), timeout, role, Prefault(prefault, on_progress))
    try:
        from shmbuffer.replay.buffers.reopened import from_engine

        return from_engine(engine, **options)
    except BaseException:
        engine.close()
        raise
