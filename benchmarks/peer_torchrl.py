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

import torch
from torchrl.data import (  # type: ignore[import-not-found, unused-ignore]
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from benchmarks.collector import same
from benchmarks.library import (
    ALPHA,
    AS_IT_COMES,
    BETA,
    COMPRESSED,
    GIVEN_ZSTD,
    LEVEL,
    LISTED,
    LOADS,
    NESTED,
    PADDED,
    READ,
    Local,
    Operation,
)


class TorchRL(Local):
    """Buffers over memory-mapped files, as torchrl's own documentation makes them.

    Shared with writers, the learner's buffer has ``sync=False``: a prioritized sampler of torchrl
    cannot be passed to another process otherwise.
    """

    name = "torchrl"
    forms: ClassVar[frozenset[str]] = frozenset(
        {"TensorDict", "index", LOADS, AS_IT_COMES, READ, LISTED, PADDED, NESTED}
    )
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

    def make_for_records(self, directory: Path, capacity: int, storage: str) -> Any:
        """See `Local.make_for_records`; it has them in one process only."""
        if storage == COMPRESSED:
            return ReplayBuffer(storage=CompressedListStorage(capacity, compression_level=LEVEL))
        if storage == GIVEN_ZSTD:
            compress, decompress = _zstd()
            given = {"compression_fn": compress, "decompression_fn": decompress}
            return ReplayBuffer(storage=CompressedListStorage(capacity, **given))
        return ReplayBuffer(storage=LazyStackStorage(capacity))

    def feeding(self, form: str) -> Callable[[int], object]:
        """See `Local.feeding`."""
        make, sample = _padded if form == PADDED else _nested, self._buffer.sample
        return lambda count: make(sample(count))

    def share(self, writers: int, count: int) -> None:
        """See `Library.share`."""
        self._directory = self._directory.with_name("shared")
        self._buffer = self.make(self._directory, self._capacity, True, sync=False)
        self._kind.fill(self._buffer, self._capacity)
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


def _zstd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What its users would write, with the contexts kept."""
    import zstandard

    compressor, expander = zstandard.ZstdCompressor(LEVEL), zstandard.ZstdDecompressor()

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        content = compressor.compress(tensor.contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def decompress(content: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        expanded = bytearray(expander.decompress(content.numpy().tobytes()))
        return torch.frombuffer(expanded, dtype=metadata["dtype"]).reshape(metadata["shape"])

    return compress, decompress


def _padded(sample: Any) -> dict[str, Any]:
    """A sample of sequences as a network takes it."""
    lengths = torch.tensor([len(tokens) for tokens in sample.get("tokens", as_list=True)])
    return {
        "tokens": sample.get("tokens", as_padded_tensor=True),
        "logprobs": sample.get("logprobs", as_padded_tensor=True),
        "reward": sample.get("reward"),
        "mask": torch.arange(int(lengths.max())) < lengths[:, None],
    }


def _nested(sample: Any) -> Any:
    return sample.densify(layout=torch.jagged)


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
