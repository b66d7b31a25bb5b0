"""The coordinator: creates or recovers the directory, supervises collectors, ends the run.

     coordinator ──creates, recovers──▶ directory ◀──attach── collectors, learners
          └──spawns, watches, reaps, restarts──▶ collectors

It is not in the data path. If it is killed, collectors and learners keep running. A new coordinator
with ``on_existing="recover"`` takes over the directory meanwhile, and owns it if it is temporary.
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
    """Owns a shared buffer for the length of a run.

        with Coordinator("run/buffer", capacity=1_000_000, batch_size=256) as coordinator:
            coordinator.spawn(collect, 4, restart=True)
            train(coordinator.buffer)

    The buffer is a ``TensorDictPrioritizedReplayBuffer``, or, with ``alpha=None``, a
    ``TensorDictReplayBuffer``; ``attach`` finds it recorded in the directory. Close the
    coordinator, or use ``with``; it is also closed by the end of the interpreter, and by SIGTERM
    once it has spawned a process. Every method of a closed coordinator raises BufferClosedError.

    Args:
        scratch_dir: the directory; None creates a temporary one, which is removed at the end.
        capacity: number of items; optional with ``on_existing="recover"``.
        alpha: priority exponent, by default 0.6; None for a buffer without priorities.
        beta: exponent of the importance weights, by default 0.4.
        eps: added to every priority, by default 1e-8.
        batch_size: default size of a sample, here and after ``attach``.
        priority_key: entry of a tensordict with priorities, by default "td_error".
        on_existing: what to do with an existing buffer: "error"; "recover" it, or take it over
            if living processes use it; "overwrite": remove it and create a new one.
        auto_cleanup: if True, the end of the coordinator removes the buffer's files, and the
            directory if it was created for them. None: only if the directory is temporary.
        example: a tensordict like one item of the buffer, or like a batch. The files are created
            at once, so that too little space is an error here instead of at the first write.
        ndim: leading dimensions of a batch in the storage (as in TorchRL), by default 1.
        storage: by default "LazyMemmapStorage", for items of one form; "LazyStackStorage" for items
            of any shapes; "CompressedListStorage" to compress them.
        max_bytes: size of these two in bytes; needed to create the buffer.
        checksum: if True, items have checksums; without them, a power cut may damage items.
        reserve: ``"all"``: take the space of all items when the files are made, so that a disk that
            becomes full later stops no writer. ``"steps"`` (rows only) and False: see
            `LazyMemmapStorage`. A directory keeps what it was created with.
        timeout: seconds to wait for another process that creates or recovers the directory.
        grace_s: seconds between SIGTERM and SIGKILL for spawned processes, at the close.
        metrics_port: serve ``http://127.0.0.1:PORT/metrics`` for Prometheus; 0 takes a free port.
            Needs the extra "metrics".
        prefault: see ``attach``; "full" waits if the files exist or ``example`` makes them.
        on_progress: see ``attach``.
        rate_limiter: keeps writers and samplers in step, or makes a queue of the buffer, for all
            processes. None keeps, and logs, the one in the directory.
        **options: further arguments of the buffer, as TorchRL's. Fixed: `LazyMemmapStorage`'s
            ``share_next`` and ``share_next_room``. Recorded: ``weight_key``, ``reduction``,
            ``dim_extend``; of records ``stack_dim``, ``compression_level``, ``compress``,
            ``dictionary_bytes``. For ``buffer`` alone: ``sampler``,
            ``sample_unit``, ``transform``, ``collate_fn``, ``pin_memory``, ``prefetch``,
            ``generator``, ``rank``, ``device`` (where samples are sent); of records ``pad_output``,
            ``compression_fn``, ``decompression_fn``.

    Recorded values have precedence over defaults. A ``capacity``, ``alpha``, ``eps``, ``ndim``,
    ``storage`` or ``max_bytes`` that differs from the recorded one is an error; other values
    replace the recorded ones.

    Raises:
        BufferExistsError: a buffer exists and ``on_existing`` is "error".
        BufferInUseError: the directory has a coordinator, or is to be overwritten and is in use;
            ``pids``.
        BufferNotFoundError: nothing to recover, and no ``capacity`` to create one.
        SpaceError, ReadOnlyError, UnsafePathError, UnsafeFilesystemError, FormatError,
            CorruptBufferError, AttachTimeout: see there; nothing was changed, except that a
            SpaceError comes when the buffer to be overwritten is gone.
        ValueError: an argument is invalid, or differs from the recorded value.
        TypeError: an unknown argument.

    Cost: some milliseconds; torch is imported only with ``example``, or by ``buffer``.
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
        """Buffer of this process; the first access creates it, and imports torch."""
        self._check_open()
        if self._buffer is None:
            from shmbuffer.buffers.reopened import from_engine

            self._buffer = from_engine(self._engine, **self._options)
        return self._buffer

    @property
    def capacity(self) -> int:
        """Recorded capacity: the largest number of items."""
        return self._engine.settings.capacity

    @property
    def report(self) -> RecoveryReport | None:
        """Report of the recovery, if this coordinator has recovered the directory."""
        return self._engine.report

    @property
    def processes(self) -> list[Spawned]:
        """The spawned processes, in order: ``pid``, ``exitcode``, ``is_alive()``, ``kill()``."""
        return self._supervisor.processes

    @property
    def deaths(self) -> list[Death]:
        """Every client that has died since this coordinator began, spawned or not."""
        return list(self._supervisor.deaths)

    @property
    def metrics_port(self) -> int | None:
        """The port for Prometheus; None if metrics are not served."""
        return None if self._metrics is None else self._metrics.port

    @property
    def closed(self) -> bool:
        """True if ``close`` has been called."""
        return self._closed

    def stats(self) -> dict[str, Number]:
        """Returns a consistent flat dict of numbers; watch/stats.py has the table of its keys.

        Rates count from the last call. ``processes`` (spawned and running), ``deaths``,
        ``restarts`` and ``held_back_s`` (seconds in which the kernel throttled a writer) count
        from the start. Cost: some ten microseconds.
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
        """Starts ``n`` processes that run ``target(scratch_dir, index, *args)``, and watches them.

        The processes are spawned, not forked: ``target`` and ``args`` are pickled, the target is a
        function of a module, and a script needs its ``if __name__ == "__main__":``. With a target
        by name, ``"package.module:function"``, they import only that module, not the script; they
        warn if it imports torch, which the NumPy client does not need. The index counts from 0 in
        every call, in the order of the result. A target attaches by path, as a "collector". When
        the coordinator closes, SIGTERM raises SystemExit in it. If the coordinator is killed, the
        process runs until the next one spawns the same name (``orphans``), or ``shmbuffer stop``.

        When the target has ended, its ``atexit`` functions run, its threads are joined, and an
        attached buffer is closed. Then the process exits with ``os._exit``: close your files.

        If the first call raises and nothing has been written, closing the coordinator removes the
        buffer that it has created, so that the corrected program can create it.

        A death is reported (``deaths``, and a warning of the logger "shmbuffer.service"), and the
        claims of the process are released within milliseconds.

        Args:
            target: the function, or its name; the result is ignored.
            n: how many.
            *args: passed on, after the directory and the index.
            restart: if True, a process that dies is started again with the same index, unless it
                returned or ended on Ctrl-C. After two deaths in a row before 5 s, or in the
                same place, there is a growing pause, and one line instead of a traceback.
            orphans: what to do with processes of the same name that a killed coordinator of the
                directory has left running: "stop" ends them (SIGTERM, SIGKILL after ``grace_s``),
                with a warning; "adopt" keeps one for each index below ``n`` and ends the others;
                "leave" lets them run.
            name: of these processes, in ``deaths`` and for ``orphans``; by default the target's
                module and qualified name. Needed if two scripts share a directory.

        Raises:
            BufferUnlinkedError: the directory was removed, moved or replaced.
            BufferInUseError: an orphan in another container cannot be ended; ``pids``.
            ValueError: ``n`` is negative; an invalid ``orphans`` or name of a target.
            TypeError: the target or an argument cannot be pickled, or the named target cannot be
                called; the target or ``n`` has another type.
            ModuleNotFoundError, AttributeError: no module or function has that name.
            RuntimeError: a spawned process cannot import the main module of this program, or would
                run the program again: it has no ``if __name__ == "__main__":``.
            OSError: the system cannot start another process.

        Cost: some milliseconds each; the imports of the target happen in its process.
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
        """Rate limiter of all processes, or None."""
        self._check_open()
        return self._engine.limiter

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Changes the rate limiter of a running buffer, and returns it; None removes it.

            coordinator.set_rate(samples_per_insert=8)     # other settings stay
            coordinator.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        Waiting calls check the new limits at once. The ratio counts from now on; items that a queue
        has delivered stay delivered.

        Raises:
            TypeError: a limiter and changes, or neither; an unknown argument of `RateLimiter`.
            ValueError: see `RateLimiter`; ``min_size`` is larger than the buffer; or a prioritized
                buffer would be a queue.
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
        """Waits until no spawned process runs or is to be restarted; False after the timeout."""
        self._check_ours()
        return self._supervisor.join(timeout)

    def wait_for_deaths(self, count: int, timeout: float | None = None) -> bool:
        """Waits until ``deaths`` has ``count`` entries; False after the timeout."""
        self._check_ours()
        return self._supervisor.wait_for_deaths(count, timeout)

    def clients(self) -> list[Client]:
        """Returns the clients in the registry: this coordinator, and every attached process."""
        self._check_open()
        return self._engine.clients()

    def flush(self) -> None:
        """Writes all committed items to disk while writers continue; DurabilityError on failure."""
        self._check_open()
        self._engine.flush()

    def close(self) -> None:
        """Ends the run: stops spawned processes, leaves the directory, removes a temporary one.

        Other processes keep running. Idempotent; in a fork of this process it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with ExitStack() as steps:  # all of them, whichever fails
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
            "a Coordinator cannot be sent to another process; send its scratch_dir, and call "
            "attach() there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.processes)} processes"
        return f"<Coordinator {str(self.scratch_dir)!r} capacity={self.capacity} {state}>"

    def _check_ours(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedHandleError(
                f"{self.scratch_dir}: this coordinator belongs to process {self._pid}, from which "
                "this process was forked; call attach() in this process"
            )

    def _check_open(self) -> None:
        self._check_ours()
        if self._closed:
            raise BufferClosedError(f"{self.scratch_dir}: this coordinator is closed")
