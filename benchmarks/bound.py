"""The bound: plain C with the same random numbers, tree and stores, and one record per row.

`bound.c` has no locks, checks, checksums, Python code or other processes. It is measured like a
further library in the same rounds. The ratio to it shows which part of the time of a call is
necessary. It is compiled once per run, with the compiler that built Python.
"""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.items import KINDS, POOL_BYTES, Kind, index_sets, priorities
from benchmarks.library import ALPHA, ARRAYS, BETA, COLD_SETS, INDEX, MEMMAP, Operation

NAME = "bound"
EPS = 1e-8
LINE = 64
_MOST = 1 << 18  # items of a batch
_MOST_BYTES = 512 << 20  # of a batch; memory that no batch reaches is never made
_SOURCE = Path(__file__).with_suffix(".c")
_NATIVE = _SOURCE.parents[1] / "shmbuffer" / "_native"
_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared"]
_FLAGS += ["-fvisibility=hidden", "-ffunction-sections", "-Wl,--gc-sections"]
_SAMPLE, _UPDATE, _CYCLE, _EXTEND, _UNIFORM = range(5)  # enum call of bound.c
_CALLS = {
    ("sample", ARRAYS): _SAMPLE,
    ("update", INDEX): _UPDATE,
    ("cycle", INDEX): _CYCLE,
    ("extend", ARRAYS): _EXTEND,
}


def compile_c(source: Path, directory: Path) -> ctypes.CDLL:
    """Compiles a program that includes sources of the C core, and loads it."""
    made = directory / f"{source.stem}.so"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, *_FLAGS, f"-I{_NATIVE}", "-o", str(made), str(source), "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def compiled(directory: Path) -> ctypes.CDLL:
    """Compiles and loads `bound.c`."""
    core = compile_c(_SOURCE, directory)
    core.bound_bytes.restype = core.bound_calls.restype = ctypes.c_int64
    core.bound_batch.restype = core.bound_tree.restype = ctypes.c_void_p
    return core


class Bound:
    """A `Library` whose buffer is in two files, which are mapped like those of the other libraries.

    Args:
        directory: directory of the compiled file.
    """

    name = NAME

    def __init__(self, directory: Path) -> None:
        self._core = compiled(directory)
        self._kind: Kind
        self._capacity = 0
        self._prioritized = False
        self._most = 0
        self._files: list[NDArray[np.uint8]] = []
        self._inputs: dict[Operation, tuple[Any, ...]] = {}
        self._next: dict[Operation, tuple[int, int]] = {}  # which input, and calls of a block

    def versions(self) -> dict[str, str]:
        """Implements `Library.versions`."""
        return {"plain C": str(sysconfig.get_config_var("CC"))}

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Implements `Library.open`."""
        if storage != MEMMAP:
            return False
        self._kind, self._capacity, self._prioritized = KINDS[kind], capacity, prioritized
        unit = LINE if self._kind.nbytes <= LINE else 8
        stride = -(-self._kind.nbytes // unit) * unit
        sizes = [capacity * stride, self._core.bound_bytes(ctypes.c_uint64(capacity))]
        self._files = [
            np.memmap(Path(directory) / f"bound{at}", np.uint8, "w+", shape=(size,))
            for at, size in enumerate(sizes)
        ]
        leaves = [
            np.dtype(dtype).itemsize * int(np.prod(shape))
            for dtype, shape in self._kind.leaves.values()
        ]
        most = self._most = max(1, min(_MOST, _MOST_BYTES // self._kind.nbytes))
        opened = self._core.bound_open(
            *(ctypes.c_void_p(file.ctypes.data) for file in self._files),
            ctypes.c_uint64(capacity),
            ctypes.c_uint64(stride),
            (ctypes.c_uint64 * len(leaves))(*leaves),
            len(leaves),
            ctypes.c_uint64(most),
            *map(ctypes.c_double, (ALPHA, EPS, BETA)),
        )
        if not opened:
            raise MemoryError("the bound's batches do not fit into memory")
        chunk = min(capacity, 100_000, max(1, POOL_BYTES // self._kind.nbytes))
        for start in range(0, capacity, chunk):
            some = min(chunk, capacity - start)
            self._call(_EXTEND, some, 1, 0, *self._pool(Operation("extend", some, ARRAYS), 1))
        return True

    def share(self, writers: int, count: int) -> int:
        """Returns 0, because there are no other processes."""
        return 0

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        if (operation.call, operation.form) not in _CALLS:
            return False
        if operation.count > self._most:
            return False
        if not self._prioritized and operation.call != "sample":
            return False
        sets = min(COLD_SETS, max(1, 20 * self._capacity // operation.count))
        self._inputs[operation] = self._pool(operation, sets)
        self._next[operation] = 0, 1
        for _ in range(3):  # what happens once happens here
            self._block(operation)
        shortest = min(self._block(operation) for _ in range(10))
        calls = max(1, min(1000, round(block_s / max(shortest, 1e-9))))
        self._next[operation] = self._next[operation][0], calls
        return True

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Implements `Library.round`."""
        return [self._block(operation) for _ in range(blocks)]

    def calls(self, operation: Operation, count: int) -> list[float]:
        """Implements `Library.calls`."""
        first, calls = self._next[operation]
        self._next[operation] = first, 1
        found = [self._block(operation) for _ in range(count)]
        self._next[operation] = self._next[operation][0], calls
        return found

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Raises NotImplementedError, because there are no writers."""
        raise NotImplementedError(f"{self.name} is not shared between processes")

    def shrinks(self) -> float:
        """Raises NotImplementedError, because items have a fixed size."""
        raise NotImplementedError(f"{self.name} is not measured with items of any size")

    def close(self) -> None:
        """Implements `Library.close`."""
        self._core.bound_close()
        self._inputs.clear()
        self._files.clear()

    def batch(self, count: int) -> dict[str, NDArray[Any]]:
        """Returns the last sample: each leaf, ``index`` and ``weight``."""
        wanted = {
            **{name: (at, *leaf) for at, (name, leaf) in enumerate(self._kind.leaves.items())},
            "index": (-1, "int64", ()),
            "weight": (-2, "float32", ()),
        }
        return {
            name: np.frombuffer(
                ctypes.string_at(
                    self._core.bound_batch(at),
                    count * np.dtype(dtype).itemsize * int(np.prod(shape)),
                ),
                dtype,
            ).reshape(count, *shape)
            for name, (at, dtype, shape) in wanted.items()
        }

    def tree(self, part: int) -> NDArray[np.float64]:
        """Returns raw priorities (0), masses (1) or the root (2) of a prioritized buffer."""
        count = 1 if part == 2 else self._capacity
        return np.frombuffer(ctypes.string_at(self._core.bound_tree(part), 8 * count))

    def _pool(self, operation: Operation, sets: int) -> tuple[Any, ...]:
        """Returns the number and the addresses of inputs, and the objects that own them."""
        count, index, batches = operation.count, np.zeros(0, np.int64), []
        if operation.call == "extend":
            batches = self._kind.batches(count, ARRAYS)[:sets]
            sets = len(batches)
        if operation.call == "update":
            index = np.concatenate(index_sets(count, sets, self._capacity))
        weights = np.concatenate(priorities(count, sets))
        leaves = [np.ascontiguousarray(leaf) for batch in batches for leaf in batch.values()]
        addresses = (ctypes.c_void_p * max(1, len(leaves)))(*(leaf.ctypes.data for leaf in leaves))
        return sets, index, weights, addresses, leaves

    def _block(self, operation: Operation) -> float:
        """Returns the time per call in seconds."""
        first, calls = self._next[operation]
        call = _CALLS[operation.call, operation.form]
        if call == _SAMPLE and not self._prioritized:
            call = _UNIFORM
        took = self._call(call, operation.count, calls, first, *self._inputs[operation])
        self._next[operation] = first + calls, calls
        return took / 1e9 / calls

    def _call(
        self,
        call: int,
        count: int,
        calls: int,
        first: int,
        sets: int,
        index: NDArray[np.int64],
        weights: NDArray[np.float32],
        addresses: Any,
        leaves: object,
    ) -> int:
        found: int = self._core.bound_calls(
            call,
            *map(ctypes.c_uint64, (count, calls, first, sets)),
            ctypes.c_void_p(index.ctypes.data),
            ctypes.c_void_p(weights.ctypes.data),
            addresses,
        )
        return found
