"""torchrl: buffers with memory-mapped files, created as in its documentation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torchrl.data import (  # type: ignore[import-not-found, unused-ignore]
    CompressedListStorage,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers.samplers import (  # type: ignore[import-not-found, unused-ignore]
    PromptGroupSampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
)

from benchmarks.library import (
    AFTER_WRITE,
    ALPHA,
    AS_IT_COMES,
    BEHIND_WRITES,
    BETA,
    BY_PRIORITY,
    BY_STALENESS,
    COMPRESSED,
    ELSEWHERE,
    FIRST_OF_PASS,
    GIVEN_ZSTD,
    IN_FILES,
    IN_GROUPS,
    IN_MEMORY,
    IN_PLACE,
    IN_STREAMS,
    INDEX,
    LEVEL,
    LISTED,
    LOADS,
    NESTED,
    PADDED,
    QUIET,
    READ,
    TENSORDICT,
    UNIFORM,
)
from benchmarks.served import serve
from benchmarks.torchlike import TorchLike


class TorchRL(TorchLike):
    """Buffers with memory-mapped files.

    A buffer that is shared with writers has ``sync=False``, because torchrl's prioritized sampler
    cannot be passed to another process otherwise. The priorities of writers are ignored.
    """

    name = "torchrl"
    distributions = ("torchrl", "torch", "tensordict", "numpy")
    forms: ClassVar[frozenset[str]] = frozenset(
        {TENSORDICT, INDEX, LOADS, AS_IT_COMES, READ, LISTED, PADDED, NESTED}
        | {IN_PLACE, ELSEWHERE, QUIET, AFTER_WRITE, IN_MEMORY, IN_FILES}
        | {UNIFORM, BY_PRIORITY, BY_STALENESS, IN_GROUPS, IN_STREAMS}
        | {BEHIND_WRITES, FIRST_OF_PASS}
    )
    hindsight = HERReplayBuffer
    mixed = OfflineToOnlineReplayBuffer
    plain, memory = ReplayBuffer, LazyTensorStorage
    windowed = (TensorDictReplayBuffer, Sequence)
    without_replacement = SamplerWithoutReplacement
    slices = SliceSampler, PrioritizedSliceSampler
    labelled = StalenessAwareSampler, PromptGroupSampler
    streaming = StreamingSliceSampler
    has_streams = sees_others = False
    modules: ClassVar[list[str]] = ["torchrl.data"]

    def make(self, directory: Path, capacity: int, prioritized: bool, **options: Any) -> Any:
        """Implements `Local.make`."""
        storage = LazyMemmapStorage(capacity, scratch_dir=str(directory))
        if not prioritized:
            return TensorDictReplayBuffer(storage=storage, **options)
        return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, **options)

    def make_for_records(self, directory: Path, capacity: int, storage: str) -> Any:
        """Implements `TorchLike.make_for_records`, for one process only."""
        if storage == COMPRESSED:
            return ReplayBuffer(storage=CompressedListStorage(capacity, compression_level=LEVEL))
        if storage == GIVEN_ZSTD:
            compress, decompress = _zstd()
            given = {"compression_fn": compress, "decompression_fn": decompress}
            return ReplayBuffer(storage=CompressedListStorage(capacity, **given))
        return ReplayBuffer(storage=LazyStackStorage(capacity))

    def feeding(self, form: str) -> Callable[[int], object]:
        """Implements `TorchLike.feeding`."""
        make, sample = _padded if form == PADDED else _nested, self._buffer.sample
        return lambda count: make(sample(count))

    def data_set(self, directory: Path) -> Any:
        """Implements `TorchLike.data_set`."""
        return ReplayBuffer(storage=TensorStorage(TensorDict.load_memmap(str(directory))))

    def share(self, writers: int, count: int) -> int:
        """Implements `Library.share`."""
        self._directory = self._directory.with_name("shared")
        self._buffer = self.make(self._directory, self._capacity, True, sync=False)
        self.fill(self._buffer, self._capacity)
        self._buffer.share()
        return super().share(writers, count)

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Implements `Local.opener`."""
        return functools.partial(_writing, self._buffer)

    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Implements `TorchLike.attaching` by loading a dump."""
        dump = self._directory.with_name("dump")
        self._buffer.dumps(str(dump))
        return functools.partial(self._load, dump), lambda _: None

    def saving(self, form: str) -> Callable[[], Any]:
        """Implements `TorchLike.saving` with a sync of the files, which torchrl leaves out."""
        checkpoint = self._directory.with_name(f"checkpoint, {form}")
        buffer = self._buffer
        if form == IN_PLACE:
            buffer = self.make(checkpoint / "storage", self._capacity, self._prioritized)
            self.fill(buffer, self._capacity)
        return functools.partial(_dump_and_sync, buffer, checkpoint)

    def _load(self, dump: Path) -> Any:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=LazyMemmapStorage(self._capacity)
        )
        buffer.loads(str(dump))
        return buffer


def _writing(buffer: Any) -> Callable[[Any], object]:
    extend: Callable[[Any], object] = buffer.extend
    return extend


def _dump_and_sync(buffer: Any, checkpoint: Path) -> None:
    buffer.dumps(str(checkpoint))
    for path in checkpoint.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _zstd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns functions for zstd that reuse their contexts."""
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
    """Returns a padded sample of sequences."""
    lengths = torch.tensor([len(tokens) for tokens in sample.get("tokens", as_list=True)])
    return {
        "tokens": sample.get("tokens", as_padded_tensor=True),
        "logprobs": sample.get("logprobs", as_padded_tensor=True),
        "reward": sample.get("reward"),
        "mask": torch.arange(int(lengths.max())) < lengths[:, None],
    }


def _nested(sample: Any) -> Any:
    return sample.densify(layout=torch.jagged)


if __name__ == "__main__":
    serve(TorchRL)
