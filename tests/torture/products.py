"""What the default run of the tests takes a sample of: all of it, file by file, as time allows.

    python -m tests.torture.products --seconds 600 --seed 1

Each file of tests with a product, or with a test that runs with `--full` only, is run once at most,
in an order that the seed decides; one that has begun is finished.
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
    """Those with tests of which the default run leaves something out, from the root on."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in found
        if "compat" not in file.parts and MARKED.search(file.read_text("utf-8"))
    ]


def run(file: str) -> int:
    """All cases of one file; how many there are.

    Raises:
        AssertionError: one failed; with the command that repeats it.
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
    """Files for about ``seconds``, and at least one."""
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
