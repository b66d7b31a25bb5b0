"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import (
    add,
    attach,
    bench_records,
    cycle,
    extend,
    recover,
    report,
    sample,
    writers,
)
from benchmarks.comparison import Setting
from benchmarks.items import KINDS
from benchmarks.library import Library
from benchmarks.measure import Load, Series
from benchmarks.ours import ShmBuffer
from benchmarks.peer import Peer, PeerError

BENCHMARKS: dict[str, ModuleType] = {
    "add": add,
    "extend": extend,
    "sample": sample,
    "cycle": cycle,
    "writers": writers,
    "attach": attach,
    "recover": recover,
    "records": bench_records,
}
PEERS = ("torchrl",)
_TOY = {"rounds": 2, "blocks": 3, "block_s": 1e-4, "contest_s": 0.05, "records": 16}
_REAL = {"rounds": 9, "blocks": 40, "block_s": 1e-3, "contest_s": 1.0, "records": 2000}


def parser() -> argparse.ArgumentParser:
    """What may be asked."""
    asked = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times shmbuffer, side by side with the peers that are at hand.",
        epilog="example: python -m benchmarks extend cycle --torchrl ~/envs/rl/bin/python",
    )
    questions = "; ".join(f"{name}: {question(module)}" for name, module in BENCHMARKS.items())
    asked.add_argument("names", nargs="*", metavar="NAME", help=f"{questions} Default: all.")
    asked.add_argument(
        "--capacity", type=int, help="items in a buffer (S 1000000, M 200000, L 20000)"
    )
    asked.add_argument("--rounds", type=int, help="how often everybody is measured (9)")
    asked.add_argument("--items", choices=KINDS, default="S", help="49 bytes, 3 KB, 56 KB (S)")
    asked.add_argument("--toy", action="store_true", help="only see that everything runs")
    asked.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    asked.add_argument("--dir", type=Path, help="where buffers are made (TMPDIR, or /var/tmp)")
    for peer in PEERS:
        asked.add_argument(
            f"--{peer}", metavar="PYTHON", help=f"interpreter of an environment that has {peer}"
        )
    return asked


def question(module: ModuleType) -> str:
    """What a benchmark answers: the first line of its file."""
    assert module.__doc__ is not None
    return module.__doc__.partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0, or 2 for arguments that make no sense."""
    asked = parser()
    arguments = asked.parse_args(argv)
    if unknown := set(arguments.names) - set(BENCHMARKS):
        asked.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    for name in ("capacity", "rounds"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            asked.error(f"--{name} is at least 1, not {number}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is removed
    with ExitStack() as stack:
        parent = arguments.dir or os.environ.get("TMPDIR") or "/var/tmp"
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shmbuffer-bench-", dir=parent))
        )
        libraries: list[Library] = [ShmBuffer()]
        try:
            for peer in PEERS:
                if (python := getattr(arguments, peer)) is not None:
                    other = Peer(peer, python, directory / f"{peer}.log")
                    stack.callback(other.end)
                    libraries.append(other)
        except PeerError as error:
            asked.error(f"--{error}")
        found = measure(arguments, libraries, directory)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(
    arguments: argparse.Namespace, libraries: list[Library], directory: Path
) -> dict[str, Any]:
    """Run the benchmarks, print each when it is done."""
    kind = KINDS[arguments.items]
    sizes: dict[str, Any] = dict(_TOY if arguments.toy else _REAL)
    if arguments.rounds is not None:
        sizes["rounds"] = arguments.rounds
    capacity = arguments.capacity or (1000 if arguments.toy else kind.capacity)
    setting = Setting(libraries, kind, capacity, directory=directory, **sizes)
    versions = {library.name: library.versions() for library in libraries}
    found: dict[str, Any] = {
        "machine": report.machine(directory),
        "versions": versions,
        "setting": report.setting_as_json(setting),
        "peers": {
            peer: "measured" if peer in versions else f"not measured, pass --{peer} PYTHON"
            for peer in PEERS
        },
        "benchmarks": {},
    }
    print(report.header(found), flush=True)
    for name in arguments.names or BENCHMARKS:
        load = Load()
        run: Callable[[Setting], list[Series]] = BENCHMARKS[name].run
        series = run(dataclasses.replace(setting, load=load))
        asked = question(BENCHMARKS[name])
        found["benchmarks"][name] = report.as_json(asked, series, load)
        print("\n" + report.table(name, asked, series, load), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
