"""Makes the hot calls whose instructions `instructions.py` counts, in a process under valgrind.

    python -m benchmarks.counted REQUESTS DIRECTORY

REQUESTS is the shared object of `requests.c`. For each call, a line of JSON contains its name and
the number of its first file of valgrind. This file is for the time before, the next one for no
call, and WINDOWS further ones for a number of calls each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import shmbuffer
from benchmarks import frames
from benchmarks.library import (
    ARRAYS,
    AS_IT_COMES,
    BEHIND_WRITES,
    BY_STALENESS,
    IN_GROUPS,
    IN_STREAMS,
    INDEX,
    LAZY_STACK,
    LISTED,
    OUT,
    TENSORDICT,
    Operation,
)
from benchmarks.ours import ShmBuffer

CALLS, WINDOWS = 32, 5
WARM = 48  # more than the interpreter needs to specialise what it runs
LARGE = 4096  # items of a batch of which so many are counted that few calls are enough
LARGE_CALLS = 2
CAPACITY = 20_000
OPERATIONS = {
    False: [
        Operation("add", 1, ARRAYS),
        Operation("add", 1, TENSORDICT),
        Operation("sample", 256, TENSORDICT),
        Operation("passes", 256, BEHIND_WRITES),
    ],
    True: [
        Operation("extend", 1, TENSORDICT),
        Operation("extend", 32, TENSORDICT),
        Operation("extend", 32, ARRAYS),
        Operation("sample", 256, TENSORDICT),
        Operation("sample", 256, OUT),
        Operation("update", 256, INDEX),
        Operation("cycle", 256, TENSORDICT),
        Operation("reserve", 32, TENSORDICT),
        Operation("consume", 256, TENSORDICT),
        Operation("labelled", 256, BY_STALENESS),
        Operation("labelled", 256, IN_GROUPS),
        Operation("labelled", 256, IN_STREAMS),
        Operation("extend", LARGE, ARRAYS),
        Operation("sample", LARGE, TENSORDICT),
        Operation("update", LARGE, INDEX),
    ],
}


RECORDS = [
    Operation("extend", 32, TENSORDICT),
    Operation("sample", 64, AS_IT_COMES),
    Operation("sample", 64, LISTED),
]
STACKS, FILM_STEPS = 32, 1000


def main(requests: str, directory: str) -> None:
    """Makes the calls."""
    valgrind = ctypes.CDLL(requests)
    if not valgrind.counting():
        raise SystemExit("this is to be run by valgrind: see benchmarks/instructions.py")
    shmbuffer.set_threads(1)
    gc.disable()  # it would run during some calls, and not during others
    counter, library, place = Counter(valgrind), ShmBuffer(), Path(directory)
    for prioritized, operations in OPERATIONS.items():
        library.open(str(place / str(prioritized)), "S", CAPACITY, prioritized)
        counter.count_all(library, operations, "prioritized" if prioritized else "uniform")
        library.close()
    library.open(str(place / "records"), "sequences", CAPACITY // 10, False, LAZY_STACK)
    counter.count_all(library, RECORDS, "records")
    library.close()
    rb = frames.open_buffer(place / "frames", FILM_STEPS)
    counter.count(f"sample({STACKS}), uniform, stacks of frames", rb.sample, [(STACKS,)])
    rb.close()


class Counter:
    """Counts the instructions of calls, and prints which of valgrind's files belong to each."""

    def __init__(self, valgrind: Any) -> None:
        self.valgrind = valgrind
        self.written = 0  # files

    def count_all(self, library: ShmBuffer, operations: list[Operation], how: str) -> None:
        """Counts the operations that a library has."""
        for operation in operations:
            called = library.call(operation)
            if called is not None:
                calls = LARGE_CALLS if operation.count == LARGE else CALLS
                name = f"{operation.call}({operation.count}), {how}, {operation.form}"
                self.count(name, *called, calls)

    def count(
        self, name: str, call: Any, inputs: list[tuple[Any, ...]], calls: int = CALLS
    ) -> None:
        """Counts WINDOWS times ``calls`` calls."""
        _count(self.valgrind, call, inputs, calls)
        print(json.dumps({"name": name, "first": self.written + 1, "calls": calls}), flush=True)
        self.written += 2 + WINDOWS


def _count(valgrind: Any, call: Any, inputs: list[tuple[Any, ...]], calls: int) -> None:
    warm = min(WARM, 4 * calls)
    chosen = [inputs[at % len(inputs)] for at in range(warm + WINDOWS * calls)]
    for arguments in chosen[:warm]:
        call(*arguments)
    valgrind.begin()
    valgrind.write_down()  # what came before
    for first in (0, *range(warm, len(chosen), calls)):
        for arguments in chosen[first : first + calls] if first else ():
            call(*arguments)
        valgrind.write_down()
    valgrind.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
