"""How much memory does a large buffer take after a few writes?

    python -m benchmarks.space [--capacity-gib 2]

A buffer of rows of 56 KB is created in `/dev/shm`, 200 rows are written, and the memory that its
files and its process have taken is counted. NumPy allocates an array like Stable-Baselines3's
buffers do. TorchRL is measured if it can be imported. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import shmbuffer

ROW_BYTES, ROWS, BATCH = 2 * 84 * 84 * 4, 200, 8
LIBRARIES = ("shmbuffer", 'shmbuffer, reserve="all"', "NumPy", "torchrl")


def opened(library: str, capacity: int, directory: Path) -> Any:
    """Returns a function that writes a batch, of uint8 ``[n, ROW_BYTES]``."""
    if library == "NumPy":
        ring, at = np.zeros((capacity, ROW_BYTES), np.uint8), [0]

        def write(batch: torch.Tensor) -> None:
            ring[at[0] : at[0] + len(batch)] = batch
            at[0] += len(batch)

        return write
    data: Any = importlib.import_module("torchrl.data") if library == "torchrl" else shmbuffer
    reserve = {"reserve": "all"} if "all" in library else {}
    storage = data.LazyMemmapStorage(capacity, scratch_dir=directory, **reserve)
    rb = data.TensorDictReplayBuffer(storage=storage)
    return lambda batch: rb.extend(TensorDict({"frames": batch}, [len(batch)]))


def measure(library: str, capacity: int, directory: Path, answers: Any) -> None:
    """Writes ROWS rows, and sends the bytes that files and process have taken."""
    batch = torch.ones(BATCH, ROW_BYTES, dtype=torch.uint8)
    before = anonymous_bytes()
    try:
        write = opened(library, capacity, directory)
    except ImportError:
        answers.put(None)
        return
    for _ in range(ROWS // BATCH):
        write(batch)
    files = sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())
    answers.put((files, anonymous_bytes() - before))


def anonymous_bytes() -> int:
    """Returns the memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    (line,) = [one for one in status if one.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Prints one row for each library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity-gib", type=float, default=2.0)
    capacity = int(parser.parse_args().capacity_gib * 2**30 / ROW_BYTES)
    processes = multiprocessing.get_context("spawn")
    written = ROWS * ROW_BYTES
    print(f"{ROWS} of {capacity:,} rows of {ROW_BYTES:,} bytes: {written / 2**20:.0f} MiB written")
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory(prefix="space-", dir="/dev/shm") as directory:
            answers = processes.Queue()
            arguments = library, capacity, Path(directory), answers
            process = processes.Process(target=measure, args=arguments)
            process.start()
            found = answers.get(timeout=300)
            process.join()
        if found is None:
            print(f"  {library:26} is not installed here")
            continue
        files, anonymous = (one / 2**20 for one in found)
        print(f"  {library:26} files {files:7.0f} MiB, process {anonymous:6.0f} MiB")


if __name__ == "__main__":
    main()
