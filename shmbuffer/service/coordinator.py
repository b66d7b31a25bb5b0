"""The coordinator: makes or recovers the directory, starts and supervises collectors, ends the run.

     coordinator ──creates, recovers──▶ directory ◀──attach── collectors, learners
          └──spawns, watches, reaps, restarts──▶ collectors

It is in nobody's data path. When it is killed, collectors and learners go on; a new coordinator
with ``on_existing="recover"`` takes over the same directory while they run, and with it the
ownership of a temporary one.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVarTuple, get_args

from shmbuffer.errors import BufferClosedError, ForkedHandleError
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.prefault import Prefault
from shmbuffer.service.buffer_config import ALPHA, BETA, EPS, BufferConfig, split
from shmbuffer.service.orphans import Orphans
from shmbuffer.service.spawned import Spawned
from shmbuffer.service.supervisor import Supervisor
from shmbuffer.service.tenure import OnExisting, Tenure
from shmbuffer.watch.historian import Death
from shmbuffer.watch.metrics import MetricsServer, metrics_of
from shmbuffer.watch.stats import Meter, Number

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from shmbuffer.memory.progress import OnProgress
    from shmbuffer.memory.recovery_report import RecoveryReport
    from shmbuffer.memory.registry import Client
    from shmbuffer.replay.buffers import ReplayBuffer

_Ts = TypeVarTuple("_Ts")


class Coordinator:
    """Owns a shared buffer for the length of a run.

        with Coordinator("run/buffer", capacity=1_000_000, batch_size=256) as coordinator:
            coordinator.spawn(collect, 4, restart=True)
            train(coordinator.buffer)

    The buffer is a ``TensorDictPrioritizedReplayBuffer``, or, with ``alpha=None``, a
    ``TensorDictReplayBuffer``; it is recorded in the directory, so ``attach`` finds the same. Close
    the coordinator, or use ``with``; the end of the interpreter closes it too, and so does SIGTERM
    once it has spawned a process. Every method of a closed one is a BufferClosedError.

    Args:
        scratch_dir: the directory; None makes a temporary one, which is removed in the end.
        capacity: how many items there is room for. Needed where the buffer is created; with
            ``on_existing="recover"`` it may be left out, and is checked where it is given.
        alpha: priority exponent, 0.6 unless given; None for a buffer without priorities.
        beta: exponent of the importance weights, 0.4 unless given.
        eps: added to every priority, 1e-8 unless given.
        batch_size: what ``sample()`` draws; recorded, so ``attach`` draws the same.
        priority_key: where priorities lie in a tensordict, "td_error" unless given.
        on_existing: what to do with a buffer that is there: "error"; "recover" it, or take it over
            where somebody alive uses it; "overwrite": remove it and create a new one.
        auto_cleanup: whether the end of the coordinator removes the buffer's files, and the
            directory if it was made for them. None: only if it is a temporary one.
        example: a tensordict like one item of the buffer, or like a batch of them: the files are
            made at once, so too little space is an error here and not at the first write.
        ndim: leading dimensions of a batch that the storage has (TorchRL's); 1 unless given.
        storage: where the items lie: "LazyMemmapStorage" unless given, for items of one form;
            "LazyStackStorage" for items of any shapes, "CompressedListStorage" for compressed ones.
        max_bytes: room of these two in bytes; needed where the buffer is created.
        checksum: whether items get one; without it nothing is promised for a power cut.
        reserve: whether all space is reserved when the files are made.
        timeout: seconds to wait for another process that creates or recovers the directory now.
        grace_s: seconds between SIGTERM and SIGKILL for what was spawned, at the close.
        metrics_port: serve ``http://127.0.0.1:PORT/metrics`` for Prometheus; 0 takes a free port,
            which ``metrics_port`` says. Needs the extra "metrics".
        prefault: have the pages of the buffer made before they are needed, by this process: "off";
            "background", once the files are there; "full", where they are there already or
            ``example`` makes them, waits for it. See docs/memory.md.
        on_progress: called with a `ProgressReport` some times a second, while the directory is
            recovered and while pages are made, in the thread that does it. What it raises comes
            out of this call, if it waits for that work.
        rate_limiter: what keeps writers and samplers in step, or makes a queue of the buffer, for
            all processes. None leaves what is set in the directory, and logs it.
        **options: further arguments of the buffer, as TorchRL's. Fixed: `LazyMemmapStorage`'s
            ``share_next`` and ``share_next_room``. Recorded, for everybody: ``weight_key``,
            ``reduction``, ``dim_extend``; of records ``stack_dim``, ``compression_level``,
            ``compress``, ``dictionary_bytes``, ``share_frames``. For ``buffer`` alone: ``sampler``,
            ``sample_unit``, ``transform``, ``collate_fn``, ``pin_memory``, ``prefetch``,
            ``generator``, ``rank``; of records ``device``, ``pad_output``, ``compression_fn``,
            ``decompression_fn``. Others give theirs to ``attach``.

    Values that were recorded when the buffer was created win over defaults. A ``capacity``,
    ``alpha``, ``eps``, ``ndim``, ``storage`` or ``max_bytes`` that is given and differs is an
    error; any other that is recorded and given takes the place of the old one.

    Raises:
        BufferExistsError: there is a buffer and ``on_existing`` is "error".
        BufferInUseError: the directory has a coordinator already, or is to be overwritten and is in
            use; ``pids``.
        BufferNotFoundError: nothing to recover, and no ``capacity`` to create one.
        SpaceError, ReadOnlyError, UnsafePathError, UnsafeFilesystemError, FormatError,
            CorruptBufferError, AttachTimeout: as their names say; nothing was changed.
        ValueError: an argument makes no sense, or differs from what is recorded.
        TypeError: there is no such argument.

    Cost: some milliseconds; torch is imported only with ``example`` or when ``buffer`` is first
        asked for.
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
        reserve: bool = True,
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
            **split(options),
        )
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._options = options
        self._buffer: ReplayBuffer | None = None
        with ExitStack() as undo:
            self._tenure = Tenure(
                scratch_dir,
                config,
                existing=on_existing,
                auto_cleanup=auto_cleanup,
                limiter=rate_limiter,
                timeout=timeout,
                prefault=Prefault(prefault, on_progress),
            )
            undo.callback(self._tenure.abandon)
            self._engine, self.scratch_dir = self._tenure.engine, self._tenure.path
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
            self._tenure.begin()
            undo.pop_all()
        atexit.register(self.close)

    # ---- what is there ----

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer, for this process; made when it is first asked for, which imports torch."""
        self._check_open()
        if self._buffer is None:
            from shmbuffer.replay.buffers.reopened import from_engine

            self._buffer = from_engine(self._engine, **self._options)
        return self._buffer

    @property
    def capacity(self) -> int:
        """How many items there is room for, as recorded."""
        return self._engine.settings.capacity

    @property
    def report(self) -> RecoveryReport | None:
        """What recovery found and did, if this coordinator's start recovered the directory."""
        return self._engine.report

    @property
    def processes(self) -> list[Spawned]:
        """What was spawned, in order: ``pid``, ``exitcode``, ``is_alive()``, ``kill()``."""
        return self._supervisor.processes

    @property
    def deaths(self) -> list[Death]:
        """Every client that died since this coordinator began, spawned by it or not."""
        return list(self._supervisor.deaths)

    @property
    def metrics_port(self) -> int | None:
        """Where Prometheus finds the numbers; None if they are not served."""
        return None if self._metrics is None else self._metrics.port

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    def stats(self) -> dict[str, Number]:
        """Returns one consistent flat dict of numbers; watch/stats.py has the table of its keys.

        Rates are those since the call before. Added to it, since this coordinator began:
        ``processes`` (spawned and running), ``deaths``, ``restarts``, and ``held_back_s``, seconds
        in which the kernel held a writer back because a disk was behind. Cost: some ten
        microseconds.
        """
        self._check_open()
        return self._meter.read() | self._supervisor.counts()

    # ---- what it does ----

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

        The processes are spawned, not forked: ``target`` and ``args`` are pickled, so the target is
        a function of a module, and a script that spawns needs its ``if __name__ == "__main__":``.
        Of a target by name, ``"package.module:function"``, they import that module alone, not the
        script; if that imports torch, which a collector with the NumPy client does not need, the
        first of them warns. The index counts from 0 in every call; what is returned has its order.
        A target attaches by path, as a "collector". It gets SIGTERM when the coordinator closes,
        which unwinds it as SystemExit does; if the coordinator is killed, it goes on, until the
        next one spawns the same name (``orphans``), or ``shmbuffer stop``.

        When the target has ended, its ``atexit`` functions run, its threads are waited for, and an
        attached buffer leaves. Then the process is gone (``os._exit``): close files that you write.

        A process that dies is reported (``deaths``, and a warning of the logger
        "shmbuffer.service"), and what it had claimed is free again within milliseconds.

        Args:
            target: what to run, or its name; the result is ignored.
            n: how many.
            *args: passed on, after the directory and the index.
            restart: whether one that dies is started again, with the same index. One that returns,
                or ends on Ctrl-C, is done. After the second death in a row at an age below 5 s, or
                in the same place, there is a growing pause, and one line in place of a traceback.
            orphans: what to do with processes that a killed coordinator of the directory has
                spawned under the same name, and that run on: "stop" ends all of them first
                (SIGTERM, SIGKILL after ``grace_s``), with a warning; "adopt" keeps one for each
                index below ``n``, ends the others, starts what is missing; "leave" lets them run.
            name: of these processes, in ``deaths`` and for ``orphans``; the target's module and
                qualified name unless given. Give one where two scripts share a directory.

        Raises:
            BufferUnlinkedError: the directory was removed, moved or replaced.
            BufferInUseError: an orphan in another container cannot be ended from here; ``pids``.
            ValueError: ``n`` is negative; there is no such ``orphans``; a name that is none.
            TypeError: the target or an argument cannot be pickled, or what is named not called.
            ModuleNotFoundError, AttributeError: no module, or no function, of that name.
            RuntimeError: a spawned process cannot import the main module of this program, or would
                run the program again: it has no ``if __name__ == "__main__":``.
            OSError: the system has no room for another process.

        Cost: some milliseconds each; the imports of the target happen in its process.
        """
        if n < 0:
            raise ValueError(f"n is a number of processes, not {n}")
        if orphans not in get_args(Orphans):
            raise ValueError(f"orphans is 'stop', 'adopt' or 'leave', not {orphans!r}")
        self._check_open()
        return self._supervisor.spawn(target, n, args, restart=restart, orphans=orphans, name=name)

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """What keeps writers and samplers in step, for all processes; None: nothing."""
        self._check_open()
        return self._engine.limiter

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Changes what keeps writers and samplers in step, while everything runs.

            coordinator.set_rate(samples_per_insert=8)     # the rest stays as it is
            coordinator.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        With None nothing limits any more. Waiting calls look again at once. The ratio counts from
        now on; what a queue has handed out stays so. Returns what is set now.

        Raises:
            TypeError: a limiter and changes, or neither; no such argument of `RateLimiter`.
            ValueError: see `RateLimiter`; ``min_size`` is larger than the buffer; or a queue, where
                there are priorities.
        """
        self._check_open()
        if bool(changes) == (limiter is not ...):
            raise TypeError("set_rate() takes a RateLimiter (or None), or changes to what is set")
        if isinstance(limiter, EllipsisType):
            limiter = (self._engine.limiter or RateLimiter()).changed(**changes)
        self._engine.set_limiter(limiter)
        return self._engine.limiter

    def join(self, timeout: float | None = None) -> bool:
        """Waits, seconds or for ever, until nothing spawned runs or is to; whether that is so."""
        return self._supervisor.join(timeout)

    def wait_for_deaths(self, count: int, timeout: float | None = None) -> bool:
        """Waits, seconds or for ever, until ``deaths`` has ``count`` entries; whether it has."""
        return self._supervisor.wait_for_deaths(count, timeout)

    def clients(self) -> list[Client]:
        """Returns who is in the registry: this coordinator, and every process that has attached."""
        self._check_open()
        return self._engine.clients()

    def flush(self) -> None:
        """Makes everything committed so far survive a power cut.

        Raises:
            DurabilityError: the file system failed to write.

        Cost: one write-back of what changed since the last; writers go on meanwhile.
        """
        self._check_open()
        self._engine.flush()

    def close(self) -> None:
        """Ends the run: stops what was spawned, leaves the directory, removes a temporary one.

        Everybody else goes on, and so does a buffer in a directory of the user's. Idempotent; in a
        fork of this process it does nothing.
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
                steps.callback(self._tenure.leave)
                steps.callback(self._supervisor.stop)
                if self._metrics is not None:
                    steps.callback(self._metrics.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Coordinator stays in its process; pass its scratch_dir, and attach() there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.processes)} processes"
        return f"<Coordinator {str(self.scratch_dir)!r} capacity={self.capacity} {state}>"

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedHandleError(
                f"{self.scratch_dir}: this coordinator belongs to process {self._pid}, from which "
                "this one was forked; attach() here"
            )
        if self._closed:
            raise BufferClosedError(f"{self.scratch_dir}: this coordinator is closed")
