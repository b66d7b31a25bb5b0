"""Draws the picture of the command `plot`, which shows whether a replay buffer is healthy.

     headline: healthy or not, and why
     rates, with deaths and recoveries      | items          | samples per insert
     clients over time                      | age when drawn | late updates, redraws, waits
     priorities over time | distribution    | ages           | items by collector

The panels are in charts.py. A panel without data shows the reason. This module requires matplotlib.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shmbuffer.watch import tables, units
from shmbuffer.watch.buffer_state import BufferState
from shmbuffer.watch.findings import Finding, verdict
from shmbuffer.watch.plot import charts
from shmbuffer.watch.plot.charts import BAD, GOOD, MUTED, UNRECORDED, date
from shmbuffer.watch.plot.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_FINDINGS = 6

_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a path may contain "$"
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
_WIDTH, _HEIGHT = 16.0, 10.0  # inches
_FORMS = ((600.0, "%H:%M:%S"), (2 * 86400.0, "%H:%M"), (float("inf"), "%d %b"))
"""Formats of times on an axis, each with the longest time in seconds for which it is used."""


def picture(buffer: BufferState, findings: Sequence[Finding], form: str) -> bytes:
    """Draws the picture and returns it as the bytes of a file.

    ``form`` is the format: "png", "svg" or "pdf".
    """
    import matplotlib as mpl

    content = io.BytesIO()
    with mpl.rc_context(_STYLE):
        draw(buffer, findings).savefig(content, format=form, dpi=120)
    return content.getvalue()


def draw(buffer: BufferState, findings: Sequence[Finding]) -> Figure:
    """Draws the picture as a figure. The axes of each panel have its name as their label."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        top = _head(figure, buffer, findings)
        figure.set_layout_engine("constrained", rect=(0.005, 0.0, 0.99, top), h_pad=0.09, w_pad=0.1)
        panels = figure.subplot_mosaic(charts.PLACES, height_ratios=(1.15, 1.0, 1.0))
        for name, (title, over_time) in charts.OVER_TIME.items():
            axes = panels[name]
            axes.set_title(title)
            if buffer.timeline is None:
                _finish(axes, f"no history: {buffer.absent}")
            elif _finish(axes, over_time(axes, buffer, buffer.timeline)):
                _finish_time(axes, buffer.timeline)
        for name, (title, now) in charts.NOW.items():
            panels[name].set_title(title)
            _finish(panels[name], now(panels[name], buffer))
    return figure


def _head(figure: Figure, buffer: BufferState, findings: Sequence[Finding]) -> float:
    """Writes the text above the panels.

    Returns the position of its lower end, from 0 (bottom of the figure) to 1 (top).
    """
    path, line = tables.clean(buffer.found["path"]), buffer.timeline
    when = f"as of {units.clock(buffer.now_s)}"
    if line is not None:
        span = units.span(line.end_s - line.begin_s)
        when = f"{units.clock(line.begin_s)} to {units.clock(line.end_s)} ({span})"
    lines = [f"•  {tables.clean(one.says)}" for one in findings[:MOST_FINDINGS]]
    if len(findings) > len(lines):
        lines.append(f"•  and {len(findings) - len(lines)} more, see --json")

    def write(below: float, text: str, size: float, *, x: float = 0.012, **how: Any) -> None:
        figure.text(x, 1 - below / _HEIGHT, text, size=size, va="top", **how)

    color = BAD if findings else GOOD if buffer.found["counters"]["write_count"] else MUTED
    write(0.12, path if len(path) <= 90 else f"…{path[-89:]}", 15, weight="bold")
    write(0.17, when, 9, x=0.988, color=MUTED, ha="right")
    write(0.42, _state(buffer), 9, color=MUTED)
    write(0.66, verdict(buffer, findings).capitalize(), 12, weight="bold", color=color)
    for number, text in enumerate(lines):
        write(0.86 + 0.2 * number, text, 10.5, color=color)
    return 1.0 - (0.82 + 0.2 * len(lines)) / _HEIGHT


def _state(buffer: BufferState) -> str:
    counters, found = buffer.found["counters"], buffer.found
    alive, dead = len(buffer.living), len(found["clients"]) - len(buffer.living)
    parts = [
        f"{counters['length']:,} of {counters['elements']:,} items",
        f"{counters['write_count']:,} written",
        f"{units.counted(alive, 'client', 'clients')} alive" + (f", {dead} dead" if dead else ""),
        units.counted(found["epoch"], "recovery", "recoveries"),
    ]
    if found["needs_recovery"] and not alive:
        parts.append("not in use" if not dead else "the next client recovers it")
    return "   ·   ".join(parts)


def _finish(axes: Axes, why_empty: str | None) -> bool:
    """Adds a legend to a panel, or the reason why it is empty.

    Returns False if the panel is empty.
    """
    if why_empty is None:
        if axes.get_legend() is None and axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        return True
    axes.set_xticks([])
    axes.set_yticks([])
    grid = axes.get_subplotspec()
    columns = 1 if grid is None else len(grid.colspan)
    lines = textwrap.fill(tables.clean(why_empty), 34 * columns)
    where = axes.transAxes
    text = axes.text(0.5, 0.5, lines, transform=where, ha="center", va="center", color=MUTED)
    text.set_in_layout(False)
    return False


def _finish_time(axes: Axes, line: Timeline) -> None:
    """Sets the time range, which all panels share, and marks times without records in grey."""
    from matplotlib.dates import AutoDateLocator, DateFormatter

    for begin_s, end_s in line.gaps:
        axes.axvspan(date(begin_s), date(end_s), color=UNRECORDED, alpha=0.25, linewidth=0)
    end_s = max(line.end_s, line.begin_s + 1.0, *(one.time_s for one in line.events))
    span_s = end_s - line.begin_s
    axes.set_xlim(date(line.begin_s - 0.01 * span_s), date(end_s + 0.01 * span_s))
    locator = AutoDateLocator(minticks=3, maxticks=6)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    form = next(form for limit_s, form in _FORMS if span_s <= limit_s)
    axes.xaxis.set_major_formatter(DateFormatter(form))  # type: ignore[no-untyped-call]
