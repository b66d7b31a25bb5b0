"""The coordinator, which creates or recovers the directory and supervises collectors.

     coordinator ──creates, recovers──▶ directory ◀──attach── collectors, learners
          └──spawns, watches, reaps, restarts──▶ collectors

The coordinator is not in the data path. If it is killed, collectors and learners keep running, and
a new coordinator with ``on_existing="recover"`` can take over the directory. If the directory is
temporary, the new coordinator removes it when it is closed.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVarTuple

from shmbuffer.errors import BufferClosedError, ForkedHandleError
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.mapped.settings import Reserve
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.service.buffer_config import ALPHA, BETA, EPS, BufferConfig, split
from shmbuffer.service.children import Orphans, Spawned
from shmbuffer.service.run_directory import OnExisting, RunDirectory
from shmbuffer.service.supervisor import Supervisor
from shmbuffer.watch.historian import Death
from shmbuffer.watch.metrics import MetricsServer, metrics_of
from shmbuffer.watch.stats import Meter, Number

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from shmbuffer.buffers.replay_buffer import ReplayBuffer
    from shmbuffer.memory.clients.registry import Client
    from shmbuffer.memory.system.progress import OnProgress
    from shmbuffer.memory.upkeep.recovery_report import RecoveryReport

_Ts = TypeVarTuple("_Ts")


class Coordinator:
    """Owns a shared buffer for the duration of a run.

        with Coordinator("run/buffer", capacity=1_000_000, batch_size=256) as coordinator:
            coordinator.spawn(collect, 4, restart=True)
            train(coordinator.buffer)

    The buffer is a ``TensorDictPrioritizedReplayBuffer``, or, with ``alpha=None``, a
    ``TensorDictReplayBuffer``. The class is recorded in the directory, so that ``attach`` creates a
    buffer of the same class. Close the coordinator with ``close()`` or a ``with`` block. It is also
    closed when the interpreter exits, and on SIGTERM if it has spawned a process. Methods that use
    the buffer of a closed coordinator raise BufferClosedError.

    Args:
        scratch_dir: the directory. If None, creates a temporary directory, which is removed when
            the coordinator is closed.
        capacity: maximum number of items. Optional with ``on_existing="recover"``.
        alpha: priority exponent, by default 0.6. If None, creates a buffer without priorities.
        beta: exponent of the importance weights, by default 0.4.
        eps: number that is added to each priority, by default 1e-8.
        batch_size: default batch size of samples, in this process and after ``attach``.
        priority_key: key of the entry that contains priorities, by default "td_error".
        on_existing: what to do with an existing buffer. "error" raises BufferExistsError.
            "recover" recovers the buffer, or takes it over if living processes use it. "overwrite"
            removes the buffer and creates a new one.
        auto_cleanup: if True, closing the coordinator removes the buffer's files, and also the
            directory if it was created for them. None does this only if the directory is temporary.
        example: a TensorDict with the keys, shapes and dtypes of one item or of a batch. With an
            example, the constructor creates the files, so that it raises an error if there is too
            little space. Otherwise the first write creates the files.
        ndim: number of leading batch dimensions in the storage (as in TorchRL), by default 1.
        storage: "LazyMemmapStorage", the default, for items of equal shapes and dtypes,
            "LazyStackStorage" for items of any shape, or "CompressedListStorage" for compressed
            items of any shape.
        max_bytes: size of the byte ring in bytes. Required to create one of the last two storages.
        checksum: if True, items have checksums. Without checksums, damage by a power cut is not
            detected.
        reserve: ``"all"`` allocates the space of all items when the files are created, so that
            writers do not fail if the disk becomes full later. For ``"steps"`` (rows only) and
            False, see `LazyMemmapStorage`. An existing directory keeps its recorded value.
        timeout: seconds to wait for another process that is creating or recovering the buffer.
        grace_s: seconds between SIGTERM and SIGKILL when spawned processes are stopped.
        metrics_port: port of ``http://127.0.0.1:PORT/metrics`` for Prometheus. 0 chooses a free
            port. Requires the extra "metrics". None serves no metrics.
        prefault: see ``attach``. "full" waits if the files exist or if ``example`` creates them.
        on_progress: see ``attach``.
        rate_limiter: `RateLimiter` for all processes, which limits the ratio of samples to inserts
            or turns the buffer into a queue. If None, keeps the limiter that the directory has, and
            logs it.
        **options: further arguments of the buffer, with TorchRL's names. Fixed: ``share_next`` and
            ``share_next_room`` of `LazyMemmapStorage`. Recorded: ``weight_key``, ``reduction``,
            ``dim_extend``; for records also ``stack_dim``, ``compression_level``, ``compress``,
            ``dictionary_bytes``. For the buffer of this process only: ``sampler``,
            ``sample_unit``, ``transform``, ``collate_fn``, ``pin_memory``, ``prefetch``,
            ``generator``, ``rank``, ``device`` (the device of samples); for records also
            ``pad_output``, ``compression_fn``, ``decompression_fn``.

    Recorded values take precedence over defaults. A ``capacity``, ``alpha``, ``eps``, ``ndim``,
    ``storage`` or ``max_bytes`` that differs from the recorded value is an error. Other arguments
    replace the recorded values.

    Raises:
        BufferExistsError: a buffer exists and ``on_existing`` is "error".
        BufferInUseError: the directory already has a coordinator, or living processes use a buffer
            that would be overwritten. The attribute ``pids`` contains their pids.
        BufferNotFoundError: there is no buffer to recover, and no ``capacity`` was passed.
        SpaceError: there is not enough space. With "overwrite", the old buffer has been removed.
        ReadOnlyError, UnsafePathError, UnsafeFilesystemError, FormatError, CorruptBufferError,
            AttachTimeout: see these classes. Nothing was changed.
        ValueError: an argument is invalid, or differs from the recorded value.
        TypeError: an argument is unknown.

    Cost: a few milliseconds; torch is imported only if ``example`` or ``buffer`` is used.
    """

    def __init__(
        self,
        scratch_dir: str | os.PathLike[str] | None = None,
        *,
        capacity: int | None = None,
        alpha: float | None = ALPHA,
        beta: float = BETA,
        eps: float = EPS,
        batch_size: int | None = None,
        priority_key: str | tuple[str, ...] | None = None,
        on_existing: OnExisting = "error",
        auto_cleanup: bool | None = None,
        example: TensorDictBase | None = None,
        ndim: int | None = None,
        storage: str | None = None,
        max_bytes: int | None = None,
        checksum: bool = True,
        reserve: Reserve = "all",
        timeout: float = 60.0,
        grace_s: float = 5.0,
        metrics_port: int | None = None,
        prefault: str = "off",
        on_progress: OnProgress | None = None,
        rate_limiter: RateLimiter | None = None,
        **options: Any,
    ) -> None:
        config = BufferConfig(
            capacity=capacity,
            ndim=ndim,
            alpha=alpha,
            eps=eps,
            beta=beta,
            batch_size=batch_size,
            priority_key=priority_key,
            storage=storage,
            max_bytes=max_bytes,
            checksum=checksum,
            reserve=reserve,
            **split(options, Coordinator.__init__.__kwdefaults__ or ()),
        )
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._refused_to_spawn = False
        self._options = options
        self._buffer: ReplayBuffer | None = None
        with ExitStack() as undo:
            self._run_directory = RunDirectory(
                scratch_dir,
                config,
                existing=on_existing,
                auto_cleanup=auto_cleanup,
                limiter=rate_limiter,
                timeout=timeout,
                prefault=Prefault(prefault, on_progress),
            )
            undo.callback(self._run_directory.abandon)
            self._engine, self.scratch_dir = self._run_directory.engine, self._run_directory.path
            if example is not None:
                self.buffer.storage.define(example)
            self._meter = Meter(self._engine)
            self._supervisor = Supervisor(self._engine, self.scratch_dir, grace_s=grace_s)
            undo.callback(self._supervisor.stop)
            self._metrics: MetricsServer | None = None
            if metrics_port is not None:
                self._metrics = metrics_of(
                    self._engine, self._supervisor.counts, self.scratch_dir, metrics_port
                )
                undo.callback(self._metrics.close)
            self._run_directory.begin()
            undo.pop_all()
        atexit.register(self.close)

    # ---- state ----

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer in this process. The first access creates the object and imports torch."""
        self._check_open()
        if self._buffer is None:
            from shmbuffer.buffers.reopened import from_engine

            self._buffer = from_engine(self._engine, **self._options)
        return self._buffer

    @property
    def capacity(self) -> int:
        """Maximum number of items in the buffer, as recorded in the directory."""
        return self._engine.settings.capacity

    @property
    def report(self) -> RecoveryReport | None:
        """Report of the recovery, or None if this coordinator did not recover the directory."""
        return self._engine.report

    @property
    def processes(self) -> list[Spawned]:
        """The spawned processes. Each has ``pid``, ``exitcode``, ``is_alive()`` and ``kill()``."""
        return self._supervisor.processes

    @property
    def deaths(self) -> list[Death]:
        """Deaths of all clients since the start, including processes that were not spawned here."""
        return list(self._supervisor.deaths)

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics server, or None if metrics are not served."""
        return None if self._metrics is None else self._metrics.port

    @property
    def closed(self) -> bool:
        """True if ``close`` has been called."""
        return self._closed

    def stats(self) -> dict[str, Number]:
        """Returns a flat dict of numbers from one snapshot. watch/stats.py explains the keys.

        Rates are averages since the last call. In addition, ``processes`` is the number of spawned
        processes that are running. ``deaths``, ``restarts`` and ``held_back_s`` (seconds for which
        the kernel throttled a writer) are counted since the start of the coordinator.

        Cost: about 10 µs.
        """
        self._check_open()
        return self._meter.read() | self._supervisor.counts()

    # ---- actions ----

    def spawn(
        self,
        target: Callable[[Path, int, *_Ts], object] | str,
        n: int = 1,
        *args: *_Ts,
        restart: bool = False,
        orphans: Orphans = "stop",
        name: str | None = None,
    ) -> list[Spawned]:
        """Starts and supervises ``n`` processes that run ``target(scratch_dir, index, *args)``.

        The processes are spawned, not forked. Therefore ``target`` and ``args`` are pickled, the
        target must be a function of a module, and a script needs ``if __name__ == "__main__":``.
        If the target is given by name, as ``"package.module:function"``, the processes import only
        its module instead of the script. They log a warning if the module imports torch, which the
        NumPy client does not need.

        In each call, the index counts from 0, in the order of the returned list. A target that
        attaches to the directory has the role "collector" by default. When the coordinator is
        closed, SIGTERM raises SystemExit in the target. If the coordinator is killed, the processes
        keep running until ``shmbuffer stop`` ends them, or until another coordinator spawns
        processes with the same name (``orphans``).

        After the target has ended, the process joins its threads, runs ``atexit`` functions and
        closes an attached buffer. Then it exits with ``os._exit``, so the target has to close its
        files itself.

        If the first call raises an error and no item has been written, closing the coordinator
        removes a buffer that it has created. The corrected program can then create the buffer
        again.

        Each death is added to ``deaths`` and logged as a warning by the logger "shmbuffer.service".
        The claims of the dead process are released within milliseconds.

        Args:
            target: the function, or its name. Its return value is ignored.
            n: number of processes.
            *args: further arguments of the target, after the directory and the index.
            restart: if True, a process that dies is started again with the same index, unless it
                returned or ended on Ctrl-C. After two consecutive deaths within 5 s of the start,
                or by the same error, restarts are delayed by increasing pauses. If the same error
                is raised again, one line is printed instead of a traceback.
            orphans: what to do with running processes of the same name that a killed coordinator of
                this directory has spawned. "stop" ends them (SIGTERM, then SIGKILL after
                ``grace_s``) with a warning. "adopt" keeps one process for each index below ``n``
                and ends the others. "leave" lets them run.
            name: name of these processes in ``deaths`` and for ``orphans``. The default is the
                target's module and qualified name. Required if two scripts share a directory.

        Raises:
            BufferUnlinkedError: the directory was removed, moved or replaced.
            BufferInUseError: an orphan cannot be ended, for example because it runs in another
                container. The attribute ``pids`` contains its pid.
            ValueError: ``n`` is negative, or ``orphans`` or the name of the target is invalid.
            TypeError: the target or an argument cannot be pickled, the named target is not
                callable, or the target or ``n`` has the wrong type.
            ModuleNotFoundError, AttributeError: the module or the function does not exist.
            RuntimeError: a spawned process cannot import the main module of this program, or would
                run the program again because ``if __name__ == "__main__":`` is missing.
            OSError: the system cannot start another process.

        Cost: a few milliseconds per process. The target's imports run in the new process.
        """
        self._check_open()
        try:
            return self._supervisor.spawn(
                target, n, args, restart=restart, orphans=orphans, name=name
            )
        except BaseException:
            self._refused_to_spawn = True
            raise

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rate limiter for all processes, or None."""
        self._check_open()
        return self._engine.limiter

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Changes the rate limiter of a running buffer.

            coordinator.set_rate(samples_per_insert=8)     # keeps the other settings
            coordinator.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        Waiting calls check the new limits immediately. Items that were written or sampled before
        the change do not count for the ratio. Items that a queue has already delivered are not
        delivered again.

        Args:
            limiter: the new rate limiter, or None to remove the current one.
            **changes: arguments of `RateLimiter` to change in the current rate limiter.

        Returns:
            The new rate limiter.

        Raises:
            TypeError: both a limiter and changes were passed, or neither, or a change is not an
                argument of `RateLimiter`.
            ValueError: `RateLimiter` rejects an argument, ``min_size`` is larger than the buffer,
                or the limiter would turn a prioritized buffer into a queue.
        """
        self._check_open()
        if bool(changes) == (limiter is not ...):
            raise TypeError(
                "set_rate() needs a RateLimiter or None, or keyword arguments to change the "
                "current one"
            )
        if isinstance(limiter, EllipsisType):
            limiter = (self._engine.limiter or RateLimiter()).changed(**changes)
        self._engine.set_limiter(limiter)
        return self._engine.limiter

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all spawned processes have ended and none of them will be restarted.

        Returns False if this takes longer than ``timeout`` seconds.
        """
        self._check_ours()
        return self._supervisor.join(timeout)

    def wait_for_deaths(self, count: int, timeout: float | None = None) -> bool:
        """Waits until ``deaths`` has at least ``count`` entries.

        Returns False if this takes longer than ``timeout`` seconds.
        """
        self._check_ours()
        return self._supervisor.wait_for_deaths(count, timeout)

    def clients(self) -> list[Client]:
        """Returns the clients in the registry: this coordinator and all attached processes."""
        self._check_open()
        return self._engine.clients()

    def flush(self) -> None:
        """Writes all committed items to disk, while writers continue.

        Raises:
            DurabilityError: the items could not be written to disk.
        """
        self._check_open()
        self._engine.flush()

    def close(self) -> None:
        """Stops spawned processes, closes the buffer, and removes a temporary directory.

        Other processes keep running. A second call, or a call in a forked process, has no effect.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with ExitStack() as steps:  # an error in one step does not skip the others
                steps.callback(atexit.unregister, self.close)
                steps.callback(self._engine.close)
                if self._buffer is not None:
                    steps.callback(self._buffer.close)
                steps.callback(self._run_directory.leave)
                if self._refused_to_spawn and not self.processes:
                    steps.callback(self._run_directory.forget_if_unused)
                steps.callback(self._supervisor.stop)
                if self._metrics is not None:
                    steps.callback(self._metrics.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Coordinator cannot be pickled; send its scratch_dir to the other process, and call "
            "attach(scratch_dir) there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.processes)} processes"
        return f"<Coordinator {str(self.scratch_dir)!r} capacity={self.capacity} {state}>"

    def _check_ours(self) -> None:
        """Raises ForkedHandleError in a process that was forked from the coordinator's process."""
        if os.getpid() != self._pid:
            raise ForkedHandleError(
                f"{self.scratch_dir}: this coordinator belongs to process {self._pid}, from which "
                "this process was forked; call attach() in this process"
            )

    def _check_open(self) -> None:
        """Raises an error in a forked process, or if the coordinator is closed."""
        self._check_ours()
        if self._closed:
            raise BufferClosedError(f"{self.scratch_dir}: this coordinator is closed")
