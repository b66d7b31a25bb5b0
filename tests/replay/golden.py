"""Makes the golden directories and saves, which every later version of the format has to read.

    python -m tests.replay.golden

makes ``golden.tar.xz`` again. Run it only if the format changes before the first release.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from shmbuffer import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer import attach as attach_to

ARCHIVE = Path(__file__).with_name("golden.tar.xz")


# -- directories -----------------------------------------------------------------------------------

END = ("next", "done")
WRITERS, CAPACITY = 2, 24


def rows(who: int, step: int) -> TensorDict:
    """Makes one step for each of the two streams of a writer."""
    streams = 2
    return TensorDict(
        {
            "who": torch.full((streams,), who),
            "env": torch.arange(streams),
            "step": torch.full((streams,), step),
            "next": TensorDict({"done": torch.zeros(streams, 1, dtype=torch.bool)}, [streams]),
        },
        [streams],
    )


def attach(path: Path) -> TensorDictReplayBuffer:
    """Returns a handle that samples slices of three steps."""
    found: TensorDictReplayBuffer = attach_to(
        path, sampler=SliceSampler(slice_len=3, end_key=END), batch_size=90
    )
    return found


def _write(first: TensorDictReplayBuffer, path: Path, steps: range) -> None:
    """Writes steps as two writers in turn, each with two streams."""
    with attach(path) as second:
        for step in steps:
            for who, rb in enumerate((first, second)):
                rb.extend(rows(who, step), streams=[0, 7])


def _buffer(storage: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage, sampler=SliceSampler(slice_len=3, end_key=END), batch_size=90
    )


def write_rows(path: Path) -> None:
    with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True)) as rb:
        _write(rb, path, range(20))


def write_records(path: Path) -> None:
    storage = LazyStackStorage(CAPACITY, max_bytes=2**14, scratch_dir=path, shared_init=True)
    with _buffer(storage) as rb:
        _write(rb, path, range(20))


def write_loaded(path: Path) -> None:
    """Writes a directory with items from a load, followed by newly written items."""
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder, "buffer")
        with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=one, shared_init=True)) as rb:
            _write(rb, one, range(4))
            rb.dumps(Path(folder, "save"))
        with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True)) as rb:
            rb.loads(Path(folder, "save"))
            _write(rb, path, range(4, 7))


MAX_SIZE = 12
MAX_BYTES = 8192


def ragged(number: int) -> TensorDict:
    """Makes an item with a leaf of every kind."""
    return TensorDict(
        tokens=torch.arange(number * 7 % 23),
        logp=torch.linspace(-1, 0, number % 5, dtype=torch.float32),
        half=torch.full((2, 1), number / 4, dtype=torch.bfloat16),
        nested=TensorDict(flag=torch.tensor(number % 2 == 0), none=torch.zeros(0, 3)),
        text=f"number {number} é 語",
        info={"count": number, "ratio": number / 3, "parts": [True, None, b"\x00\xff"]},
        td_error=torch.tensor(float(number % 6)),
    )


def frames(first: int, count: int) -> TensorDict:
    """Makes steps whose frame stacks share frames."""
    rng = np.random.default_rng(7)
    film = torch.from_numpy(rng.integers(0, 4, (40, 10, 10)).astype(np.uint8))
    stacks = film.unfold(0, 3, 1).permute(0, 3, 1, 2).contiguous()
    return TensorDict(
        {
            "obs": stacks[first : first + count],
            "next": {"obs": stacks[first + 1 : first + count + 1]},
            "reward": torch.arange(first, first + count) / 2,
        },
        [count],
    )


OPTIONS: dict[str, Any] = {"shared_init": True, "max_bytes": MAX_BYTES}


def write_ragged(folder: Path) -> None:
    """Writes raw records with many kinds of leaves, until the ring has wrapped around."""
    lists = LazyStackStorage(MAX_SIZE, scratch_dir=folder, **OPTIONS)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.4, storage=lists, batch_size=4)
    for start in range(0, 21, 3):
        rb.extend([ragged(number) for number in range(start, start + 3)])
    rb[4] = ragged(100)
    rb.storage.close()


def write_joined(folder: Path) -> None:
    """Writes compressed records, two stacks to a zstd frame, until the ring has wrapped around."""
    stacks = CompressedListStorage(MAX_SIZE, scratch_dir=folder, **OPTIONS)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.4, storage=stacks, batch_size=4)
    for start in range(0, 30, 10):
        rb.extend(frames(start, 10))
    rb.storage.close()


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "rows": write_rows,
    "records": write_records,
    "loaded": write_loaded,
    "ragged": write_ragged,
    "joined": write_joined,
}
"""Functions that each write a directory of one kind."""


# -- saves -----------------------------------------------------------------------------------------


def steps(first: int, count: int) -> TensorDict:
    """Makes steps of episodes of length three."""
    n = torch.arange(first, first + count)
    obs = n[:, None].float() * torch.tensor([1.0, 0.5])
    done = n[:, None] % 3 == 2
    after = {"obs": obs + torch.tensor([1.0, 0.5]), "done": done, "reward": n[:, None] / 2}
    return TensorDict({"obs": obs, "action": n, "traj": n // 3, "next": after}, [count])


def _rows(filled: bool) -> Any:
    """Makes a ring of rows and text that has wrapped around, with priorities and one lane."""
    generator = torch.Generator().manual_seed(3)
    rb = PrioritizedReplayBuffer(
        alpha=0.5, beta=0.25, storage=LazyTensorStorage(8), batch_size=4, generator=generator
    )
    for first in range(0, 12 * filled, 6):
        data = steps(first, 6)
        data["text", "a / b"] = NonTensorStack(*[f"step {first + at} é" for at in range(6)])
        rb.extend(data)
    if filled:
        rb.update_priority(torch.arange(8), torch.arange(8) + 0.5)
    return rb


def _lanes(filled: bool) -> Any:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), batch_size=4)
    if filled:
        n = torch.arange(6).reshape(3, 2)
        rb.extend(TensorDict({"a": n, "b": n[..., None].half()}, [3, 2]))
    return rb


def _pytree(filled: bool) -> Any:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=4)
    if filled:
        rb.extend((torch.arange(4), {"k": torch.ones(4, 2), "m": [torch.arange(4.0)]}))
    return rb


def _episodes(filled: bool) -> Any:
    storage = LazyTensorStorage(7)
    rb = ReplayBuffer(storage=storage, batch_size=4, checkpointer=FlatStorageCheckpointer())
    if filled:
        rb.extend(steps(0, 6))
        rb.extend(steps(6, 3))
    return rb


def _objects(filled: bool) -> Any:
    """Makes a list, wrapped around, of objects that a record cannot hold or that need pickle."""
    checkpointer = ListStorageCheckpointer(allow_pickle=True)
    rb = ReplayBuffer(storage=ListStorage(6), checkpointer=checkpointer, batch_size=2)
    items = [
        {"a": torch.arange(3), 3: "x", (1, "y"): 2, None: [], "z": 1 - 2j},
        (torch.Size([1, 2]), torch.float16, torch.device("cpu"), -(10**30), float("inf")),
        TensorDict({"a": torch.rand(2, generator=torch.Generator().manual_seed(1))}, [2]),
        [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.float64(2.5), np.array(["a", "bcd"])],
        {1, 2, 3},
        b"\0bytes",
        "text \ud800 with half a pair",
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    ]
    if filled:
        rb.extend(items)
    return rb


def _compressed(filled: bool) -> Any:
    rb = ReplayBuffer(storage=CompressedListStorage(6), batch_size=2)
    if filled:
        rb.extend([steps(at, 4) for at in range(3)])
        rb.extend([{"k": np.ones((50, 50)), "v": [torch.arange(1000)], "z": 2j}])
    return rb


def _own_codec(filled: bool) -> Any:
    def compress(tensor: torch.Tensor) -> torch.Tensor:
        content = bytearray(zlib.compress(tensor.numpy().tobytes()))
        return torch.frombuffer(content, dtype=torch.uint8)

    def decompress(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        content = bytearray(zlib.decompress(chunk.numpy().tobytes()))
        return torch.frombuffer(content, dtype=metadata["dtype"]).reshape(metadata["shape"])

    storage = CompressedListStorage(4, compression_fn=compress, decompression_fn=decompress)
    rb = ReplayBuffer(storage=storage, batch_size=2)
    if filled:
        rb.extend([{"a": torch.arange(100)}, {"a": torch.ones(3, 4)}])
    return rb


def _records(filled: bool) -> Any:
    storage = LazyStackStorage(8, max_bytes=2**14, shared_init=True)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=2)
    for at in range(11 * filled):
        rb.add(TensorDict({"x": torch.arange(float(at + 1)), "s": f"text {at}"}))
    return rb


def _dictionary(filled: bool) -> Any:
    storage = CompressedListStorage(
        500, max_bytes=2**18, shared_init=True, dictionary_bytes=1000, compression_level=3
    )
    rb = TensorDictReplayBuffer(storage=storage, batch_size=2)
    if filled:
        rb.extend([{"k": torch.arange(at % 7 + 60), "s": f"text {at} " * 9} for at in range(400)])
    return rb


def _slices(filled: bool) -> Any:
    sampler = SliceSamplerWithoutReplacement(slice_len=3, traj_key="traj")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=6)
    if filled:
        torch.manual_seed(5)
        rb.extend(steps(0, 12))
        rb.sample()
    return rb


def _ensemble(filled: bool) -> Any:
    writer = TensorDictMaxValueWriter(rank_key="action")
    members = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4),
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, writer=writer),
    )
    for member in members * filled:
        member.extend(steps(0, 6))
    return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator())


SAVES: dict[str, Callable[[bool], Any]] = {
    "rows": _rows,
    "lanes": _lanes,
    "pytree": _pytree,
    "episodes": _episodes,
    "objects": _objects,
    "compressed": _compressed,
    "own codec": _own_codec,
    "records": _records,
    "dictionary": _dictionary,
    "slices": _slices,
    "ensemble": _ensemble,
}
"""Functions that each make a buffer of one kind, either empty or filled as it was saved."""


def unpack(folder: Path) -> None:
    """Unpacks the archive into ``directories/<name>`` and ``saves/<name>``."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    """Makes the archive."""
    with tempfile.TemporaryDirectory() as folder:
        for name, write in DIRECTORIES.items():
            write(Path(folder, "directories", name))
        for name, make in SAVES.items():
            make(True).dumps(Path(folder, "saves", name))
        with (
            lzma.open(ARCHIVE, "wb", preset=9) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for kind in ("directories", "saves"):
                archive.add(Path(folder, kind), kind)


if __name__ == "__main__":
    sys.exit(main())
