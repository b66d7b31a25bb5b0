"""Runs all campaigns in turn, for hours, and prints a table of their results.

    scripts/torture --hours 8 --seed 1 --report torture.md

Each campaign runs in its own process and gets an equal share of the time. The mutants get two
shares. They end when all have been tried, and the others divide the time that is left. A campaign
that fails is not continued, but the others are. The table shows the figures of all campaigns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE

from tests.torture.command import Figures

_MUTANTS = "tests.mutants.campaign"
CAMPAIGNS = (
    _MUTANTS,
    "tests.torture.kills",
    "tests.torture.full_kills",
    "tests.torture.consumers",
    "tests.torture.units",
    "tests.torture.soak",
    "tests.crash.campaign",
    "tests.power.campaign",
    "tests.faults.campaign",
    "tests.damage.campaign",
    "tests.hostile.campaign",
    "tests.model.campaign",
    "tests.native.campaign",
    "tests.torture.products",
)


@dataclass(frozen=True)
class Result:
    """The result of one campaign. ``failure`` is empty if the campaign passed."""

    module: str
    seconds: float
    figures: Figures
    failure: str

    @property
    def command(self) -> str:
        return f"python -m {self.module}"


def run(module: str, seconds: float, seed: int) -> Result:
    """Runs one campaign, and passes its progress to stderr line by line."""
    command = [sys.executable, "-m", module, "--seconds", f"{seconds:.0f}", "--seed", str(seed)]
    began = time.monotonic()
    said = []
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            said.append(line)
        answer = process.stdout.read()
    status = process.returncode
    took = time.monotonic() - began
    if status:
        return Result(module, took, {}, "".join(said[-60:]) or f"it ended with {status}")
    return Result(module, took, json.loads(answer), "")


def is_there(module: str) -> bool:
    """True if the module can be imported. A package above it may be missing too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def table(results: list[Result], seed: int) -> str:
    """Formats the figures and the failures as Markdown."""
    lines = [
        f"Seed {seed}.",
        "",
        "| campaign | minutes | outcome | figures |",
        "|---|---:|---|---|",
    ]
    for result in results:
        figures = ", ".join(f"{name} {_number(it)}" for name, it in result.figures.items())
        outcome = "FAILED" if result.failure else "passed"
        lines.append(f"| `{result.module}` | {result.seconds / 60:.1f} | {outcome} | {figures} |")
    for result in results:
        if result.failure:
            lines += ["", f"`{result.command}` failed:", "", "```", result.failure.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _number(figure: float) -> str:
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:,.3g}"


def chosen(only: list[str]) -> list[str]:
    """Returns the requested campaigns, or all. ``soak`` stands for ``tests.torture.soak``."""
    unknown = [name for name in only if not any(_is(name, module) for module in CAMPAIGNS)]
    if unknown:
        raise SystemExit(f"no campaign is called {unknown[0]}; there are: {', '.join(CAMPAIGNS)}")
    return [module for module in CAMPAIGNS if not only or any(_is(n, module) for n in only)]


def _is(name: str, module: str) -> bool:
    _, package, last = module.split(".")
    return name in (module, package if last == "campaign" else last)


def main(arguments: list[str] | None = None) -> int:
    """Runs the campaigns and prints the table; returns 1 if one of them failed or is missing."""
    parser = argparse.ArgumentParser(prog="scripts/torture", description=(__doc__ or ""))
    parser.add_argument("--hours", type=float, required=True, help="for all of them together")
    parser.add_argument("--seed", type=int, default=1, help="what all draws follow from")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some of them")
    parser.add_argument("--report", type=Path, help="a file for the table")
    given = parser.parse_args(arguments)
    modules = chosen(given.only)
    results: list[Result] = []
    for i, module in enumerate(modules):
        spent = sum(result.seconds for result in results)
        share = max(0.0, given.hours * 3600 - spent) / (len(modules) - i)
        share *= 2 if module == _MUTANTS and len(modules) > 2 else 1
        sys.stderr.write(f"==> {module}, {share / 60:.1f} minutes\n")
        if not is_there(module):
            results.append(Result(module, 0.0, {}, "there is no such module"))
        else:
            results.append(run(module, share, given.seed))
    report = table(results, given.seed)
    print(report, end="")
    if given.report:
        given.report.write_text(report)
    return int(any(result.failure for result in results))


if __name__ == "__main__":
    sys.exit(main())
