"""Parts of buffers that owners and handles import by name in their own processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import (
    ProgressReport,
    RemoteTensorDictReplayBuffer,
    RoundRobinWriter,
    Sampler,
    TensorDictPrioritizedReplayBuffer,
)


def items(first: int, count: int) -> TensorDict:
    """Makes items with ``a`` i and ``obs`` [i, -i]."""
    a = torch.arange(first, first + count)
    return TensorDict({"a": a, "obs": torch.stack([a, -a], -1).float()}, [count])


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def doubled(data: TensorDict) -> TensorDict:
    """A transform that can be pickled."""
    return data.set("twice", data["a"] * 2)


class Scaled:
    """A transform with an inverse, which stores a tenth of each value."""

    def __call__(self, data: TensorDict) -> TensorDict:
        return data.set("obs", data["obs"] * 10)

    def inv(self, data: TensorDict) -> TensorDict:
        return data.clone(False).set("obs", data["obs"] / 10)


class Tied:
    """A transform that cannot leave its process, because locks cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, data: TensorDict) -> TensorDict:
        with self.lock:
            return data.set("pid", torch.full(data.batch_size, os.getpid()))


class Oldest(Sampler):
    """A user's sampler with state."""

    def __init__(self) -> None:
        self.at = 0

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        index = torch.arange(self.at, self.at + batch_size)
        self.at += batch_size
        return index, {}


class Told(Sampler):
    """A user's sampler that is notified of writes."""

    def extend(self, index: Any) -> None:
        self.heard = index


class Picky(RoundRobinWriter):
    """A user's writer."""

    def extend(self, data: Any) -> torch.Tensor:
        return super().extend(data[data["a"] % 2 == 0])


class Owned(TensorDictPrioritizedReplayBuffer):
    """A buffer with methods beyond those of the family."""

    motto = "nothing is lost"

    def pid(self) -> int:
        """Returns the pid of the process that runs the method."""
        return os.getpid()

    def fails(self) -> None:
        """Raises an error that can be pickled but not unpickled."""
        raise UnmadeError(1, 2)


class UnmadeError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class OwnSample(TensorDictPrioritizedReplayBuffer):
    """A buffer with its own way of drawing."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample(*args, **kwargs).set("mine", torch.tensor(1).expand(4))


class OwnedByRpc(RemoteTensorDictReplayBuffer):
    def pid(self) -> int:
        return os.getpid()


class Noting:
    """Records progress reports, in any process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, report: ProgressReport) -> None:
        with self.path.open("a") as notes:
            notes.write(f"{os.getpid()} {report.what} {report.fraction}\n")
