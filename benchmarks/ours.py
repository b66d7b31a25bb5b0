"""shmbuffer as a compared library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import shmbuffer
from benchmarks.items import Kind
from benchmarks.library import (
    AFTER_WRITE,
    ALPHA,
    AS_IT_COMES,
    BEHIND_WRITES,
    BETA,
    BY_PRIORITY,
    BY_STALENESS,
    ELSEWHERE,
    FIRST_OF_PASS,
    FRAGMENTED,
    IN_FILES,
    IN_GROUPS,
    IN_MEMORY,
    IN_PLACE,
    IN_STREAMS,
    LAZY_STACK,
    LEVEL,
    LISTED,
    NESTED,
    PADDED,
    QUIET,
    READ,
    TENSORDICT,
    UNIFORM,
)
from benchmarks.recordings import Recording
from benchmarks.torchlike import BATCHES, TorchLike

#: Of `Operation.form` for attach: is anybody there already, and is a sample drawn at once.
BESIDE_OTHERS, AT_REST, AND_SAMPLE = "beside others", "nobody there", "beside others, and sample"

_LEAST_ROOM = 1 << 26  # bytes of a ring: any batch of a few hundred items fits


class ShmBuffer(TorchLike):
    """Buffers in a directory, shared by processes.

    Args:
        shared: False keeps buffers for items of any size in this process.
    """

    name = "shmbuffer"
    distributions = ("shmbuffer", "torch", "tensordict", "numpy")
    forms: ClassVar[frozenset[str]] = (
        BATCHES
        | {BESIDE_OTHERS, AT_REST, AND_SAMPLE, IN_PLACE, ELSEWHERE}
        | {AS_IT_COMES, READ, LISTED, PADDED, NESTED, QUIET, AFTER_WRITE, IN_MEMORY, IN_FILES}
        | {UNIFORM, BY_PRIORITY, FRAGMENTED, BY_STALENESS, IN_GROUPS, IN_STREAMS}
        | {BEHIND_WRITES, FIRST_OF_PASS}
    )
    hindsight = shmbuffer.HERReplayBuffer
    mixed = shmbuffer.OfflineToOnlineReplayBuffer
    plain, memory = shmbuffer.ReplayBuffer, shmbuffer.LazyTensorStorage
    windowed = (shmbuffer.TensorDictReplayBuffer, shmbuffer.Sequence)
    without_replacement = shmbuffer.SamplerWithoutReplacement
    slices = shmbuffer.SliceSampler, shmbuffer.PrioritizedSliceSampler
    labelled = shmbuffer.StalenessAwareSampler, shmbuffer.PromptGroupSampler
    streaming = shmbuffer.StreamingSliceSampler
    consuming = shmbuffer.ConsumingSampler
    has_streams = sees_others = True
    modules: ClassVar[list[str]] = ["shmbuffer.service.client", "shmbuffer.buffers"]

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        self._shared = shared
        self._others: list[shmbuffer.ReplayBuffer] = []

    def make(
        self, directory: Path, capacity: int, prioritized: bool, **options: Any
    ) -> shmbuffer.ReplayBuffer:
        """Implements `Local.make`."""
        storage = shmbuffer.LazyMemmapStorage(capacity, scratch_dir=directory)
        if not prioritized:
            return shmbuffer.TensorDictReplayBuffer(storage=storage, **options)
        return shmbuffer.TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=storage, **options
        )

    def make_for_records(
        self, directory: Path, capacity: int, storage: str
    ) -> shmbuffer.ReplayBuffer:
        """Implements `TorchLike.make_for_records`."""
        assert isinstance(self._recording, Recording)
        how: dict[str, Any] = {}
        if self._shared:
            room = max(_LEAST_ROOM, 2 * capacity * self._recording.mean_bytes)
            how = {"scratch_dir": directory, "max_bytes": room}
        if storage == LAZY_STACK:
            return shmbuffer.ReplayBuffer(storage=shmbuffer.LazyStackStorage(capacity, **how))
        how.update(compression_level=LEVEL)
        return shmbuffer.ReplayBuffer(storage=shmbuffer.CompressedListStorage(capacity, **how))

    def feeding(self, form: str) -> Callable[[int], object]:
        """Implements `TorchLike.feeding` with a buffer whose samples have this form."""
        assert self._recording is not None
        asked: float | Literal["nested"] = 0.0 if form == PADDED else "nested"
        if self._shared:
            other = shmbuffer.attach(self._directory, pad_output=asked)
        else:
            storage = shmbuffer.LazyStackStorage(self._capacity, pad_output=asked)
            other = shmbuffer.ReplayBuffer(storage=storage)
            self._recording.fill(other, self._capacity)
        self._others.append(other)
        return other.sample

    def data_set(self, directory: Path) -> shmbuffer.ReplayBuffer:
        """Implements `TorchLike.data_set`."""
        return shmbuffer.ReplayBuffer(storage=shmbuffer.ReadOnlyStorage(directory))

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Implements `Local.opener`."""
        return functools.partial(attach_to_write, self._directory)

    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Implements `TorchLike.attaching`."""
        release = shmbuffer.ReplayBuffer.close
        if form == BESIDE_OTHERS:
            return functools.partial(shmbuffer.attach, self._directory), release
        if form == AND_SAMPLE:
            return functools.partial(_attach_and_sample, self._directory), release
        alone = self._directory.with_name("alone")
        self.leave_full(alone, self._kind, self._capacity)
        return functools.partial(shmbuffer.attach, alone), release

    def saving(self, form: str) -> Callable[[], Any]:
        """Implements `TorchLike.saving`."""
        checkpoint = self._directory.with_name(f"checkpoint, {form}")
        buffer = self._buffer
        if form == IN_PLACE:
            buffer = self.make(checkpoint / "storage", self._capacity, self._prioritized)
            self._kind.fill(buffer.extend, self._capacity, TENSORDICT)
            self._others.append(buffer)
        return functools.partial(buffer.dumps, checkpoint)

    def leave_full(self, directory: Path, kind: Kind, capacity: int) -> None:
        """Creates a full prioritized buffer, and closes it."""
        with self.make(directory, capacity, True) as buffer:
            kind.fill(buffer.extend, capacity, TENSORDICT)

    def close(self) -> None:
        """Implements `Library.close`."""
        for other in self._others:
            other.close()
        self._others.clear()
        if self._buffer is not None:
            self._buffer.close()
        super().close()


def attach_to_write(directory: Path) -> Callable[[Any], object]:
    """Attaches to a buffer in a collector process; returns a function that writes a batch."""
    return shmbuffer.attach(directory).extend


def _attach_and_sample(directory: Path) -> shmbuffer.ReplayBuffer:
    buffer = shmbuffer.attach(directory)
    buffer.sample(256)
    return buffer
