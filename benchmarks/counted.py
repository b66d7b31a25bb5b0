"""What `instructions.py` counts: the hot calls, in a process that valgrind runs.

    python -m benchmarks.counted REQUESTS DIRECTORY

REQUESTS is the shared object of `requests.c`. For each call a line of JSON says how it is named and
which of the files that valgrind writes is its first: of what came before, then of no call at all,
then WINDOWS of them of CALLS calls each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.library import ARRAYS, INDEX, OUT, TENSORDICT, Operation
from benchmarks.ours import ShmBuffer

CALLS, WINDOWS = 32, 5
WARM = 48  # more than the interpreter needs to specialise what it runs
CAPACITY = 20_000
OPERATIONS = {
    False: [
        Operation("add", 1, ARRAYS),
        Operation("add", 1, TENSORDICT),
        Operation("sample", 256, TENSORDICT),
    ],
    True: [
        Operation("extend", 1, TENSORDICT),
        Operation("extend", 32, TENSORDICT),
        Operation("extend", 32, ARRAYS),
        Operation("sample", 256, TENSORDICT),
        Operation("sample", 256, OUT),
        Operation("update", 256, INDEX),
        Operation("cycle", 256, TENSORDICT),
    ],
}


def main(requests: str, directory: str) -> None:
    """Make the calls."""
    valgrind = ctypes.CDLL(requests)
    if not valgrind.counting():
        raise SystemExit("this is to be run by valgrind: see benchmarks/instructions.py")
    gc.disable()  # it would come in the middle of some calls, and not of others
    library = ShmBuffer()
    written = 0
    for prioritized, operations in OPERATIONS.items():
        place = Path(directory) / str(prioritized)
        library.open(str(place), "S", CAPACITY, prioritized)
        for operation in operations:
            called = library.call(operation)
            if called is None:
                continue
            _count(valgrind, *called)
            how = "prioritized" if prioritized else "uniform"
            name = f"{operation.call}({operation.count}), {how}, {operation.form}"
            print(json.dumps({"name": name, "first": written + 1}), flush=True)
            written += 2 + WINDOWS
        library.close()


def _count(valgrind: Any, call: Any, inputs: list[tuple[Any, ...]]) -> None:
    chosen = [inputs[at % len(inputs)] for at in range(WARM + WINDOWS * CALLS)]
    for arguments in chosen[:WARM]:
        call(*arguments)
    valgrind.begin()
    valgrind.write_down()  # what came before
    for first in (0, *range(WARM, len(chosen), CALLS)):
        for arguments in chosen[first : first + CALLS] if first else ():
            call(*arguments)
        valgrind.write_down()
    valgrind.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
