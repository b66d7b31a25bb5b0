"""Counts the branches of the C core that the tests take, with gcov, over all programs.

python -m tests.native.coverage [--missing] [--keep] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.native.program import CORE, CORNERS, HERE, RELINK, build, corner_cases, run
from tests.native.scenarios import SCENARIOS

ROOT = HERE.parents[1]
TREE = ROOT / "build" / "coverage"
SUITES = ("tests/memory", "tests/crash")

# Processes that end without atexit write their counters first.
SITECUSTOMIZE = """
import ctypes, os, sys

def flush_and_exit(status, exit=os._exit):
    if core := sys.modules.get("shmbuffer._native._core"):
        ctypes.CDLL(core.__file__).shmb_flush_counters()
    exit(status)

os._exit = flush_and_exit
"""


@dataclass
class Source:
    """Counts of the branches on each line of one source file of the core."""

    path: Path
    branches: dict[int, list[int]] = field(default_factory=dict)

    def add(self, line: int, counts: list[int]) -> None:
        known = self.branches.setdefault(line, counts)
        if len(known) < len(counts):  # a crash point is a function call in the stress program
            self.branches[line] = counts
        elif len(known) == len(counts):
            self.branches[line] = [a + b for a, b in zip(known, counts, strict=True)]

    @property
    def all(self) -> int:
        return sum(map(len, self.branches.values()))

    @property
    def taken(self) -> int:
        return sum(count > 0 for counts in self.branches.values() for count in counts)

    def missing(self) -> list[int]:
        return sorted(line for line, counts in self.branches.items() if 0 in counts)


def build_core() -> None:
    """Builds the extension with counters, and copies the tests to the folder beside it."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "build"),
            *(f"--build-lib={TREE}", f"--build-temp={TREE / 'objects'}"),
        ],
        cwd=ROOT,
        env=os.environ | {"SHMBUFFER_COVERAGE": "1", "CFLAGS": f"-include {HERE / 'flush.h'}"},
        check=True,
    )
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, TREE / name)
    shutil.copy(ROOT / "pyproject.toml", TREE)
    (TREE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def run_suites(arguments: Iterable[str]) -> int:
    """Runs pytest in the copied tree; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "--timeout=300", *arguments]
    return subprocess.run(command, cwd=TREE, env=os.environ | {"PYTHONPATH": str(TREE)}).returncode


def run_programs(rounds: int) -> None:
    """Runs the stress program in every scenario, and every case of the corners."""
    folder = TREE / "programs"
    folder.mkdir(exist_ok=True)
    stress, corners = build("coverage", folder), build("coverage", folder, program=CORNERS)
    for options in SCENARIOS.values():
        run("coverage", stress, *options, "--rounds", str(rounds))
    for case in corner_cases():
        run("coverage", corners, case)
    run("coverage", build("coverage", folder, program=RELINK), "1", str(rounds))


def read_counters() -> dict[str, Source]:
    """Returns the counts by file name, summed over all objects with counters."""
    sources = {path.name: Source(path) for path in sorted(CORE.rglob("*.[ch]"))}
    for data in sorted(TREE.rglob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(data)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for report in map(json.loads, said.splitlines()):
            for file in report["files"]:
                if Path(file["file"]).name in sources and "_native" in file["file"]:
                    source = sources[Path(file["file"]).name]
                    for line in file["lines"]:
                        source.add(line["line_number"], [b["count"] for b in line["branches"]])
    return {name: source for name, source in sources.items() if source.all}


def report(sources: dict[str, Source], missing: bool) -> None:
    for name, source in sources.items():
        share = 100 * source.taken / source.all
        print(f"{name:20} {source.taken:5} of {source.all:5} branches  {share:5.1f} %")
        text = source.path.read_text().splitlines()
        for line in source.missing() if missing else []:
            counts = source.branches[line]
            print(f"    {line:4} {counts.count(0)}/{len(counts)}  {text[line - 1].strip()}")
    taken, of = figures(sources)
    print(f"{'all':20} {taken:5} of {of:5} branches  {100 * taken / of:5.1f} %")


def figures(sources: dict[str, Source]) -> tuple[int, int]:
    """Returns the number of branches that were taken, and of all branches."""
    return sum(s.taken for s in sources.values()), sum(s.all for s in sources.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--missing", action="store_true", help="name the lines with a branch left")
    parser.add_argument("--keep", action="store_true", help="add to the counters of the last run")
    chosen, arguments = parser.parse_known_args()
    if not chosen.keep:
        build_core()
        run_programs(rounds=1600)
    status = run_suites(arguments or [*SUITES, "-q", "--numprocesses=auto", "--dist=loadgroup"])
    report(read_counters(), chosen.missing)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
