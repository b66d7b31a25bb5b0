"""Draws the results of a run, each as an SVG for light pages and one for dark pages.

    speed      five ratios for the front page        capacity   time of a call by buffer size
    ratios     eight ratios with their spread        latency    slow calls
    writers    throughput beside writers             large      time per item by batch size
    whole      long operations by capacity

Only measured results are drawn. ``python -m benchmarks.plots FOUND DIRECTORY`` draws a stored run.
It needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks import capacity, latency, whole, writers
from benchmarks.large import ONE_THREAD
from benchmarks.library import ARRAYS, IN_PLACE, TENSORDICT
from benchmarks.report import BOUND, FIRST, OURS, ratio
from benchmarks.table import lines

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
"""Rows of the plot of ratios: items, operation, form and title."""

_FRONT = (0, 1, 3, 4, 5)
"""Rows of the plot on the front page."""

_LONG = (
    "sample(256)",
    "first sample(256) in slices",
    "attach, one was killed",
    "recover",
    "check",
    "save",
)
"""Rows of the plot of whole buffers; ``whole.md`` has all rows."""

_NAMES = {"sb3": "stable-baselines3", FIRST: "TorchRL", BOUND: "plain C (the bound)"}
_BEST, _ONE = "fastest other library", f"{OURS}, one thread"
_FILLED = {"empty": "empty", "1 %": "1 % full", "full": "full"}

THEMES = {
    "light": {"text": "#24292f", "grid": "#d8dee4", OURS: "#3f51b5", FIRST: "#d9730d"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", OURS: "#8c9eff", FIRST: "#f0883e"},
}
_SHARED = {_BEST: "#2da44e", BOUND: "#8b949e"}


def draw(found: dict[str, Any], directory: Path) -> list[Path]:
    """Draws all plots for which the run has results. Returns the files."""
    pictures: dict[str, Callable[[dict[str, Any], dict[str, str]], Any]] = {
        "speed": _speed,
        "ratios": _ratios,
        "capacity": _capacities,
        "writers": _writers,
        "latency": _latencies,
        "whole": _whole,
        "large": _batches,
    }
    drawn = []
    for theme, colours in THEMES.items():
        for name, picture in pictures.items():
            with plt.rc_context(_style_of(colours)):
                figure = picture(found, {**_SHARED, **colours, _ONE: colours[OURS]})
                if figure is not None:
                    path = directory / f"{name}-{theme}.svg"
                    figure.savefig(path, transparent=True, metadata={"Date": None})
                    plt.close(figure)
                    drawn.append(path)
    return drawn


def _style_of(colours: dict[str, str]) -> dict[str, Any]:
    text = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
        colours["text"],
    )
    return {
        **text,
        "axes.edgecolor": colours["grid"],
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "grid.color": colours["grid"],
        "legend.frameon": False,
        "svg.fonttype": "none",  # letters stay letters
        "svg.hashsalt": "shmbuffer",
    }


# ---- ratios ----


def _speed(found: dict[str, Any], colours: dict[str, str]) -> Any:
    # Narrow, so that its letters are large enough on a phone.
    return _bars(found, colours, [_PLAIN[at] for at in _FRONT], width=6, spread=False)


def _ratios(found: dict[str, Any], colours: dict[str, str]) -> Any:
    return _bars(found, colours, _PLAIN, width=8, spread=True)


def _bars(
    found: dict[str, Any],
    colours: dict[str, str],
    rows: Sequence[tuple[str, str, str, str]],
    *,
    width: float,
    spread: bool,
) -> Any:
    titles = {(*key, form): title for *key, form, title in rows}
    compared = [
        (titles[line.row.items, line.row.operation, line.row.form], line)
        for line in lines(found)
        if line.peers and (line.row.items, line.row.operation, line.row.form) in titles
    ][::-1]
    if not compared:
        return None
    figure, axes = plt.subplots(figsize=(width, 0.62 * len(compared) + 1.1))
    for at, (_, line) in enumerate(compared):
        peers = list(dict.fromkeys(peer for peer in (FIRST, line.best()) if peer in line.peers))
        for turn, peer in enumerate(peers):
            to = ratio(line.ours, line.peers[peer])
            y = at + (0.2 - 0.4 * turn if len(peers) == 2 else 0)
            ends = [[to["median"] - to["min"]], [to["max"] - to["median"]]] if spread else None
            axes.barh(
                y,
                to["median"] - 1,  # a bar begins at 1x
                0.36,
                left=1,
                color=colours[FIRST if peer == FIRST else _BEST],
                xerr=ends,
                ecolor=colours[BOUND],
                label=_NAMES[FIRST] if peer == FIRST else _BEST,
            )
            named = "" if peer == FIRST else f" ({_NAMES.get(peer, peer)})"
            end = to["max"] if spread else to["median"]
            axes.annotate(f" {to['median']:.3g}x{named}", (end, y), va="center", size=10)
    axes.set_yticks(range(len(compared)), [title for title, _ in compared], size=11)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    _plainly(axes.xaxis, axes.get_xlim(), lambda value: f"{value:g}x")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.axvline(1, color=colours["text"], linewidth=0.8)
    _legend(figure, title="how many times faster shmbuffer is than")
    if spread:
        axes.set_xlabel("median of the rounds; the grey line spans all rounds")
    return figure


# ---- lines ----


def _capacities(found: dict[str, Any], colours: dict[str, str]) -> Any:
    part = _part(found, "capacity")
    if part is None:
        return None
    figure, panels = _row_of_panels(len(capacity.OPERATIONS), "time of a call")
    for axes, operation in zip(panels, capacity.OPERATIONS, strict=True):
        for name, points in _four(part, operation + ", of ", colours):
            sizes = [(int(text.replace(",", "")), one["median"]) for text, one in points]
            axes.plot(*zip(*sorted(sizes), strict=True), **name)
        axes.set(title=operation, xscale="log", yscale="log", xlabel="items in the buffer")
        _plainly(axes.xaxis, axes.get_xlim(), _count)
    _times(panels)
    _legend(figure)
    return figure


def _writers(found: dict[str, Any], colours: dict[str, str]) -> Any:
    part = _part(found, "writers")
    if part is None:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    titles = {"items": "items written per second", "cycles": "learner's steps per second"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for library in (OURS, FIRST, *_others(part)):
            of_it = {
                one["operation"]: one["median"]
                for one in part["results"]
                if one["library"] == library
            }
            counts = [
                (w, of_it[t]) for w in writers.WRITERS if (t := writers.title(w, name)) in of_it
            ]
            if counts:
                style = _style(library, colours)
                axes.plot(*zip(*counts, strict=True), **style)
        axes.set(title=title, yscale="log", xlabel="processes that write")
        axes.set_xticks(writers.WRITERS)
        _plainly(axes.yaxis, axes.get_ylim(), _count)
    _legend(figure)
    return figure


def _latencies(found: dict[str, Any], colours: dict[str, str]) -> Any:
    part = _part(found, "latency")
    if part is None:
        return None
    figure, panels = _row_of_panels(len(latency.OPERATIONS), "time of a call")
    for axes, operation in zip(panels, latency.OPERATIONS, strict=True):
        for name, points in _four(part, operation + ": ", colours):
            of_it = {percentile: one["median"] for percentile, one in points}
            axes.plot(list(of_it), list(of_it.values()), **name)
        axes.set(title=operation, yscale="log", xlabel="percentile of the calls")
    _times(panels)
    _legend(figure)
    return figure


def _whole(found: dict[str, Any], colours: dict[str, str]) -> Any:
    part = _part(found, "whole")
    if part is None:
        return None
    points = whole.points(part)
    names = [name for name in _LONG if any(row == name for row, _ in points)]
    shades = dict(zip(_FILLED, (colours[BOUND], colours[FIRST], colours[OURS]), strict=True))
    figure, panels = plt.subplots(2, 3, figsize=(10, 6), sharex=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=False):
        for filled in whole.SHARES:
            if (name, filled) in points:
                costs = sorted(points[name, filled].items())
                how = {"color": shades[filled], "label": _FILLED[filled]}
                axes.plot(*zip(*costs, strict=True), marker="o", **how)
        axes.set(title=name, xscale="log", yscale="log")
        _plainly(axes.xaxis, axes.get_xlim(), _count)
        _plainly(axes.yaxis, axes.get_ylim(), _time)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("capacity in items")
    for axes in panels[:, 0]:
        axes.set_ylabel("time")
    _legend(figure)
    return figure


def _batches(found: dict[str, Any], colours: dict[str, str]) -> Any:
    parts = [part for part in found["benchmarks"] if part["name"] == "large"]
    if not parts:
        return None
    figure, panels = plt.subplots(1, len(parts), figsize=(3.4 * len(parts), 3.6), squeeze=False)
    for axes, part in zip(panels[0], parts, strict=True):
        costs: dict[str, dict[int, float]] = {}
        for one in part["results"]:
            if count := re.fullmatch(r"sample\((\d+)\), prioritized", one["operation"]):
                ours = one["library"].startswith(OURS)
                if not ours or one["form"] == TENSORDICT:
                    a_item = one["median"] / int(count[1])
                    costs.setdefault(one["library"], {}).setdefault(int(count[1]), a_item)
        best = _best({name: list(of.values()) for name, of in costs.items()})
        shown = (OURS, f"{OURS}, {ONE_THREAD}", BOUND, FIRST, *best)
        for name in (name for name in shown if name in costs):
            axes.plot(*zip(*sorted(costs[name].items()), strict=True), **_style(name, colours))
        axes.set(title=f"items of {_bytes(part['item_bytes'])}", xscale="log", yscale="log")
        axes.set_xlabel("items in a batch")
        _plainly(axes.xaxis, axes.get_xlim(), _count, [256, 4096, 32768])
        _plainly(axes.yaxis, axes.get_ylim(), _time)
    panels[0, 0].set_ylabel("time for each item of a sample")
    _legend(figure)
    return figure


# ---- what they share ----


def _row_of_panels(count: int, label: str) -> tuple[Any, Any]:
    figure, panels = plt.subplots(1, count, figsize=(3.4 * count, 3.6), sharey=True)
    panels[0].set_ylabel(label)
    return figure, panels


def _four(
    part: dict[str, Any], operation: str, colours: dict[str, str]
) -> Iterator[tuple[dict[str, Any], list[tuple[str, Any]]]]:
    """Returns style and points of shmbuffer, TorchRL, the bound and the fastest other library."""
    of_each: dict[str, list[tuple[str, Any]]] = {}
    form = next((one["form"] for one in part["results"] if _is_ours(one, operation)), None)
    for one in part["results"]:
        if one["operation"].startswith(operation):
            if one["library"] == OURS and one["form"] != form:
                continue
            point = (one["operation"].removeprefix(operation), one)
            of_each.setdefault(one["library"], []).append(point)
    best = _best({name: [one["median"] for _, one in of] for name, of in of_each.items()})
    for name in (OURS, FIRST, *best, BOUND):
        if name in of_each:
            yield _style(name, colours), of_each[name]


def _is_ours(one: dict[str, Any], operation: str) -> bool:
    return one["library"] == OURS and one["operation"].startswith(operation)


def _others(part: dict[str, Any]) -> list[str]:
    names = dict.fromkeys(one["library"] for one in part["results"])
    return [name for name in names if name not in (OURS, FIRST, BOUND)][:1]


def _best(costs: dict[str, list[float]]) -> list[str]:
    """Returns the fastest library except shmbuffer, TorchRL and the bound, or None."""
    others = [name for name in costs if not name.startswith(OURS) and name not in (FIRST, BOUND)]
    return sorted(others, key=lambda name: sum(costs[name]) / len(costs[name]))[:1]


def _style(name: str, colours: dict[str, str]) -> dict[str, Any]:
    """Returns the style of a line, which is dashed for shmbuffer with one thread."""
    if name == f"{OURS}, {ONE_THREAD}":
        return {"color": colours[_ONE], "label": _ONE, "marker": "o", "linestyle": "--"}
    known = name if name in (OURS, FIRST, BOUND) else _BEST
    label = _NAMES.get(name, name) if known == name else _BEST
    return {"color": colours[known], "label": label, "marker": "o"}


def _legend(figure: Any, title: str | None = None) -> None:
    """Adds a legend for all panels below them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), title=title
    )


def _times(panels: Any) -> None:
    for axes in panels:
        axes.yaxis.set_major_formatter(lambda value, _: _time(value))
        axes.yaxis.set_minor_locator(NullLocator())


def _plainly(
    axis: Any,
    limits: tuple[float, float],
    text: Callable[[float], str],
    ticks: Sequence[float] | None = None,
) -> None:
    """Labels a logarithmic axis with plain numbers: powers of ten, and others if these are few."""
    low, high = limits
    for steps in ((1,), (1, 3), (1, 2, 5)) if ticks is None else ():
        ticks = [s * 10.0**e for e in range(-8, 12) for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 3:
            break
    axis.set_major_locator(FixedLocator(list(ticks or ())))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _time(seconds: float) -> str:
    for least, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * least:
            return f"{seconds / least:g} {unit}"
    return f"{seconds * 1e9:g} ns"


def _count(value: float) -> str:
    for least, unit in ((1e6, " M"), (1e3, " k")):
        if value >= 10 * least or (value >= least and value % least == 0):
            return f"{value / least:.3g}{unit}"
    return f"{value:g}"


def _bytes(count: int) -> str:
    return f"{count} bytes" if count < 1000 else f"{count / 1000:.0f} KB"


def _part(found: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((part for part in found["benchmarks"] if part["name"] == name), None)


if __name__ == "__main__":
    print(*draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])), sep="\n")
