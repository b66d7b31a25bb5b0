"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
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
    asynchronous,
    attach,
    capacity,
    contention,
    crowd,
    cycle,
    extend,
    frames,
    hindsight,
    large,
    latency,
    lives,
    mixed,
    passes,
    plots,
    prefetch,
    records,
    recover,
    report,
    sample,
    save,
    sharded,
    slices,
    table,
    whole,
    windows,
    writers,
)
from benchmarks.bound import Bound
from benchmarks.comparison import Setting
from benchmarks.items import KINDS
from benchmarks.library import Library
from benchmarks.measure import Load, Series
from benchmarks.ours import ShmBuffer
from benchmarks.peer import PEERS, Peer, PeerError, interpreter, why_not

BENCHMARKS: dict[str, ModuleType] = {
    "add": add,
    "extend": extend,
    "sample": sample,
    "cycle": cycle,
    "hindsight": hindsight,
    "mixed": mixed,
    "windows": windows,
    "frames": frames,
    "slices": slices,
    "passes": passes,
    "asynchronous": asynchronous,
    "writers": writers,
    "attach": attach,
    "recover": recover,
    "save": save,
    "capacity": capacity,
    "latency": latency,
    "contention": contention,
    "records": records,
    "prefetch": prefetch,
    "sharded": sharded,
    "whole": whole,
    "large": large,
    "crowd": crowd,
    "lives": lives,
}
ON_REQUEST = (
    "passes",
    "frames",
    "records",
    "prefetch",
    "sharded",
    "whole",
    "crowd",
    "lives",
    "large",
)
SCALE = ("whole", "large", "writers", "crowd")
_TOY = {"rounds": 2, "blocks": 2, "block_s": 1e-4, "contest_s": 0.02, "calls": 20, "records": 16}
_REAL = {"rounds": 5, "blocks": 30, "block_s": 1e-3, "contest_s": 0.5, "calls": 5000}
_ROOT = Path(__file__).resolve().parents[1]
_OUT = _ROOT / "build" / "bench"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the arguments."""
    asked = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times shmbuffer, side by side with the peers that are at hand.",
        epilog="example: python -m benchmarks extend cycle --items M --beside torchrl,cpprb",
    )
    questions = "; ".join(f"{name}: {question(module)}" for name, module in BENCHMARKS.items())
    asked.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{questions} scale: {', '.join(SCALE)}. Default: all but {', '.join(ON_REQUEST)}.",
    )
    asked.add_argument(
        "--capacity", type=int, help="items in a buffer (S 1000000, M 200000, L 20000)"
    )
    asked.add_argument("--rounds", type=int, help="how often everybody is measured (5)")
    asked.add_argument(
        "--items", choices=KINDS, help="49 bytes, 3 KB, 56 KB (each where the table asks for it)"
    )
    asked.add_argument("--toy", action="store_true", help="only see that everything runs")
    asked.add_argument(
        "--out",
        type=Path,
        default=_OUT,
        metavar="DIR",
        help="where found.json, table.md and the plots go (build/bench)",
    )
    asked.add_argument(
        "--found", type=Path, metavar="FILE", help="measure nothing: show this found.json again"
    )
    asked.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/README.md as well"
    )
    asked.add_argument("--dir", type=Path, help="where buffers are made (TMPDIR, or /var/tmp)")
    asked.add_argument(
        "--beside", metavar="PEERS", help=f"only beside these (of {','.join(PEERS)}); '' for none"
    )
    for peer in PEERS:
        asked.add_argument(
            f"--{peer}", metavar="PYTHON", help=f"interpreter of an environment that has {peer}"
        )
    return asked


def question(module: ModuleType) -> str:
    """Returns the question of a benchmark, which is the first line of its file."""
    assert module.__doc__ is not None
    return module.__doc__.partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the requested benchmarks; returns 0, or 2 for invalid arguments."""
    asked = parser()
    arguments = asked.parse_args(argv)
    if unknown := set(arguments.names) - {*BENCHMARKS, "scale"}:
        asked.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    for name in ("capacity", "rounds"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            asked.error(f"--{name} is at least 1, not {number}")
    peers = PEERS if arguments.beside is None else tuple(filter(None, arguments.beside.split(",")))
    if strangers := set(peers) - set(PEERS):
        asked.error(f"no peer {', '.join(sorted(strangers))}; there are {', '.join(PEERS)}")
    if arguments.found is not None:
        found = json.loads(arguments.found.read_text())
        print(report.header(found), *map(report.table, found["benchmarks"]), sep="\n\n")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is removed
        try:
            found = run(arguments, peers)
        except PeerError as error:
            asked.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "found.json").write_text(json.dumps(found, indent=1) + "\n")
    drawn = plots.draw(found, arguments.out)
    for part in found["benchmarks"]:
        if part["name"] == "whole":
            (arguments.out / "whole.md").write_text(whole.markdown(part) + "\n")
            drawn.append(arguments.out / "whole.md")
    if table.lines(found):
        print("\n" + table.markdown(found))
        (arguments.out / "table.md").write_text(table.document(found) + "\n")
        drawn.append(arguments.out / "table.md")
        if arguments.write:
            table.write(found)
    print("\nwritten:", *(os.path.relpath(path) for path in (arguments.out / "found.json", *drawn)))
    return 0


def run(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    """Starts the libraries, and runs the benchmarks.

    Raises:
        PeerError: the given interpreter of a peer does not exist, or a request to a peer failed.
    """
    with ExitStack() as stack:
        parent = arguments.dir or os.environ.get("TMPDIR") or "/var/tmp"
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shmbuffer-bench-", dir=parent))
        )
        libraries: list[Library] = [ShmBuffer(), Bound(directory)]
        missing = {peer: "not asked for" for peer in PEERS if peer not in peers}
        for peer in peers:
            python = getattr(arguments, peer)
            if python is None and not interpreter(peer).exists():
                missing[peer] = why_not(peer)
                continue
            try:
                other = Peer(peer, python or str(interpreter(peer)), directory / f"{peer}.log")
            except PeerError as error:
                if python is not None:
                    raise
                missing[peer] = f"does not start: {error}"
                continue
            stack.callback(other.end)
            libraries.append(other)
        return measure(arguments, libraries, missing, directory)


def measure(
    arguments: argparse.Namespace,
    libraries: list[Library],
    missing: dict[str, str],
    directory: Path,
) -> dict[str, Any]:
    """Runs the benchmarks, and prints each result when it is complete."""
    sizes: dict[str, Any] = {"records": 2000, **(_TOY if arguments.toy else _REAL)}
    if arguments.rounds is not None:
        sizes["rounds"] = arguments.rounds
    versions = {library.name: library.versions() for library in libraries}
    found: dict[str, Any] = {
        "machine": report.machine(directory),
        "versions": versions,
        "rounds": sizes["rounds"],
        "peers": {peer: missing.get(peer, "measured") for peer in PEERS},
        "benchmarks": [],
    }
    print(report.header(found), flush=True)
    for name, items in plan(arguments.names, arguments.items):
        kind = KINDS[items]
        capacity = arguments.capacity or (1000 if arguments.toy else kind.capacity)
        setting = Setting(libraries, kind, capacity, directory=directory, load=Load(), **sizes)
        run: Callable[[Setting], list[Series]] = BENCHMARKS[name].run
        series = run(setting)
        asked = question(BENCHMARKS[name])
        found["benchmarks"].append(report.as_json(name, asked, setting, series))
        print("\n" + report.table(found["benchmarks"][-1]), flush=True)
    return found


def plan(names: Sequence[str], items: str | None) -> list[tuple[str, str]]:
    """Yields the benchmarks, each with a kind of items."""
    names = names or [name for name in BENCHMARKS if name not in ON_REQUEST]
    names = [one for name in names for one in (SCALE if name == "scale" else (name,))]
    if items is not None:
        return [(name, items) for name in names]
    return [(name, kind) for kind in KINDS for name in names if kind in BENCHMARKS[name].ITEMS]


if __name__ == "__main__":
    sys.exit(main())
