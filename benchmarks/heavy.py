"""How fast are rows of 32 KiB to 1 MiB written and read, beside NumPy, TorchRL and plain C?

    python -m benchmarks.heavy [--rounds 15] [--batch-mib 8]

Batches of random bytes go to a ring of 256 MiB that is full, in memory: rows in a
`LazyMemmapStorage`, and raw records in a `LazyStackStorage`. Plain C makes the same copies with the
same checksum. NumPy copies to an array, without a checksum, and gathers into new memory. TorchRL is
measured if it can be imported. All run in one process and one thread, in turn, by processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import shmbuffer
from benchmarks.bound import compile_c

RING_BYTES = 2**28
SOURCES = 4
BLOCK_S = 0.02
SIZES = (2**15, 2**17, 2**20)

Call = Callable[[int], Any]


def plain_c(directory: Path) -> ctypes.CDLL:
    """Compiles and loads ``heavy.c``."""
    loaded = compile_c(Path(__file__).with_suffix(".c"), directory)
    loaded.begin()
    return loaded


def contenders(directory: Path, nbytes: int, rows: int) -> dict[str, dict[str, Call]]:
    """Returns the calls of each contender, whose buffers are full: write, sample, and index."""
    slots = RING_BYTES // (nbytes + 512)
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 256, (rows, nbytes), np.uint8) for _ in range(SOURCES)]
    batches = [TensorDict({"x": torch.from_numpy(one)}, [rows]) for one in sources]
    chosen = [rng.permutation(slots - rows)[:rows] for _ in range(SOURCES)]
    indices = [torch.from_numpy(one) for one in chosen]
    ring, library = np.ones((slots, nbytes), np.uint8), plain_c(directory)
    place = [0]

    def next_slots() -> Any:
        first = place[0] if place[0] + rows <= slots else 0
        place[0] = first + rows
        return np.arange(first, first + rows)

    def run_c(call: Any, to: Any, source: Any, at: Any) -> None:
        call(*(ctypes.c_void_p(one.ctypes.data) for one in (to, source, at)), rows, nbytes)

    for call in (library.write_rows, library.read_rows):
        call.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2

    def c_read(i: int) -> Any:
        run_c(library.read_rows, made := np.empty((rows, nbytes), np.uint8), ring, chosen[i])
        return made

    def numpy_write(i: int) -> None:
        ring[next_slots()[0] :][:rows] = sources[i]

    found: dict[str, dict[str, Call]] = {
        "plain C": {
            "write": lambda i: run_c(library.write_rows, ring, sources[i], next_slots()),
            "rb[index]": c_read,
        },
        "NumPy": {"write": numpy_write, "rb[index]": lambda i: ring[chosen[i]]},
    }
    memmap = shmbuffer.LazyMemmapStorage(slots, scratch_dir=directory / "rows")
    records = shmbuffer.LazyStackStorage(
        slots, max_bytes=RING_BYTES, scratch_dir=directory / "records"
    )
    buffers: dict[str, Any] = {
        "rows": shmbuffer.TensorDictReplayBuffer(storage=memmap, batch_size=rows),
        "records": shmbuffer.TensorDictReplayBuffer(storage=records, batch_size=rows),
    }
    try:
        data: Any = importlib.import_module("torchrl.data")

        storage = data.LazyMemmapStorage(slots, scratch_dir=directory / "torchrl")
        buffers["TorchRL"] = data.TensorDictReplayBuffer(storage=storage, batch_size=rows)
    except ImportError:
        print("TorchRL is not installed here, so it is left out.")

    def of_buffer(rb: Any) -> dict[str, Call]:
        return {
            "write": lambda i: rb.extend(batches[i]),
            "sample": lambda i: rb.sample()["x"],
            "rb[index]": lambda i: rb[indices[i]]["x"],
        }

    found.update({name: of_buffer(rb) for name, rb in buffers.items()})
    for calls in found.values():
        for i in range(2 * slots // rows + 2):
            calls["write"](i % SOURCES)
    return found


def measured(call: Call) -> float:
    """Returns the processor time of one call, as the mean of a block."""
    count, began = 0, time.process_time()
    while (took := time.process_time() - began) < BLOCK_S or count < 2:
        call(count % SOURCES)
        count += 1
    return took / count


def main() -> None:
    """Prints a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-mib", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shmbuffer.set_threads(1)
    for nbytes in SIZES:
        rows = options.batch_mib * 2**20 // nbytes
        directory = Path(tempfile.mkdtemp(prefix="heavy-", dir="/dev/shm"))
        try:
            found = contenders(directory, nbytes, rows)
            calls = [(what, who) for who, of in found.items() for what in of]
            times: dict[tuple[str, str], list[float]] = {one: [] for one in calls}
            for _ in range(options.rounds):
                for what, who in calls:
                    times[what, who].append(measured(found[who][what]))
        finally:
            shutil.rmtree(directory)
        print(f"\n{rows} rows of {nbytes // 1024} KiB: GiB per second of processor time")
        for what in ("write", "sample", "rb[index]"):
            for who in found:
                if (what, who) in times:
                    rates = [rows * nbytes / one / 2**30 for one in times[what, who]]
                    spread = f"[{min(rates):.2f}..{max(rates):.2f}]"
                    print(f"  {what:10} {who:8} {statistics.median(rates):6.2f} {spread}")


if __name__ == "__main__":
    main()
