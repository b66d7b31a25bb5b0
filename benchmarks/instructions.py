"""How many instructions does a hot call take? The same on a busy machine as on a quiet one.

    scripts/instructions             print them beside the recorded ones; 1 if any grew
    scripts/instructions --record    they are the recorded ones from now on
    scripts/instructions --wheel F   of that wheel, whose core another compiler has made

valgrind counts them (callgrind), which runs the program on a processor of its own making, with AVX2
and without AVX-512: so counts are comparable between machines, as those of hardware counters are
not, and a machine without them can count too. What they leave out: what an instruction costs,
caches and waiting for each other; and the AVX-512 kernels, which stay with the seconds.

Counting is off except during the calls. They are counted some at a time, and the median of these
counts is taken, less that of no call at all: what happens now and then (a dict that grows) is left
out. Hashes are the same in every run, and addresses as far as that can be had: where Python puts
its objects, and with it which entries of its caches collide, depends on everything that was
allocated before, so on the lengths of paths and of the environment, and on threads. What is counted
is therefore a copy in a directory whose path has the same length everywhere, and sees nothing of
the caller's environment:

    /tmp/shmbuffer-instructions-????????/     cwd, HOME, TMPDIR, and where the buffers are
        root/        the packages, compiled there
        env ──▶      the environment of our Python

The recorded counts are in `instructions.json`, with the versions that they hold for: another Python
or torch takes other numbers of instructions, and is not compared.
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
    """Something that counting needs is not here: which."""


def versions() -> dict[str, str]:
    """What else counts depend on."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "tensordict", "numpy")},
    }


def count(wheel: Path | None = None) -> dict[str, int]:
    """Instructions of each hot call.

    Args:
        wheel: what is counted; None: the package here, as it was compiled here.

    Raises:
        CannotCountError: valgrind is not here, or its header or a compiler is not.
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
    """Those calls that take too many more instructions than recorded, each as a sentence."""
    return [
        f"{name}: {found[name]:,} instructions, {found[name] / before - 1:+.1%} of {before:,}"
        if name in found
        else f"{name}: not counted any more"
        for name, before in recorded["instructions"].items()
        if found.get(name, sys.maxsize) > (1 + TOLERANCE) * before
    ]


def differing(recorded: dict[str, Any]) -> str | None:
    """Why counts made here cannot be compared with the recorded ones; None if they can."""
    here = versions()
    changed = [
        f"{name} {here[name]}, not {before}"
        for name, before in recorded["versions"].items()
        if here[name] != before
    ]
    return f"recorded with other versions: {'; '.join(changed)}" if changed else None


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and compare or record."""
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
    """What is counted, and compiled: what is compiled already names the files of its own tree."""
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
