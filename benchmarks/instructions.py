"""How many instructions does a hot call take? The count does not depend on the load of the machine.

    scripts/instructions             print counts beside the recorded ones; exit 1 if any grew
    scripts/instructions --record    record the counts
    scripts/instructions --wheel F   count those of a wheel, whose core another compiler has built

valgrind's callgrind counts the instructions. It simulates a processor with AVX2 and without
AVX-512, so counts are comparable between machines, unlike those of hardware counters. Counts do not
include the cost of an instruction, caches, waits and the AVX-512 kernels. These are measured in
seconds.

Counting is on only during the calls. Several calls are counted together, and the result is the
median of such counts minus the count of no call. Rare work, such as the growth of a dict, is thus
left out. Hashes are the same in every run, and addresses as far as possible. The addresses of
Python's objects decide which entries of its caches collide, and depend on all earlier allocations:
on the lengths of paths, on the environment, and on threads. The counted program is therefore a copy
in a directory whose path always has the same length, without the caller's environment:

    /tmp/shmbuffer-instructions-????????/     working directory, HOME, TMPDIR, and the buffers
        root/        the packages, compiled there
        env ──▶      the environment of our Python

The recorded counts are in `instructions.json`, with the versions for which they are valid. Other
versions of Python or torch have other counts and are not compared.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.counted import WINDOWS

RECORDED = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.10
_ROOT = Path(__file__).resolve().parents[1]
_SAME_EVERYWHERE = {
    "PATH": os.defpath,
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class CannotCountError(Exception):
    """A program or file that is needed to count instructions is missing."""


def versions() -> dict[str, str]:
    """Returns the versions on which the counts depend."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "tensordict", "numpy")},
    }


def count(wheel: Path | None = None) -> dict[str, int]:
    """Counts the instructions of each hot call.

    Args:
        wheel: the wheel to count; None counts the package of this tree.

    Raises:
        CannotCountError: valgrind, its header or a compiler is missing.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise CannotCountError("valgrind is not installed")
    with tempfile.TemporaryDirectory(prefix="shmbuffer-instructions-", dir="/tmp") as directory:
        counts, tree, python = (f"{directory}/{name}" for name in ("counts", "root", "env"))
        os.symlink(sys.prefix, python)
        _copy_to(Path(tree))
        if wheel is not None:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        packages = os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)
        run = subprocess.run(
            [
                *(["setarch", "--addr-no-randomize"] if shutil.which("setarch") else []),
                valgrind,
                "--tool=callgrind",
                "--instr-atstart=no",
                f"--callgrind-out-file={counts}",
                f"{python}/bin/python3",
                "-S",  # what it does names the tree: an editable package is found by its path
                "-m",
                "benchmarks.counted",
                str(_compile_requests(Path(directory))),
                directory,
            ],
            env={
                **_SAME_EVERYWHERE,
                "HOME": directory,
                "TMPDIR": directory,
                "PYTHONPATH": f"{tree}:{python}/{packages}",
            },
            cwd=directory,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"what valgrind ran has failed:\n{run.stderr}")
        found = {}
        for line in map(json.loads, run.stdout.splitlines()):
            first = line["first"] + 1
            nothing, *windows = (
                _total(Path(f"{counts}.{at}")) for at in range(first, first + 1 + WINDOWS)
            )
            found[line["name"]] = round((median(windows) - nothing) / line["calls"])
        return found


def compare(found: dict[str, int], recorded: dict[str, Any]) -> list[str]:
    """Returns a sentence for each call whose count has grown by more than the tolerance."""
    return [
        f"{name}: {found[name]:,} instructions, {found[name] / before - 1:+.1%} of {before:,}"
        if name in found
        else f"{name}: not counted any more"
        for name, before in recorded["instructions"].items()
        if found.get(name, sys.maxsize) > (1 + TOLERANCE) * before
    ]


def differing(recorded: dict[str, Any]) -> str | None:
    """Returns why counts cannot be compared with the recorded ones; None if they can."""
    here = versions()
    changed = [
        f"{name} {here[name]}, not {before}"
        for name, before in recorded["versions"].items()
        if here[name] != before
    ]
    return f"recorded with other versions: {'; '.join(changed)}" if changed else None


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, and compares or records the counts."""
    asked = argparse.ArgumentParser(prog="scripts/instructions")
    asked.add_argument("--record", action="store_true", help="rewrite instructions.json")
    asked.add_argument("--wheel", type=Path, metavar="F", help="count those of this wheel")
    arguments = asked.parse_args(argv)
    try:
        found = count(arguments.wheel)
    except CannotCountError as error:
        print(f"not counted: {error}", file=sys.stderr)
        return 2
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"instructions": {}}
    width = max(map(len, found))
    for name, number in found.items():
        before = recorded["instructions"].get(name)
        change = "" if before is None else f"  {number / before - 1:+.1%}"
        print(f"{name.ljust(width)}  {number:9,}{change}")
    if arguments.record:
        made = {"versions": versions(), "instructions": found}
        RECORDED.write_text(json.dumps(made, indent=1) + "\n")
        return 0
    if (why := differing(recorded)) is not None:
        print(why)
        return 0
    grown = compare(found, recorded)
    print(*(f"grown: {sentence}" for sentence in grown), sep="\n", end="\n" if grown else "")
    return 1 if grown else 0


def _copy_to(tree: Path) -> None:
    """Copies and compiles the counted files, because compiled files contain their old paths."""
    for package in ("benchmarks", "shmbuffer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_ROOT / package, tree / package, ignore=ignored)
    (tree / "tests").mkdir()
    for file in ("__init__.py", "frames.py"):
        shutil.copy2(_ROOT / "tests" / file, tree / "tests")
    compileall.compile_dir(tree, quiet=2)


def _compile_requests(directory: Path) -> Path:
    made, source = directory / "requests.so", Path(__file__).with_name("requests.c")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    try:
        subprocess.run(
            [*compiler, *flags, "-o", str(made), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise CannotCountError(f"no compiler: {error}") from None
    except subprocess.CalledProcessError as error:
        raise CannotCountError(f"requests.c does not compile: {error.stderr.strip()}") from None
    return made


def _total(counts: Path) -> int:
    totals = [line for line in counts.read_text().splitlines() if line.startswith("totals:")]
    return int(totals[0].split()[1])


if __name__ == "__main__":
    sys.exit(main())
