"""Runs the tests that the default run leaves out, file by file, as long as time allows.

    python -m tests.torture.products --seconds 600 --seed 1

A test file belongs to this campaign if it has a product of cases of which the default run takes a
sample, or a test that runs only with `--full`. Each file is run at most once, in an order that
depends on the seed. A file that has begun is finished.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from tests.torture.command import Figures, Say, main

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"\bpytest\.mark\.(product|full)\b|\bseeds\(")


def files() -> list[str]:
    """Returns the paths, relative to the root, of files from which the default run omits cases."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in found
        if "compat" not in file.parts and MARKED.search(file.read_text("utf-8"))
    ]


def run(file: str) -> int:
    """Runs all cases of one file and returns their number.

    Raises:
        AssertionError: a case failed. The message has the command that repeats it.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory(prefix="shmbuffer-products-") as folder:
        report = Path(folder) / "report.xml"
        arguments = ["-m", "pytest", file, "--full", "-m", "product or full", "-q"]
        arguments += ["-p", "no:cacheprovider", f"--basetemp={folder}/tmp", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        again = f"python -m pytest {file} --full"
        assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}\nagain: {again}"
        return sum(1 for _ in ElementTree.parse(report).iter("testcase"))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Runs files for about ``seconds`` seconds, and at least one."""
    deadline = time.monotonic() + seconds
    order = files()
    random.Random(seed).shuffle(order)
    figures: Figures = {"files": 0, "files_left_out": len(order), "cases": 0}
    for file in order:
        if figures["files"] and time.monotonic() > deadline:
            break
        figures["cases"] += run(file)
        figures["files"] += 1
        figures["files_left_out"] -= 1
        say(f"{file} passed ({figures['files']} of {len(order)})")
    return figures


if __name__ == "__main__":
    sys.exit(main(campaign))
