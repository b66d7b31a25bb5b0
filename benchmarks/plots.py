"""Pictures of what a run has found: ratios, growth with the capacity, writers, slow calls.

Only what was measured is drawn; needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import capacity, latency, whole, writers
from benchmarks.large import ONE_THREAD
from benchmarks.library import ARRAYS, IN_PLACE, INDEX, TENSORDICT
from benchmarks.peer import PEERS
from benchmarks.report import BOUND, FIRST, OURS, ratio
from benchmarks.table import lines

_COLOURS = {name: f"C{at}" for at, name in enumerate((OURS, *PEERS, BOUND))}
"""A library has one colour in the pictures with lines."""

_PLAIN = [
    ("S", "add(1)", ARRAYS, "add one item"),
    ("S", "extend(32), prioritized", TENSORDICT, "write 32 items"),
    ("S", "sample(256), uniform", TENSORDICT, "sample 256, uniformly"),
    ("S", "sample(256), prioritized", TENSORDICT, "sample 256, by priority"),
    ("S", "cycle(256)", TENSORDICT, "sample 256, send priorities back"),
    ("S", "4 x extend(32): items", "processes", "4 writers beside a learner"),
    ("S", "attach to {capacity} items", "beside others", "attach to a full buffer"),
    ("S", "save {capacity} items, in memory", IN_PLACE, "save a full buffer, in memory"),
]
"""The rows of the picture of ratios: items, operation, form, and a title in plain words."""

_BEST = "the fastest other library (its name)"
_BARS = {"TorchRL": "C0", _BEST: "C1"}
_NAMES = {"sb3": "stable-baselines3"}


def draw(found: dict[str, Any], directory: Path) -> list[Path]:
    """Draw everything into files of ``directory``; which ones."""
    figures = {
        "ratios": _ratios(found),
        "capacity": _capacities(found),
        "writers": _writers(found),
        "latency": _latencies(found),
        "whole": _whole(found),
        "large": _batches(found),
    }
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(directory / f"{name}.png", dpi=130, bbox_inches="tight")
            plt.close(figure)
            drawn.append(directory / f"{name}.png")
    return drawn


def _ratios(found: dict[str, Any]) -> Any:
    titles = {(*key, form): title for *key, form, title in _PLAIN}
    compared = [
        (titles[line.row.items, line.row.operation, line.row.form], line)
        for line in lines(found)
        if line.peers and (line.row.items, line.row.operation, line.row.form) in titles
    ][::-1]
    if not compared:
        return None
    figure, axes = plt.subplots(figsize=(8.5, 0.5 * len(compared) + 1.2))
    for at, (_, line) in enumerate(compared):
        peers = list(dict.fromkeys(peer for peer in (FIRST, line.best()) if peer in line.peers))
        for turn, peer in enumerate(peers):
            to = ratio(line.ours, line.peers[peer])
            spread = [[to["median"] - to["min"]], [to["max"] - to["median"]]]
            y = at + (0.2 - 0.4 * turn if len(peers) == 2 else 0)
            colour = _BARS["TorchRL" if peer == FIRST else _BEST]
            better = to["median"] - 1  # a bar begins at 1x
            axes.barh(y, better, 0.36, left=1, color=colour, xerr=spread, ecolor="grey")
            named = "" if peer == FIRST else f" ({_NAMES.get(peer, peer)})"
            axes.annotate(f" {to['median']:.3g}x{named}", (to["max"], y), va="center", size=8)
    axes.set_yticks(range(len(compared)), [title for title, _ in compared], size=9)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in _BARS.items()],
        title="how many times faster shmbuffer is than",
        loc="lower center",
        bbox_to_anchor=(0.5, 0.88),
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    axes.set_xlabel("median of the rounds; the grey line spans all rounds", size=8)
    return figure


def _capacities(found: dict[str, Any]) -> Any:
    part = _part(found, "capacity")
    if part is None:
        return None
    figure, panels = plt.subplots(1, len(capacity.OPERATIONS), figsize=(13, 3.8), sharey=True)
    for axes, operation in zip(panels, capacity.OPERATIONS, strict=True):
        for name, points in _points(part, operation + ", of "):
            sizes = [(int(text.replace(",", "")), one["median"] * 1e6) for text, one in points]
            axes.plot(*zip(*sorted(sizes), strict=True), label=name, **_style(name))
        axes.set(title=operation, xscale="log", yscale="log", xlabel="items in the buffer")
    panels[0].set_ylabel("µs a call")
    for axes in panels:
        axes.legend(fontsize=7)
    return figure


def _writers(found: dict[str, Any]) -> Any:
    part = _part(found, "writers")
    if part is None:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8))
    for axes, name in zip(panels, ("items", "cycles"), strict=True):
        for library in dict.fromkeys(one["library"] for one in part["results"]):
            of_it = {
                one["operation"]: one["median"]
                for one in part["results"]
                if one["library"] == library
            }
            counts = [
                (w, of_it[t]) for w in writers.WRITERS if (t := writers.title(w, name)) in of_it
            ]
            axes.plot(*zip(*counts, strict=True), label=library, **_style(library))
        axes.set(yscale="log", xlabel=f"processes that extend({writers.WRITTEN})")
        axes.set_xticks(writers.WRITERS)
    panels[0].set_title("items written a second")
    panels[1].set_title(f"learner's cycles({writers.DRAWN}) a second beside them")
    panels[1].legend(fontsize=7)
    return figure


def _latencies(found: dict[str, Any]) -> Any:
    part = _part(found, "latency")
    if part is None:
        return None
    figure, panels = plt.subplots(1, len(latency.OPERATIONS), figsize=(13, 3.8), sharey=True)
    for axes, operation in zip(panels, latency.OPERATIONS, strict=True):
        for name, points in _points(part, operation + ": "):
            of_it = {percentile: one["median"] * 1e6 for percentile, one in points}
            axes.plot(list(of_it), list(of_it.values()), label=name, **_style(name))
        axes.set(title=operation, yscale="log", xlabel="of the calls")
    panels[0].set_ylabel("µs a call")
    for axes in panels:
        axes.legend(fontsize=7)
    return figure


def _whole(found: dict[str, Any]) -> Any:
    part = _part(found, "whole")
    if part is None:
        return None
    points = whole.points(part)
    names = [name for name in whole.ROWS if any(row == name for row, _ in points)]
    figure, panels = plt.subplots(3, 4, figsize=(14, 9), sharex=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=False):
        for filled in whole.SHARES:
            if (name, filled) in points:
                costs = sorted(points[name, filled].items())
                axes.plot(*zip(*costs, strict=True), marker="o", label=filled)
        axes.set(title=name, xscale="log", yscale="log")
        axes.title.set_fontsize(9)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("seconds")
    panels[0, 0].legend(fontsize=8)
    return figure


def _batches(found: dict[str, Any]) -> Any:
    parts = [part for part in found["benchmarks"] if part["name"] == "large"]
    if not parts:
        return None
    calls = {
        "sample, prioritized": (r"sample\((\d+)\), prioritized", (TENSORDICT, ARRAYS)),
        "update": (r"update\((\d+)\)", (INDEX,)),
        "extend": (r"extend\((\d+)\)", (ARRAYS,)),
    }
    figure, rows = plt.subplots(
        len(parts), len(calls), figsize=(13, 3.6 * len(parts)), squeeze=False
    )
    for panels, part in zip(rows, parts, strict=True):
        for axes, (title, (pattern, forms)) in zip(panels, calls.items(), strict=True):
            costs: dict[str, list[tuple[int, float]]] = {}
            for one in part["results"]:
                if (count := re.fullmatch(pattern, one["operation"])) and one["form"] in forms:
                    a_item = one["median"] / int(count[1]) * 1e9
                    costs.setdefault(one["library"], []).append((int(count[1]), a_item))
            for name, points in costs.items():
                axes.plot(*zip(*sorted(points), strict=True), label=name, **_style(name))
            axes.set(title=f"{part['items']}: {title}", xscale="log", yscale="log")
        panels[0].set_ylabel("ns an item")
        panels[0].legend(fontsize=7)
    for axes in rows[-1]:
        axes.set_xlabel("items in a batch")
    return figure


def _style(name: str) -> dict[str, Any]:
    """Of a line: its library's colour; broken if it is a second form of ours, or one thread."""
    library, _, form = name.partition(", ")
    broken = library == OURS and form in (ARRAYS, ONE_THREAD)
    return {"marker": "o", "color": _COLOURS[library], "linestyle": "--" if broken else "-"}


def _part(found: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((part for part in found["benchmarks"] if part["name"] == name), None)


def _points(part: dict[str, Any], operation: str) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Of each library and form: what follows ``operation`` in the titles, and the result."""
    of_each: dict[str, list[tuple[str, Any]]] = {}
    for one in part["results"]:
        if one["operation"].startswith(operation):
            name = f"{one['library']}, {one['form']}" if one["library"] == OURS else one["library"]
            of_each.setdefault(name, []).append((one["operation"].removeprefix(operation), one))
    yield from of_each.items()
