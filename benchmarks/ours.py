"""shmbuffer, as a benchmark sees a library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import shmbuffer
from benchmarks.items import Kind
from benchmarks.library import ALPHA, BETA, Local, fill

#: Of `Operation.form` for attach: is anybody there already, and is a sample drawn at once.
BESIDE_OTHERS, AT_REST, AND_SAMPLE = "beside others", "nobody there", "beside others, and sample"


class ShmBuffer(Local):
    """Buffers in a directory, as several processes use them."""

    name = "shmbuffer"
    forms: ClassVar[frozenset[str]] = frozenset(
        {"TensorDict", "arrays", "index", BESIDE_OTHERS, AT_REST, AND_SAMPLE}
    )
    modules: ClassVar[list[str]] = ["shmbuffer.service.client", "shmbuffer.replay"]

    def versions(self) -> dict[str, str]:
        """See `Library.versions`."""
        return {name: _version(name) for name in ("shmbuffer", "torch", "tensordict", "numpy")}

    def make(self, directory: Path, capacity: int, prioritized: bool) -> shmbuffer.ReplayBuffer:
        """See `Local.make`."""
        storage = shmbuffer.LazyMemmapStorage(capacity, scratch_dir=directory)
        if not prioritized:
            return shmbuffer.TensorDictReplayBuffer(storage=storage)
        return shmbuffer.TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage)

    def opener(self) -> Callable[[], Any]:
        """See `Local.opener`."""
        return functools.partial(shmbuffer.attach, self._directory)

    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """See `Local.attaching`."""
        release = shmbuffer.ReplayBuffer.close
        if form == BESIDE_OTHERS:
            return self.opener(), release
        if form == AND_SAMPLE:
            return functools.partial(_attach_and_sample, self._directory), release
        alone = self._directory.with_name("alone")
        self.leave_full(alone, self._kind, self._capacity)
        return functools.partial(shmbuffer.attach, alone), release

    def leave_full(self, directory: Path, kind: Kind, capacity: int) -> None:
        """Make a full buffer, prioritized, and let go of it."""
        with self.make(directory, capacity, True) as buffer:
            fill(buffer, kind, capacity)

    def close(self) -> None:
        """See `Library.close`."""
        if self._buffer is not None:
            self._buffer.close()
        super().close()


def _attach_and_sample(directory: Path) -> shmbuffer.ReplayBuffer:
    buffer = shmbuffer.attach(directory)
    buffer.sample(256)
    return buffer


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from its source"
