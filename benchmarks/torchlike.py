"""Calls of TorchRL's API, for shmbuffer and torchrl.

The peers import this module, so it must not import shmbuffer.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from benchmarks.library import (
    ALPHA,
    ARRAYS,
    BEHIND_WRITES,
    BETA,
    BY_PRIORITY,
    BY_STALENESS,
    FRAGMENTED,
    IN_FILES,
    IN_GROUPS,
    IN_STREAMS,
    INDEX,
    LISTED,
    MEMMAP,
    NESTED,
    OUT,
    PADDED,
    QUIET,
    READ,
    TENSORDICT,
    TRANSFORMED,
    WINDOW,
    Loop,
    Operation,
)
from benchmarks.local import Call, Local
from benchmarks.measure import Timed
from benchmarks.recordings import RECORDINGS, Recording

_CHUNK = 1 << 16  # items that are written together to fill a buffer
#: Of `Operation.form`: how shmbuffer takes and gives batches of fixed size.
BATCHES = frozenset({TENSORDICT, ARRAYS, INDEX, OUT})


class TorchLike(Local):
    """A library with TorchRL's API, in this process."""

    forms: ClassVar[frozenset[str]]
    """Supported values of `Operation.form`."""
    hindsight: ClassVar[type[Any]]
    """Class of a buffer with hindsight."""
    mixed: ClassVar[type[Any]]
    """Class of a buffer with a data set; `plain` and `memory` are a buffer and a storage."""
    plain: ClassVar[type[Any]]
    memory: ClassVar[type[Any]]
    windowed: ClassVar[tuple[type[Any], type[Any]]]
    """Class of a buffer with a sample unit, and of the unit of windows."""
    slices: ClassVar[tuple[type[Any], type[Any]]]
    """Classes of samplers of slices: uniform and by priority."""
    without_replacement: ClassVar[type[Any]]
    """Class of the sampler without replacement."""
    consuming: Any = None
    labelled: ClassVar[tuple[type[Any], type[Any]]]
    """Classes of samplers by staleness and of groups."""
    streaming: ClassVar[type[Any]]
    """Class of the sampler of streams."""
    has_streams: ClassVar[bool]
    """True if items of several environments can be interleaved."""
    sees_others: ClassVar[bool]
    """True if samplers of groups and windows include items that another process writes."""
    batches = TENSORDICT
    most_writers = 16

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._recording: Recording | None = None
        self._cut_up: Path | None = None  # the buffer whose items are in episodes
        self._writers: dict[
            Operation, tuple[Any, Any]
        ] = {}  # processes, and whether they may write

    @abstractmethod
    def make_for_records(self, directory: Path, capacity: int, storage: str) -> Any:
        """Creates an empty buffer for items of any size."""

    @abstractmethod
    def feeding(self, form: str) -> Callable[[int], object]:
        """Returns a function that samples items of any size, PADDED or NESTED."""

    @abstractmethod
    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Returns functions that open the buffer again in this process, and that close it."""

    @abstractmethod
    def saving(self, form: str) -> Callable[[], Any]:
        """Returns a function that saves the buffer durably."""

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Implements `Library.open`."""
        if storage == MEMMAP:
            self._recording = None
            return super().open(directory, kind, capacity, prioritized)
        self._recording = RECORDINGS[kind]
        self._capacity = capacity
        self._prioritized = False
        self._directory = Path(directory) / "buffer"
        self._buffer = self.make_for_records(self._directory, capacity, storage)
        self._recording.fill(self._buffer, capacity)
        return True

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        if operation.call in ("loop", "step"):
            sample, work = self._in_loop(operation)
            timed = (sample, [()], block_s, work)
            if operation.call == "step":
                timed = (lambda: work(sample()), [()], block_s, None)
            self._timed[operation] = Timed(*timed)
            return True
        if operation.call not in ("attach", "save"):
            return super().prepare(operation, block_s)
        if operation.form not in self.forms:
            return False
        if operation.call == "attach":
            call, release = self.attaching(operation.form)
        else:
            call, release = self.saving(operation.form), _nothing
        self._timed[operation] = Timed(call, [()], block_s, release)
        return True

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Implements `Library.round`; a writer of the operation writes meanwhile."""
        if operation not in self._writers:
            return super().round(operation, blocks)
        _, goes = self._writers[operation]
        goes.set()
        try:
            return super().round(operation, blocks)
        finally:
            goes.clear()

    def close(self) -> None:
        """Implements `Library.close`."""
        for writer, _ in self._writers.values():
            writer.kill()
            writer.join()
        self._writers.clear()
        super().close()

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        if operation.form not in self.forms:
            return None
        buffer, count, form = self._buffer, operation.count, operation.form
        match operation.call:
            case "add":
                return buffer.add, self._batches(0, form)
            case "extend":
                return buffer.extend, self._batches(count, form)
            case "reserve" if hasattr(buffer, "reserve"):
                return partial(_reserve, buffer, count), self._batches(count, form)
            case "reserve":
                return None
            case "consume":
                return self._consuming(count)
            case "sample" if form == ARRAYS:
                return None
            case "sample" if form == OUT:
                return _sampling_into(buffer, count)
            case "sample":
                return self._sampling(form), [(count,)]
            case "hindsight":
                return self._in_hindsight(count, form)
            case "mixed":
                return self._mixture(form).sample, [(count,)]
            case "windows":
                return self._in_windows(count, form)
            case "slices":
                return self._in_slices(count, form)
            case "passes":
                return self._in_passes(count, form)
            case "labelled":
                return self._by_label(count, form)
            case "beside":
                return self._beside_a_writer(operation)
            case "update":
                sets = zip(self.indices(count), self.raw_priorities(count), strict=True)
                return buffer.update_priority, list(sets)
            case "cycle":
                return _cycle(buffer, count, form), [(raw,) for raw in self.raw_priorities(count)]
        raise ValueError(f"no operation {operation.call!r}")

    def raw_priorities(self, count: int) -> list[Any]:
        """Implements `Local.raw_priorities` with tensors."""
        return [torch.from_numpy(raw) for raw in super().raw_priorities(count)]

    def indices(self, count: int) -> list[Any]:
        """Implements `Local.indices` with tensors."""
        return [torch.from_numpy(index) for index in super().indices(count)]

    def shrinks(self) -> float:
        """Implements `Library.shrinks` for items of equal size."""
        assert self._recording is not None
        return len(self._buffer) * self._recording.mean_bytes / float(self._buffer.storage.bytes())

    def _in_loop(self, operation: Operation) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Returns functions that sample a batch in a learner's loop, and that work on it."""
        loop = Loop.parse(operation.form)
        options: dict[str, Any] = {"batch_size": operation.count, "prefetch": loop.prefetch or None}
        if loop.what == BY_PRIORITY:
            directory = self._directory.parent / f"loop-{len(self._timed)}"
            buffer = self.make(directory, self._capacity, True, **options)
            self.fill(buffer, self._capacity)
        else:
            if loop.what == TRANSFORMED:
                options["transform"] = _normalized
            buffer = self.windowed[0](storage=self._buffer.storage, **options)
        learn = _work(loop.work_ms / 1000)

        def work(batch: Any) -> None:
            if loop.what == BY_PRIORITY:
                batch["td_error"] = batch["reward"]
                buffer.update_tensordict_priority(batch)
            learn()

        return buffer.sample, work

    def _in_hindsight(self, count: int, form: str) -> Call:
        buffer = self._in_episodes()
        other = self.hindsight(
            _achieved,
            goal_key="obs",
            achieved_goal_key="next_obs",
            reward_key="reward",
            end_key="done",
            storage=buffer.storage,
        )
        return self._with_writes(other, count, form)

    def _in_windows(self, count: int, form: str) -> Call:
        buffer, (cls, unit) = self._in_episodes(), self.windowed
        window = unit(WINDOW[1], done_key="done", burn_in=WINDOW[0], bootstrap=WINDOW[2])
        return self._with_writes(cls(storage=buffer.storage, sample_unit=window), count, form)

    def _in_episodes(self) -> Any:
        """Returns the buffer, with items in episodes of a hundred steps."""
        if self._cut_up != self._directory:
            self._buffer.set_("done", torch.arange(self._capacity) % 100 == 99)
            self._cut_up = self._directory
        return self._buffer

    def _with_writes(self, other: Any, count: int, form: str) -> Call:
        """Returns a function that samples another buffer of the storage, also after a write."""
        buffer, items = self._buffer, self._batches(0, TENSORDICT)
        buffer.add(*items[0])  # behind a batch torchrl finds no episodes in a buffer that is full
        if form == QUIET:
            return other.sample, [(count,)]

        def written(item: Any) -> None:
            buffer.add(item)
            other.sample(count)

        return written, items

    @abstractmethod
    def data_set(self, directory: Path) -> Any:
        """Opens the files of a TensorDict in a directory as a buffer."""

    def _mixture(self, form: str) -> Any:
        """Returns a buffer with a data set and as many collected items."""

        def filled(buffer: Any) -> Any:
            self._kind.fill(buffer.extend, self._capacity, TENSORDICT)
            return buffer

        data = filled(self.plain(storage=self.memory(self._capacity)))
        if form == IN_FILES:
            files = self._directory.with_name("data set")
            data[:].memmap(str(files), copy_existing=True)
            data = self.data_set(files)
        return filled(self.mixed(data, online_capacity=self._capacity, offline_fraction=0.5))

    def _in_slices(self, count: int, form: str) -> Call:
        uniform, by_priority = self.slices
        keys: dict[str, Any] = {"slice_len": 16, "end_key": "done"}
        if form == FRAGMENTED:
            keys = {"slice_len": 16, "traj_key": "id", "step_key": "step", "fragmented": True}
        sampler = uniform(**keys)
        if form == BY_PRIORITY:
            sampler = by_priority(self._capacity, ALPHA, BETA, **keys)
        directory = self._directory.parent / f"slices-{form}"
        buffer = self.make(directory, self._capacity, False)
        buffer.set_sampler(sampler)
        chunk = min(self._capacity, _CHUNK)
        filled = -(-self._capacity // chunk) * chunk
        for first in range(0, filled, chunk):
            self._write_steps(buffer, first, chunk)
        steps = itertools.count(filled, 32)

        def written() -> None:
            self._write_steps(buffer, next(steps), 32)
            buffer.sample(count)

        return written, [()]

    def _in_passes(self, count: int, form: str) -> Call:
        other = self.plain(storage=self._buffer.storage, sampler=self.without_replacement())
        items = self._batches(32, TENSORDICT)
        other.sample(count)

        def written(data: Any) -> None:
            other.extend(data)
            other.sample(count)

        def first() -> None:
            other.set_sampler(self.without_replacement())
            other.sample(count)

        return (written, items) if form == BEHIND_WRITES else (first, [()])

    def _by_label(self, count: int, form: str) -> Call:
        buffer, filled = self._labelled(count, form, form)
        steps = itertools.count(filled, 32)

        def written() -> None:
            first = next(steps)
            if form == BY_STALENESS:
                buffer.sampler.consumer_version = first // 1000 + 1
            self._write_labelled(buffer, first, 32)
            buffer.sample(count)

        return written, [()]

    def _beside_a_writer(self, operation: Operation) -> Call | None:
        """Returns a sample beside a writer process; None if the sampler does not see its items."""
        count, form = operation.count, operation.form
        if form in (IN_GROUPS, IN_STREAMS) and not self.sees_others:
            return None
        buffer, filled = self._labelled(count, form, f"{form} beside")
        if form == BY_STALENESS:
            buffer.sampler.consumer_version = filled // 1000 + 1
        context = multiprocessing.get_context("fork")
        goes = context.Event()
        args = buffer, filled, goes
        writer = context.Process(target=self._write_in_time, args=args, daemon=True)
        writer.start()
        self._writers[operation] = writer, goes
        return buffer.sample, [(count,)]

    def _labelled(self, count: int, form: str, name: str) -> tuple[Any, int]:
        """Returns a full buffer of items with versions and groups, and the number of writes."""
        by_staleness, in_groups = self.labelled
        buffer = self.make(self._directory.parent / name.replace(" ", "-"), self._capacity, False)
        if form == BY_STALENESS:
            buffer.set_sampler(by_staleness())
        elif form == IN_STREAMS:
            buffer.set_sampler(self.streaming(slice_len=16))
        elif form == IN_GROUPS:
            buffer.set_sampler(in_groups(num_groups=count // 8, group_key="group"))
        chunk = min(self._capacity, _CHUNK)
        filled = -(-self._capacity // chunk) * chunk
        for first in range(0, filled, chunk):
            self._write_labelled(buffer, first, chunk)
        return buffer, filled

    def _write_in_time(self, buffer: Any, first: int, goes: Any) -> None:
        """Writes 32 items every 100 µs, or as fast as possible, while the event is set."""
        due = 0.0
        for number in itertools.count(first, 32):
            goes.wait()
            while (now := time.perf_counter()) < due:
                pass
            due = now + 1e-4
            self._write_labelled(buffer, number, 32, version=first // 1000)

    def _consuming(self, count: int) -> Call | None:
        """Returns a function that writes, samples and acknowledges; None without consumers."""
        if self.consuming is None:
            return None
        buffer = self.make(self._directory.parent / "consumed", self._capacity, False)
        buffer.set_sampler(self.consuming())

        def consumed(data: Any) -> None:
            buffer.extend(data)
            buffer.ack(buffer.sample(count, lease=60))

        return consumed, self._batches(count, TENSORDICT)

    def _write_labelled(
        self, buffer: Any, first: int, count: int, version: int | None = None
    ) -> None:
        """Writes items like collectors whose versions differ by up to sixteen."""
        number = torch.arange(first, first + count)
        newest = number // 1000 if version is None else torch.full([count], version)
        data = {
            "obs": torch.zeros(count, 16),
            "policy_version": (newest - number // 32 % 16).clamp(min=0),
            "group": number // 8,
            ("next", "done"): (number % 200 == 199).unsqueeze(-1),
        }
        buffer.extend(TensorDict(data, [count]))

    def _write_steps(self, buffer: Any, first: int, count: int) -> None:
        """Writes steps of sixteen environments in turn."""
        number = torch.arange(first, first + count)
        env, time = number % 16, number // 16
        step = time % 200
        data = TensorDict(
            {
                "obs": torch.zeros(count, 8),
                "id": time // 200 * 16 + env,
                "step": step,
                "done": (step == 199).unsqueeze(-1),
                ("next", "done"): (step == 199).unsqueeze(-1),
            },
            [count],
        )
        how = {"streams": env.numpy()} if self.has_streams else {}
        buffer.extend(data, **how)

    def _batches(self, count: int, form: str) -> list[tuple[Any, ...]]:
        made = self._kind if self._recording is None else self._recording
        return [(batch,) for batch in made.batches(count, form)]

    def _sampling(self, form: str) -> Callable[[int], object]:
        if form in (PADDED, NESTED):
            return self.feeding(form)
        sample: Callable[[int], object] = self._buffer.sample
        if form not in (READ, LISTED):
            return sample
        how = {"as_list": True} if form == LISTED else {}
        return lambda count: _entries_of(sample(count), how)


def _sampling_into(buffer: Any, count: int) -> Call | None:
    """Returns a function that samples into an existing batch; None without ``out=``."""
    if "out" not in inspect.signature(buffer.sample).parameters:
        return None
    batch = buffer.sample(count)
    return (lambda: buffer.sample(count, out=batch)), [()]


def _reserve(buffer: Any, count: int, data: Any) -> object:
    return buffer.reserve(count).commit(data)


def _achieved(rows: Any) -> torch.Tensor:
    """Returns the reward for reaching a goal."""
    return torch.eq(rows["obs"], rows["next_obs"]).all(-1).float()


def _normalized(batch: Any) -> Any:
    """Transforms a batch with some hundred torch operations, like several transforms."""
    for _ in range(20):
        batch["obs"] = (batch["obs"] - batch["obs"].mean()) / (batch["obs"].std() + 1e-6)
    return batch


def _work(seconds: float) -> Callable[[], None]:
    """Returns a function whose torch operations take ``seconds`` on an idle processor."""
    matrix = torch.rand(64, 64)

    def work(count: int) -> None:
        found = matrix
        for _ in range(count):
            found = (found @ matrix).clamp(0, 1)

    def took() -> float:
        began = time.perf_counter()
        work(100)
        return (time.perf_counter() - began) / 100

    return partial(work, round(seconds / min(took() for _ in range(30))))


def _nothing(_: Any) -> None:
    """Does nothing, so that calls are timed one by one."""


def _entries_of(sample: Any, how: dict[str, bool]) -> dict[str, Any]:
    """Returns the entries of a sample; tensors of a lazy stack are stacked or listed."""
    return {key: sample.get(key, **how) for key in sample.keys()}  # noqa: SIM118


def _cycle(buffer: Any, count: int, form: str) -> Callable[[torch.Tensor], Any]:
    """Returns a function with the buffer calls of a learner's step."""

    def by_index(raw: torch.Tensor) -> None:
        sample = buffer.sample(count)
        buffer.update_priority(sample["index"], raw)

    def by_tensordict(raw: torch.Tensor) -> None:
        sample = buffer.sample(count)
        sample.set("td_error", raw)
        buffer.update_tensordict_priority(sample)

    return by_index if form == INDEX else by_tensordict
