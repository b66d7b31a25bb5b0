"""Functions that draw the panels of the report.

Each function draws on the axes of one panel. If there is nothing to draw, it returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.upkeep.history import BY_RECOVERY, Event, EventKind
from shmbuffer.memory.upkeep.item_stats import ItemWriter
from shmbuffer.watch import tables, units
from shmbuffer.watch.buffer_state import BufferState
from shmbuffer.watch.plot.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


GOOD, BAD, MUTED = "#2e7d32", "#c62828", "#6b7280"
WRITTEN, DRAWN, THIRD = "#1f6fb4", "#e07b00", "#7b4ba8"
"""Colours for written items, sampled items, and other values."""

UNRECORDED = "#9ca3af"
_GONE, _OTHERS = "#9ca3af", "#d1d5db"

_MARKS = (
    (EventKind.DIED, BAD, "v", "died"),
    (EventKind.RECOVERED, THIRD, "D", "recovered"),
)
_MOST_ROWS = 12  # maximum number of clients or collectors in a panel
_WIDE_APART = 20  # ratio of two rates above which their axis is logarithmic


# ---- panels over time ----


def _rates(axes: Axes, buffer: BufferState, line: Timeline) -> None:
    times, (written, drawn) = line.rates("inserts", "items_sampled")
    _line(axes, times, written, WRITTEN, "written")
    _line(axes, times, drawn, DRAWN, "sampled")
    typical = [np.median(each[each > 0]) for each in (written, drawn) if (each > 0).any()]
    if len(typical) == 2 and max(typical) > _WIDE_APART * min(typical):
        axes.set_yscale("symlog", linthresh=1.0)
    axes.margins(y=0.2)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    _thousands(axes.yaxis)
    for kind, color, marker, label in _MARKS:
        at = _dates([one.time_s for one in line.events if one.kind == kind])
        for one in at if len(at) <= _MOST_ROWS else ():
            axes.axvline(one, color=color, linewidth=0.8, alpha=0.5)
        if at:
            how: dict[str, Any] = {"color": color, "label": f"{label} ({len(at)})"}
            high = np.full(len(at), 0.96)
            axes.plot(at, high, marker, transform=axes.get_xaxis_transform(), **how)
    if line.gaps:
        axes.fill_between([], [], color=UNRECORDED, alpha=0.25, label="not recorded")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.02), ncols=5, borderaxespad=0.0)


def _items(axes: Axes, buffer: BufferState, line: Timeline) -> None:
    counters = buffer.found["counters"]
    fill = counters["length"] / counters["elements"]
    axes.set_title(f"items: {units.percent(fill)} of {counters['elements']:,}")
    times, lengths = line.levels("length")
    axes.fill_between(_dates(times), lengths, color=WRITTEN, alpha=0.18, linewidth=0)
    _line(axes, times, lengths, WRITTEN)
    axes.axhline(counters["elements"], color=MUTED, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.06 * counters["elements"])
    _thousands(axes.yaxis)


def _ratio(axes: Axes, buffer: BufferState, line: Timeline) -> str | None:
    inserts, sampled = buffer.total("inserts"), buffer.total("items_sampled")
    if inserts:
        mean = sampled / inserts
        axes.set_title(f"samples per insert: {mean:{',.0f' if mean >= 100 else '.3g'}}")
    times, (written, drawn) = line.lines("inserts", "items_sampled")
    ratios = _share(drawn, written)
    if not np.isfinite(ratios).any():
        return "nothing was written"
    axes.plot(_dates(times), ratios, color=DRAWN, marker=".", markersize=2.5)
    if line.has("samples_per_insert") and line.values("samples_per_insert").any():
        axes.get_lines()[0].set_label("sampled")
        times, wanted = line.levels("samples_per_insert")
        wanted[wanted == 0] = np.nan
        _line(axes, times, wanted, MUTED, "configured", dashed=True)
        axes.margins(y=0.25)
    axes.set_ylim(bottom=0)
    return None


def _clients(axes: Axes, buffer: BufferState, line: Timeline) -> None:
    found = client_spans(line, buffer)
    clients = list(dict.fromkeys(who for who, _, _, _ in found))
    rows = clients[:_MOST_ROWS]
    for who, begin_s, end_s, died in found:
        if who in rows:
            y, color = rows.index(who), MUTED if who.startswith("coordinator") else WRITTEN
            axes.plot([date(begin_s), date(end_s)], [y, y], color=color, linewidth=5, alpha=0.55)
            if died:
                axes.plot(date(end_s), y, "X", color=BAD, markersize=6)
    _rows(axes, [_cut(who, 22) for who in rows], len(rows))
    if len(clients) > len(rows):
        axes.set_title(f"{axes.get_title(loc='left')}: {len(rows)} of {len(clients)}")


def client_spans(line: Timeline, buffer: BufferState) -> list[tuple[str, float, float, bool]]:
    """Returns the name, start time and end time of each client, and True if it died.

    Times are in seconds since 1970. Clients are sorted by role, name and start time.
    """
    alive = {client["incarnation"] for client in buffer.living}
    here = {client["incarnation"] for client in buffer.found["clients"]}
    order = {"collector": 1, "client": 2, "learner": 3}
    found = []
    for incarnation, first in line.known.items():
        last = line.ended.get(incarnation)
        end_s, died = line.end_s, incarnation in here - alive
        until_s = line.recorded_until_s(line.seen_by[incarnation])
        until_s = line.begin_s - 1.0 if until_s is None else until_s
        if last is not None:
            end_s, died = last.time_s, last.kind == EventKind.DIED
            if last.recorder == BY_RECOVERY:  # a later recovery found the client dead
                end_s = min(end_s, until_s)
        elif incarnation not in here:  # the client ended while no coordinator recorded the history
            end_s, died = until_s, first.role == "coordinator"
        if end_s >= line.begin_s:
            begin_s = max(line.begin_s, first.time_s)
            place = order.get(first.role, 4)
            found.append((place, _row(first), begin_s, max(begin_s, end_s), died))
    return [span for _, *span in sorted(found)]  # type: ignore[misc]


def _row(one: Event) -> str:
    return "coordinator" if one.role == "coordinator" else tables.clean(one.who)


def _age(axes: Axes, buffer: BufferState, line: Timeline) -> str | None:
    times, (ages, drawn) = line.lines("age_sum", "items_sampled")
    means = _share(ages, drawn)
    if not np.isfinite(means).any():
        return "nothing was sampled"
    _line(axes, times, means, DRAWN, "mean, when sampled")
    times, lengths = line.levels("length")
    _line(axes, times, lengths / 2, MUTED, "uniform sampling", dashed=True)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    _thousands(axes.yaxis)
    return None


def _losses(axes: Axes, buffer: BufferState, line: Timeline) -> str | None:
    names = ("updates_stale", "updates_applied", "redraws", "items_sampled", "waits", "inserts")
    times, (stale, applied, redraws, drawn, waits, written) = line.lines(*names)
    for label, share, color in (
        ("late updates", _share(stale, stale + applied), BAD),
        ("rows sampled again", _share(redraws, redraws + drawn), DRAWN),
        ("waits per item written", _share(waits, written), WRITTEN),
    ):
        if np.isfinite(share).any():
            _line(axes, times, 100 * share, color, label)
    if not axes.get_lines():
        return "nothing was written, sampled or updated"
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1] * 1.35))
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(loc="upper left")
    return None


def _priorities(axes: Axes, buffer: BufferState, line: Timeline) -> str | None:
    if not buffer.found["counters"]["prioritized"]:
        return _without_priorities(buffer)
    times, sums = line.levels("p_sum")
    means = _share(sums, line.levels("length")[1])
    if not (np.isfinite(means).any() and np.nanmax(means) > 0):
        return "nothing was written"
    _, greatest = line.levels("max_priority")
    greatest[~(greatest > 0)] = means[~(means > 0)] = np.nan
    _line(axes, times, greatest, MUTED, "largest ever")
    _line(axes, times, means, THIRD, "mean mass")
    _log(axes, axes.yaxis)
    axes.margins(y=0.3)
    return None


# ---- panels of the current state ----


def _distribution(axes: Axes, buffer: BufferState) -> str | None:
    if not buffer.found["counters"]["prioritized"]:
        return _without_priorities(buffer)
    if buffer.item_stats is None or not len(buffer.item_stats.priorities):
        return "the buffer is empty"
    known = ~np.isnan(buffer.item_stats.priorities)
    given, masses = buffer.item_stats.priorities[known], buffer.item_stats.masses[known]
    positive = given > 0
    if not positive.any():
        return "every priority is 0"
    low, high = np.log10(given[positive].min()), np.log10(given[positive].max())
    middle, half = (low + high) / 2, max(0.5, (high - low) / 2)
    edges = np.logspace(middle - half, middle + half, 41)
    edges[-1] *= 1 + 1e-9
    _spread(axes, given, masses, edges, positive)
    _log(axes, axes.xaxis)
    axes.margins(y=0.2)
    zero = float((given == 0).mean())
    axes.set_xlabel("raw priority" + (f"; {units.percent(zero)} of them are 0" if zero else ""))
    return None


def _ages(axes: Axes, buffer: BufferState) -> str | None:
    if buffer.item_stats is None or not len(buffer.item_stats.ages):
        return "the buffer is empty"
    ages = buffer.item_stats.ages
    _spread(axes, ages, buffer.item_stats.masses, np.linspace(0, ages.max() + 1, 41))
    axes.set_xlabel(_oldest(buffer, int(ages.max())))
    axes.locator_params(axis="x", nbins=5)
    _thousands(axes.xaxis)
    axes.margins(y=0.25)
    return None


def _spread(
    axes: Axes, values: Any, masses: Floats, edges: Floats, shown: Any = slice(None)
) -> None:
    """Draws a histogram of the items and one of their sampling probability, in percent."""
    bins = edges.tolist()
    each = np.full(len(values), 100 / len(values))
    axes.hist(values[shown], bins, weights=each[shown], color=WRITTEN, alpha=0.6, label="items")
    if masses.sum() > 0:
        chances = 100 * masses / masses.sum()
        how: dict[str, Any] = {"histtype": "step", "color": DRAWN, "linewidth": 1.6}
        axes.hist(values[shown], bins, weights=chances[shown], label="probability", **how)
    axes.yaxis.set_major_formatter(_percent)


def _oldest(buffer: BufferState, age: int) -> str:
    """Describes when the oldest item was written.

    If the history does not go back that far, the text contains a lower bound. ``age`` is the age of
    the item in writes.
    """
    line = buffer.timeline
    if line is None:
        return ""
    written = line.records["inserts"].astype(np.int64)
    at = int(np.searchsorted(written, written[-1] - age))
    span = units.span(line.end_s - float(line.times_s[at]))
    return f"the oldest was written {'more than ' if at == 0 else ''}{span} ago"


def _collectors(axes: Axes, buffer: BufferState) -> str | None:
    if buffer.item_stats is None or not len(buffer.item_stats.sources):
        return "the buffer is empty"
    # Loaded items have larger sources, which do not identify a client.
    sources = np.minimum(buffer.item_stats.sources, np.uint64(layout.INCARNATIONS))
    sources, counts = np.unique(sources, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    shares = (100 * counts[order] / counts.sum()).tolist()
    shown = len(order) if len(order) <= _MOST_ROWS else _MOST_ROWS - 1
    alive = {client["incarnation"] for client in buffer.living}
    labels, colors = [], []
    for source in sources[order][:shown].tolist():
        if source == layout.INCARNATIONS:
            labels.append("loaded")
            colors.append(_GONE)
            continue
        writer = buffer.item_stats.writers[source]
        labels.append(_cut(_name(buffer, writer), 24))
        colors.append(WRITTEN if writer.living and source in alive else _GONE)
    if shown < len(order):
        labels.append(f"{len(order) - shown} others")
        colors.append(_OTHERS)
        shares[shown:] = [sum(shares[shown:])]
    bars = axes.barh(range(len(shares)), shares, color=colors, height=0.7)
    axes.bar_label(bars, fmt=" %.3g %%", size=8)
    _rows(axes, labels, max(len(labels), 4))
    axes.set_xlim(0, 1.22 * max(shares))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    if any(color != WRITTEN for color in colors):
        axes.set_xlabel("grey: client has ended")
    return None


def _name(buffer: BufferState, writer: ItemWriter) -> str:
    known = buffer.timeline.known.get(writer.incarnation) if buffer.timeline is not None else None
    if known is not None:
        name = tables.clean(known.name)
        return f"{name} ({known.pid})" if name else f"{known.role} {known.pid}"
    if writer.pid is not None:
        return f"{writer.role} {writer.pid}"
    return f"client {writer.incarnation}"


def _without_priorities(buffer: BufferState) -> str:
    written = buffer.found["counters"]["write_count"]
    return "this buffer has no priorities" if written else "nothing was written"


# ---- functions for several panels ----


def _line(
    axes: Axes, times: Floats, values: Floats, color: str, label: str = "", *, dashed: bool = False
) -> None:
    how: dict[str, Any] = {"linestyle": "--", "linewidth": 1} if dashed else {}
    axes.plot(_dates(times), values, color=color, label=label or None, **how)


def _share(part: Floats, whole: Floats) -> Floats:
    """Divides ``part`` by ``whole``. The result is NaN if ``whole`` is not positive."""
    found: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return found


def _rows(axes: Axes, labels: Sequence[str], room: int) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(room - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _thousands(axis: Any) -> None:
    axis.set_major_formatter(
        lambda value, _: f"{value:,g}" if value < 1e6 else f"{value / 1e6:g} M"
    )


def _percent(value: float, _: float) -> str:
    return f"{value:g} %"


def _log(axes: Axes, axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(lambda value, _: f"{value:g}")  # the default uses mathtext
    axis.set_minor_formatter(NullFormatter())


def date(time_s: float) -> Any:
    """Converts a time in seconds since 1970 to a local date for matplotlib."""
    return datetime.fromtimestamp(time_s)


def _dates(times_s: Floats | Sequence[float]) -> list[Any]:
    return [date(time_s) for time_s in times_s]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


OVER_TIME: dict[str, tuple[str, Callable[[Any, BufferState, Timeline], str | None]]] = {
    "rates": ("items per second", _rates),
    "items": ("items", _items),
    "ratio": ("samples per insert", _ratio),
    "clients": ("clients over time (x: died)", _clients),
    "age": ("age of sampled items, in writes", _age),
    "losses": ("lost work", _losses),
    "priorities": ("priorities over time", _priorities),
}
NOW: dict[str, tuple[str, Callable[[Any, BufferState], str | None]]] = {
    "distribution": ("priorities now", _distribution),
    "ages": ("age of the items now, in writes", _ages),
    "collectors": ("items by collector", _collectors),
}
PLACES: list[Any] = [
    ["rates", "rates", "items", "ratio"],
    ["clients", "clients", "age", "losses"],
    ["priorities", "distribution", "ages", "collectors"],
]
