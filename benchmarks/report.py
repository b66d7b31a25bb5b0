"""What a run found: as a table for people, as JSON for programs.

    {"machine": {...}, "versions": {library: {...}}, "setting": {...},
     "peers": {name: "measured" or why not},
     "benchmarks": {name: {"question": "...", "others_cpus": {"median", "min", "max"},
                           "results": [{"operation", "library", "form", "unit",
                                        "median", "p95", "min", "max", "rounds": [...],
                                        "ratio": {"to", "median", "min", "max"} or null}]}}}

Times are in seconds; the unit "x" is how many times smaller. A ratio says how many times better
than the peer, for times, rates and sizes alike.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comparison import Setting
from benchmarks.measure import Load, Ratio, Series

OURS = "shmbuffer"


def machine(directory: Path) -> dict[str, Any]:
    """The CPUs, the kernel, and what ``directory`` lies on."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": _filesystem(directory),
        "load": list(os.getloadavg()),
    }


def setting_as_json(setting: Setting) -> dict[str, Any]:
    """What the run was made with."""
    return {
        "items": setting.kind.name,
        "item_bytes": setting.kind.nbytes,
        "capacity": setting.capacity,
        "records": setting.records,
        "rounds": setting.rounds,
        "blocks": setting.blocks,
    }


def header(found: dict[str, Any]) -> str:
    """Machine, versions and setting, for people."""
    box, made = found["machine"], found["setting"]
    versions = [
        f"  {library}: " + ", ".join(f"{name} {number}" for name, number in theirs.items())
        for library, theirs in found["versions"].items()
    ]
    missing = [
        f"  {name}: {why}" for name, why in found["peers"].items() if name not in found["versions"]
    ]
    return "\n".join(
        [
            f"{box['cpu']}, {box['cpus']} CPUs, load {box['load'][0]:.1f}, Linux {box['kernel']}, "
            f"Python {box['python']}, {box['filesystem']}",
            *versions,
            *missing,
            f"  buffers of {made['capacity']:,} {made['items']} items ({made['item_bytes']} bytes),"
            f" full, or of {made['records']:,} records; {made['rounds']} rounds",
            "  median and min..max of the rounds, p95 of the blocks of calls; ratio: how many times"
            " better than a peer [min..max]",
        ]
    )


def as_json(question: str, series: Sequence[Series], load: Load) -> dict[str, Any]:
    """One benchmark's part of the JSON."""
    return {
        "question": question,
        "others_cpus": _spread(load.rounds),
        "results": [
            {
                "operation": one.operation,
                "library": one.library,
                "form": one.form,
                "unit": one.unit,
                **_spread(one.figures),
                "p95": one.p95,
                "rounds": one.figures,
                "ratio": None if (ratio := ratio_of(one, series)) is None else _plain(ratio),
            }
            for one in series
        ],
    }


def ratio_of(one: Series, series: Sequence[Series]) -> Ratio | None:
    """How many times better than a peer: in the same form, or in the first that the peer has."""
    if one.library != OURS:
        return None
    peers = [
        peer for peer in series if peer.operation == one.operation and peer.library != one.library
    ]
    peers.sort(key=lambda peer: peer.form != one.form)
    return one.ratio_to(peers[0]) if peers else None


def table(name: str, question: str, series: Sequence[Series], load: Load) -> str:
    """One benchmark's part of what is printed."""
    others = _spread(load.rounds)
    titles = ("", "", "ratio", "median", "p95", "min..max")
    rows = []
    operations = list(dict.fromkeys(one.operation for one in series))
    for operation in operations:
        first = operation
        for one in (one for one in series if one.operation == operation):
            ratio = ratio_of(one, series)
            scale, unit = _scale(one.median, one.unit)
            low, high = min(one.figures) * scale, max(one.figures) * scale
            rows.append(
                (
                    first,
                    f"{one.library}, {one.form}",
                    "" if ratio is None else _times(ratio),
                    f"{_digits(one.median * scale)} {unit}",
                    _digits(one.p95 * scale),
                    f"{_digits(low)}..{_digits(high)}",
                )
            )
            first = ""
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in (titles, *rows)]
    busy = f"{others['median']:.1f} ({others['min']:.1f}..{others['max']:.1f})"
    return "\n".join([f"{name}: {question}  [CPUs used by others: {busy}]", *lines])


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    aligned = zip(row, widths, strict=True)
    return [
        text.ljust(width) if at < 3 else text.rjust(width)
        for at, (text, width) in enumerate(aligned)
    ]


def _times(ratio: Ratio) -> str:
    return f"{_digits(ratio.median)}x {ratio.to} [{_digits(ratio.min)}..{_digits(ratio.max)}]"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """What to multiply with, so that a few digits before the point are left, and its unit."""
    if unit == "x":
        return 1.0, "x"
    if unit == "s":
        steps = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
    else:
        steps = ((1e6, 1e-6, "M/s"), (1e3, 1e-3, "k/s"), (0.0, 1.0, "/s"))
    return next((scale, name) for least, scale, name in steps if value >= least)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _plain(ratio: Ratio) -> dict[str, Any]:
    return dataclasses.asdict(ratio)


def _filesystem(directory: Path) -> str:
    """Type of the file system below ``directory``: that of the longest mount point above it."""
    path, found = directory.resolve(), ("", "unknown file system")
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, right.split()[0])
    return found[1]
