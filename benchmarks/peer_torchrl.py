"""torchrl, as a benchmark sees a library; run by the interpreter of an environment that has it.

See `peer.py` for what it reads and writes. shmbuffer is not imported here: it need not even be
installed for that interpreter.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, ClassVar

from torchrl.data import (  # type: ignore[import-not-found, unused-ignore]
    LazyMemmapStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from benchmarks.collector import same
from benchmarks.library import ALPHA, BETA, LOADS, Local, Operation, fill


class TorchRL(Local):
    """Buffers over memory-mapped files, as torchrl's own documentation makes them.

    Shared with writers, the learner's buffer has ``sync=False``: a prioritized sampler of torchrl
    cannot be passed to another process otherwise.
    """

    name = "torchrl"
    forms: ClassVar[frozenset[str]] = frozenset({"TensorDict", "index", LOADS})
    modules: ClassVar[list[str]] = ["torchrl.data"]

    def versions(self) -> dict[str, str]:
        """See `Library.versions`."""
        return {name: _version(name) for name in ("torchrl", "torch", "tensordict", "numpy")}

    def make(self, directory: Path, capacity: int, prioritized: bool, **options: Any) -> Any:
        """See `Local.make`."""
        storage = LazyMemmapStorage(capacity, scratch_dir=str(directory))
        if not prioritized:
            return TensorDictReplayBuffer(storage=storage)
        return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, **options)

    def share(self, writers: int, count: int) -> None:
        """See `Library.share`."""
        self._directory = self._directory.with_name("shared")
        self._buffer = self.make(self._directory, self._capacity, True, sync=False)
        fill(self._buffer, self._kind, self._capacity)
        self._buffer.share()
        super().share(writers, count)

    def opener(self) -> Callable[[], Any]:
        """See `Local.opener`."""
        return functools.partial(same, self._buffer)

    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """See `Local.attaching`: a dump is what torchrl has in place of a directory."""
        dump = self._directory.with_name("dump")
        self._buffer.dumps(str(dump))
        return functools.partial(self._load, dump), lambda _: None

    def _load(self, dump: Path) -> Any:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=LazyMemmapStorage(self._capacity)
        )
        buffer.loads(str(dump))
        return buffer


def serve(library: Local, requests: IO[str], answers: IO[str]) -> None:
    """Do what is asked, until nobody asks any more."""
    for line in requests:
        request = json.loads(line)
        arguments = request["with"]
        if "operation" in arguments:
            arguments["operation"] = Operation(**arguments["operation"])
        try:
            answer = {"result": getattr(library, request["do"])(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    library.close()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


if __name__ == "__main__":
    # Locks that a buffer makes for itself are of the default context, and have to fit to its
    # processes.
    multiprocessing.set_start_method("forkserver", force=True)
    # What the library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(TorchRL(), sys.stdin, answers)
