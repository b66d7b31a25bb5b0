"""``attach``: opens the buffer of a directory for NumPy arrays, in any process of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shmbuffer.memory.attaching import OnExisting, Role, attach_engine
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.numpy.replay_buffer import ReplayBuffer


def attach(
    scratch_dir: str | os.PathLike[str],
    *,
    timeout: float = 60.0,
    role: Role | None = None,
    on_existing: OnExisting = "attach",
    prefault: str = "off",
    on_progress: OnProgress | None = None,
    batch_size: int | None = None,
    beta: float | None = None,
    rng: np.random.Generator | int | None = None,
    dtypes: Mapping[str | tuple[str, ...], str] | None = None,
) -> ReplayBuffer:
    """Opens the buffer of a directory, as `shmbuffer.attach` does, for NumPy arrays.

    Neither torch nor tensordict is imported, so that a collector starts in a fraction of a second
    and takes little memory. Both kinds of clients may use one directory; either may be the first to
    write. alpha, eps, beta, ``batch_size`` and ``priority_key`` are those of the buffer's creation.

    Args:
        scratch_dir: the directory, which need not exist yet; or the path of a save, which is opened
            for reading.
        timeout: seconds to wait until another process has created or recovered it.
        role: of this process in the registry; "collector" if a coordinator spawned it, else
            "client".
        on_existing: see `shmbuffer.attach`.
        prefault: see `shmbuffer.attach`.
        on_progress: see `shmbuffer.attach`.
        batch_size: default size of a sample; None: the recorded one.
        beta: exponent of the importance weights; None: the recorded one.
        rng: generator for the draws, or a seed for one. None: random numbers of the operating
            system.
        dtypes: for the first write, by key or path of a leaf: the dtype of arrays that hold its
            bytes in unsigned integers because NumPy lacks it ("bfloat16", "float8_e4m3fn" ...).
            Not needed for arrays of ml_dtypes.

    Returns:
        The buffer.

    Raises:
        AttachTimeout: it was not created in time, or another process locked it all the time.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: it cannot be used.
        RegistryFullError: 256 living handles use it.
        ValueError: ``timeout`` is not a number of seconds; ``role``, ``on_existing``, ``prefault``
            or a dtype is unknown; ``batch_size`` is below 1, or ``beta`` below 0.

    Cost: about a millisecond, in addition to the import of this module (0.2 s of CPU).

    Example:
        >>> import numpy as np
        >>> import shmbuffer.numpy
        >>> from shmbuffer import Coordinator
        >>> path = "run/arrays"
        >>> with Coordinator(path, capacity=100, on_existing="overwrite"):
        ...     with shmbuffer.numpy.attach(path, batch_size=2) as rb:
        ...         index = rb.extend({"obs": np.zeros((3, 4))})
        ...         batch = rb.sample()
        ...         print(index, batch["obs"].shape)
        ...         print(rb.update_priority(batch, np.ones(2)))
        [0 1 2] (2, 4)
        PriorityUpdate(applied=2, stale=0)
    """
    pages = Prefault(prefault, on_progress)
    engine = attach_engine(Path(scratch_dir), timeout, role, pages, on_existing)
    try:
        return ReplayBuffer(engine, batch_size=batch_size, beta=beta, rng=rng, dtypes=dtypes)
    except BaseException:
        engine.close()
        raise
