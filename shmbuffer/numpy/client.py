"""Defines ``attach``, which opens the buffer in a directory for NumPy arrays."""

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
    """Opens the buffer in a directory for NumPy arrays. In other respects like `shmbuffer.attach`.

    Neither torch nor tensordict is imported, so a collector starts in a fraction of a second and
    uses little memory. Clients with and without torch can use the same directory, and either can
    write first. The alpha, eps, beta, ``batch_size`` and ``priority_key`` that were recorded when
    the buffer was created are used.

    Args:
        scratch_dir: the directory, which need not exist yet. Can also be the path of a save, which
            is opened for reading.
        timeout: seconds to wait until another process has created or recovered the buffer.
        role: role of this process in the registry. By default, "collector" if a coordinator has
            spawned the process, otherwise "client".
        on_existing: see `shmbuffer.attach`.
        prefault: see `shmbuffer.attach`.
        on_progress: see `shmbuffer.attach`.
        batch_size: default number of items in a sample, or None for the recorded value.
        beta: exponent of the importance weights, or None for the recorded value.
        rng: NumPy generator for sampling, or a seed. With None, the operating system provides the
            random numbers.
        dtypes: for the first write, the dtypes of leaves whose dtype NumPy lacks ("bfloat16",
            "float8_e4m3fn" ...), by the key or path of the leaf. The arrays contain the bytes of
            these leaves as unsigned integers. Arrays of ml_dtypes do not need this argument.

    Returns:
        The buffer.

    Raises:
        AttachTimeout: no process created the buffer in time, or another process kept it locked.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: the directory cannot be
            used.
        RegistryFullError: 256 living handles use the buffer.
        ValueError: ``timeout`` is not a number of seconds, or ``batch_size`` is below 1, or
            ``beta`` is below 0. Also raised if ``role``, ``on_existing``, ``prefault`` or a dtype
            is unknown.

    Cost: about a millisecond, plus the import of this module (0.2 s of CPU time).

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
