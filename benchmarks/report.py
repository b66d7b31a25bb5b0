"""Reports the results of a run as a table and as JSON.

The JSON has this form::

    {"machine": {...}, "versions": {library: {...}}, "rounds": 5,
     "peers": {name: "measured" or why not},
     "benchmarks": [{"name", "question", "items", "item_bytes", "capacity",
                     "others_cpus": {"median", "min", "max"},
                     "results": [{"operation", "library", "form", "unit",
                                  "median", "p95", "min", "max", "rounds": [...],
                                  "ratios": [{"to", "median", "min", "max"}, ...]}]}, ...]}

Times are in seconds. The unit "x" is a compression ratio, and "share" a fraction. A ratio is the
factor by which shmbuffer is better than torchrl, or than the best other peer, for times, rates and
sizes alike.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import allocation
from benchmarks.comparison import Setting
from benchmarks.measure import Series

OURS, FIRST, BOUND = "shmbuffer", "torchrl", "bound"
"""Names of the compared libraries, the baseline first, and of the bound."""
NO_PEERS = OURS, BOUND, allocation.NAME


def machine(directory: Path) -> dict[str, Any]:
    """Returns the CPUs, the kernel, and the file system of ``directory``."""
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


def header(found: dict[str, Any]) -> str:
    """Returns machine and versions as text."""
    box = found["machine"]
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
            f"  median and min..max of {found['rounds']} rounds, p95 of the blocks of calls; ratio:"
            " how many times better than a peer [min..max of the rounds]",
        ]
    )


def as_json(name: str, question: str, setting: Setting, series: Sequence[Series]) -> dict[str, Any]:
    """Returns the results of a benchmark as JSON."""
    results = [
        {
            "operation": one.operation,
            "library": one.library,
            "form": one.form,
            "unit": one.unit,
            **_spread(one.figures),
            "p95": one.p95,
            "rounds": one.figures,
        }
        for one in series
    ]
    return {
        "name": name,
        "question": question,
        "items": setting.kind.name,
        "item_bytes": setting.kind.nbytes,
        "capacity": setting.capacity,
        "others_cpus": _spread(setting.load.rounds),
        "results": [{**one, "ratios": ratios_of(one, results)} for one in results],
    }


def peers_of(one: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the results of the peers that are compared with one of shmbuffer.

    A result has the same form if the peer supports it, and otherwise the peer's fastest form.
    """
    peers: dict[str, dict[str, Any]] = {}
    for peer in results:
        if peer["operation"] == one["operation"] and peer["library"] not in NO_PEERS:
            so_far = peers.setdefault(peer["library"], peer)
            if so_far["form"] != one["form"] and (
                peer["form"] == one["form"]
                or (peer["median"] < so_far["median"]) == (one["unit"] == "s")
            ):
                peers[peer["library"]] = peer
    return peers


def bound_of(one: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the result of plain C for the operation, in any form."""
    for bound in results:
        if bound["operation"] == one["operation"] and bound["library"] == BOUND:
            return bound
    return None


def ratio(one: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Returns the factor by which a result is better than that of ``peer``, for each round."""
    pairs = zip(one["rounds"], peer["rounds"], strict=True)
    ratios = [theirs / ours if one["unit"] == "s" else ours / theirs for ours, theirs in pairs]
    return {"to": peer["library"], **_spread(ratios)}


def ratios_of(one: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios to torchrl, to the best other peer, and to the bound."""
    if one["library"] != OURS:
        return []
    peers = peers_of(one, results)
    ratios = [ratio(one, peer) for peer in peers.values()]
    bound = [ratio(one, bound)] if (bound := bound_of(one, results)) else []
    ratios.sort(key=lambda to: to["median"])
    first = [to for to in ratios if to["to"] == FIRST]
    return first + [to for to in ratios if to["to"] != FIRST][:1] + bound


def table(part: dict[str, Any]) -> str:
    """Returns the table of a benchmark."""
    others = part["others_cpus"]
    titles = ("", "", "ratio", "median", "p95", "min..max")
    rows = []
    before = None
    operations = list(dict.fromkeys(one["operation"] for one in part["results"]))
    for one in sorted(part["results"], key=lambda one: operations.index(one["operation"])):
        scale, unit = scale_of(one["median"], one["unit"])
        rows.append(
            (
                "" if one["operation"] == before else one["operation"],
                f"{one['library']}, {one['form']}",
                ", ".join(map(times, one["ratios"])),
                f"{digits(one['median'] * scale)} {unit}",
                digits(one["p95"] * scale),
                bounds(one),
            )
        )
        before = one["operation"]
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in (titles, *rows)]
    busy = f"{others['median']:.1f} ({others['min']:.1f}..{others['max']:.1f})"
    made = f"{part['capacity']:,} {part['items']} items ({part['item_bytes']:,} bytes)"
    title = f"{part['name']}: {part['question']}  [{made}; CPUs used by others: {busy}]"
    return "\n".join([title, *lines])


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    aligned = zip(row, widths, strict=True)
    return [
        text.ljust(width) if at < 3 else text.rjust(width)
        for at, (text, width) in enumerate(aligned)
    ]


def times(ratio: dict[str, Any]) -> str:
    """Formats a ratio with its spread."""
    spread = f"[{digits(ratio['min'])}..{digits(ratio['max'])}]"
    return f"{digits(ratio['median'])}x {ratio['to']} {spread}"


def bounds(one: dict[str, Any]) -> str:
    """Formats the minimum and maximum of the rounds in the unit of the median."""
    scale, _ = scale_of(one["median"], one["unit"])
    return f"{digits(one['min'] * scale)}..{digits(one['max'] * scale)}"


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """Returns the factor and the unit with which a value has one to three digits."""
    if unit in ("x", "share"):
        return (1.0, "x") if unit == "x" else (100.0, "%")
    if unit == "s":
        steps = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
    else:
        steps = ((1e6, 1e-6, "M/s"), (1e3, 1e-3, "k/s"), (0.0, 1.0, "/s"))
    return next((scale, name) for least, scale, name in steps if value >= least)


def digits(value: float) -> str:
    """Formats a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _filesystem(directory: Path) -> str:
    """Returns the type of the file system of ``directory``, from its longest mount point."""
    path, found = directory.resolve(), ("", "unknown file system")
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, right.split()[0])
    return found[1]
