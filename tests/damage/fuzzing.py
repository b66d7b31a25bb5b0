"""Compiles the fuzzer of the C core with sanitizers, and runs it.

The fuzzer calls all functions of the core that take a ring, because any number in shared memory may
have been overwritten. `fuzz/target.c` makes the calls, and `fuzz/driver.c` follows the coverage.
Both need only gcc and its sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import shmbuffer
from tests.native.program import SOURCES

CORPUS = Path(__file__).parent / "fuzz" / "corpus.hex"
_FUZZ = Path(__file__).parent / "fuzz"
_NATIVE = Path(shmbuffer.__file__).parent / "_native"
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def missing() -> str:
    """Returns the reason why the fuzzer cannot be built here, or "" if it can."""
    if shutil.which("gcc") is None:
        return "gcc is missing"
    return "" if (_NATIVE / "core/reap.c").exists() else "the C sources are not installed"


def built(folder: Path, optimised: str = "-O1") -> Path:
    """Compiles the fuzzer in a folder unless it is there. Without -O1 it is built faster."""
    program = folder / "fuzzer"
    if program.exists():
        return program
    sources = [*SOURCES.values(), _NATIVE / "core/crashpoint.c"]
    common = ["gcc", "-std=gnu11", optimised, "-g", f"-I{_NATIVE}"]
    for source in [*sources, _FUZZ / "target.c"]:
        out = folder / f"{source.stem}.o"
        followed = [*common, *_SANITIZERS, "-fsanitize-coverage=trace-pc", "-c"]
        subprocess.run([*followed, "-o", out, source], check=True)
    objects = sorted(folder.glob("*.o"))
    driver = [*common, _SANITIZERS[0], "-o", program, _FUZZ / "driver.c", *objects]
    subprocess.run([*driver, "-lm", "-lpthread"], check=True)
    return program


def run(program: Path, *arguments: object) -> tuple[list[str], int, int]:
    """Runs the fuzzer; returns new inputs, the number of inputs, and the number of edges.

    Raises:
        AssertionError: an input ended the process or hung. The message has the input and output.
    """
    at_hand = program.parent / "input"
    ended = subprocess.run(
        [program, *map(str, arguments)],
        env={**os.environ, "SHMB_FUZZ_INPUT": str(at_hand), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        content = at_hand.read_bytes()
        data = content[8 : 8 + int.from_bytes(content[:8], "little")]
        raise AssertionError(
            f"the input {data.hex()} ended the core with {ended.returncode}; add it to "
            f"{CORPUS.name}, and repeat: pytest tests/damage/test_corpus.py\n{ended.stderr[:4000]}"
        )
    *found, summary = ended.stdout.splitlines()
    _, inputs, _, edges = summary.split()
    return found, int(inputs), int(edges)
