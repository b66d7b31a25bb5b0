"""Directories of an earlier build, kept: what every later one has to read.

    python -m tests.replay.records.golden

adds to ``golden.tar.xz`` those that are not in it yet. What is there stays as it is: for something
new in the format there is a new directory.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer import CompressedListStorage, LazyStackStorage, TensorDictPrioritizedReplayBuffer

ARCHIVE = Path(__file__).with_name("golden.tar.xz")
MAX_SIZE = 12
MAX_BYTES = 8192


def ragged(number: int) -> TensorDict:
    """An item with something of every kind in it."""
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
    """Steps whose stacks have frames in common."""
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
    """Raw records of many kinds of leaves, after a lap and more of the ring."""
    lists = LazyStackStorage(MAX_SIZE, scratch_dir=folder, **OPTIONS)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.4, storage=lists, batch_size=4)
    for start in range(0, 21, 3):
        rb.extend([ragged(number) for number in range(start, start + 3)])
    rb[4] = ragged(100)
    rb.storage.close()


def write_steps(folder: Path) -> None:
    """Compressed records, two stacks in one frame of zstd, after a lap and more of the ring."""
    stacks = CompressedListStorage(MAX_SIZE, scratch_dir=folder, **OPTIONS)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.4, storage=stacks, batch_size=4)
    for start in range(0, 30, 10):
        rb.extend(frames(start, 10))
    rb.storage.close()


WRITE: dict[str, Callable[[Path], None]] = {
    "ragged": write_ragged,
    "joined": write_steps,
}


def unpack(folder: Path) -> None:
    """What the archive holds."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    """Write what is missing in the archive."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        for name, write in WRITE.items():
            if not Path(folder, name).exists():
                write(Path(folder, name))
        with (
            lzma.open(ARCHIVE, "wb", preset=9) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name in WRITE:
                archive.add(Path(folder, name), name)


if __name__ == "__main__":
    sys.exit(main())
