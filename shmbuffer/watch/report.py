"""One picture that answers: is my replay healthy? What was, over time; what is; what looks wrong.

     headline: healthy or not, and why
     rates, with deaths and recoveries      | items          | draws per insert
     who was there                          | age when drawn | late updates, redraws, waits
     priorities over time | distribution    | ages           | items by collector

A panel that has nothing to show says why. Needs matplotlib.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.census import Writer
from shmbuffer.memory.history import BY_RECOVERY, Event, EventKind
from shmbuffer.watch import tables, units
from shmbuffer.watch.findings import Finding, verdict
from shmbuffer.watch.look import Look
from shmbuffer.watch.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

GOOD, BAD, MUTED = "#2e7d32", "#c62828", "#6b7280"
WRITTEN, DRAWN, THIRD = "#1f6fb4", "#e07b00", "#7b4ba8"
"""Of what is written, what is drawn, and what is neither."""

_UNRECORDED = "#9ca3af"

MARKS = {EventKind.DIED: (BAD, "v", "died"), EventKind.RECOVERED: (THIRD, "D", "recovered")}
_TITLES = {
    "rates": "items a second",
    "items": "items",
    "ratio": "draws per insert",
    "clients": "who was there, and who died (x)",
    "age": "age of what is drawn, in writes",
    "losses": "lost work",
    "priorities": "priorities over time",
}
MOST_ROWS = 12  # of clients, and of collectors
MOST_FINDINGS = 6
_WIDE_APART = 20  # times that one rate is another, from which an axis is logarithmic

_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a path may have a $ in it
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


def save(look: Look, findings: Sequence[Finding], path: Path) -> Path:
    """Draws the picture into a file, of the kind that its suffix says.

    Returns:
        Its absolute path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not know the suffix.
        OSError: it cannot be written there.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        draw(look, findings).savefig(path, dpi=120)
    return path.absolute()


def draw(look: Look, findings: Sequence[Finding]) -> Figure:
    """Returns the picture; each panel has its name as label."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        lines = [verdict(look, findings).capitalize(), *_reasons(findings)]
        top = 1.0 - (0.62 + 0.2 * len(lines)) / 10.0
        figure = Figure(figsize=(16, 10))
        figure.set_layout_engine("constrained", rect=(0.005, 0.0, 0.99, top), h_pad=0.09, w_pad=0.1)
        grid = figure.add_gridspec(3, 4, height_ratios=(1.15, 1.0, 1.0))
        color = BAD if findings else GOOD if look.found["counters"]["write_count"] else MUTED
        _head(figure, look, lines, color)
        for name, where, over_time in _OVER_TIME:
            axes = figure.add_subplot(grid[where], label=name)
            if look.timeline is not None:
                over_time(axes, look, look.timeline)
                _finish_time(axes, look.timeline)
            else:
                axes.set_title(_TITLES[name])
                _nothing(axes, f"no history: {look.absent}")
        for name, where, now in _AS_IT_IS:
            now(figure.add_subplot(grid[where], label=name), look)
    return figure


def _reasons(findings: Sequence[Finding]) -> list[str]:
    shown = [f"•  {tables.clean(one.says)}" for one in findings[:MOST_FINDINGS]]
    rest = len(findings) - len(shown)
    return [*shown, *([f"•  and {rest} more, see --json"] if rest else [])]


def _head(figure: Figure, look: Look, lines: Sequence[str], color: str) -> None:
    height = 10.0
    path = tables.clean(look.found["path"])
    path = path if len(path) <= 90 else f"…{path[-89:]}"
    figure.text(0.012, 1 - 0.12 / height, path, size=15, weight="bold", va="top")
    figure.text(0.988, 1 - 0.17 / height, _when(look), size=9, color=MUTED, va="top", ha="right")
    figure.text(0.012, 1 - 0.42 / height, _state(look), size=9, color=MUTED, va="top")
    for number, line in enumerate(lines):
        figure.text(
            0.012,
            1 - (0.66 + 0.2 * number) / height,
            line,
            size=12 if number == 0 else 10.5,
            weight="bold" if number == 0 else "normal",
            color=color,
            va="top",
        )


def _when(look: Look) -> str:
    line = look.timeline
    if line is None:
        return f"looked at {_clock(look.now_s)}"
    span = units.span(line.end_s - line.begin_s)
    return f"{_clock(line.begin_s)} to {_clock(line.end_s)} ({span})"


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _state(look: Look) -> str:
    counters, found = look.found["counters"], look.found
    alive, dead = len(look.living), len(found["clients"]) - len(look.living)
    parts = [
        f"{counters['length']:,} of {counters['elements']:,} items",
        f"{counters['write_count']:,} written",
        f"{alive} {'client' if alive == 1 else 'clients'} alive"
        + (f", {dead} dead" if dead else ""),
        f"{found['epoch']} {'recovery' if found['epoch'] == 1 else 'recoveries'}",
    ]
    if found["needs_recovery"] and not alive:
        parts.append("nobody uses it" if not dead else "the next to open it recovers it")
    return "   ·   ".join(parts)


# ---- over time ----


def _rates(axes: Axes, look: Look, line: Timeline) -> None:
    axes.set_title(_TITLES["rates"])
    times, (written, drawn) = line.rates("inserts", "sampled")
    axes.plot(_dates(times), written, color=WRITTEN, label="written")
    axes.plot(_dates(times), drawn, color=DRAWN, label="drawn")
    typical = [np.median(each[each > 0]) for each in (written, drawn) if (each > 0).any()]
    if len(typical) == 2 and max(typical) > _WIDE_APART * min(typical):
        axes.set_yscale("symlog", linthresh=1.0)
    axes.margins(y=0.2)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    _thousands(axes.yaxis)
    for kind, (color, marker, label) in MARKS.items():
        at = [one.time_s for one in line.events if one.kind == kind]
        if at:
            for one in at if len(at) <= MOST_ROWS else ():
                axes.axvline(_date(one), color=color, linewidth=0.8, alpha=0.5)
            axes.plot(
                _dates(at),
                np.full(len(at), 0.96),
                marker,
                color=color,
                transform=axes.get_xaxis_transform(),
                label=f"{label} ({len(at)})",
            )
    if line.gaps:
        axes.fill_between([], [], color=_UNRECORDED, alpha=0.25, label="nobody recorded")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.02), ncols=5, borderaxespad=0.0)


def _items(axes: Axes, look: Look, line: Timeline) -> None:
    counters = look.found["counters"]
    fill = counters["length"] / counters["elements"]
    axes.set_title(f"items: {units.percent(fill)} of {counters['elements']:,}")
    times, lengths = line.levels("length")
    axes.fill_between(_dates(times), lengths, color=WRITTEN, alpha=0.18, linewidth=0)
    axes.plot(_dates(times), lengths, color=WRITTEN)
    axes.axhline(counters["elements"], color=MUTED, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.06 * counters["elements"])
    _thousands(axes.yaxis)


def _ratio(axes: Axes, look: Look, line: Timeline) -> None:
    inserts, sampled = look.total("inserts"), look.total("sampled")
    mean = f": {_short(sampled / inserts)}" if inserts else ""
    axes.set_title(f"draws per insert{mean}")
    times, (written, drawn) = line.lines("inserts", "sampled")
    ratios = np.divide(drawn, written, out=np.full(len(drawn), np.nan), where=written > 0)
    if not np.isfinite(ratios).any():
        _nothing(axes, "nothing was written")
        return
    axes.plot(_dates(times), ratios, color=DRAWN, marker=".", markersize=2.5, label="drawn")
    if line.has("samples_per_insert") and line.values("samples_per_insert").any():
        times, wished = line.levels("samples_per_insert")
        wished[wished == 0] = np.nan
        axes.plot(_dates(times), wished, color=MUTED, linestyle="--", linewidth=1, label="wished")
        axes.margins(y=0.25)
        axes.legend(loc="best")
    axes.set_ylim(bottom=0)


def _clients(axes: Axes, look: Look, line: Timeline) -> None:
    axes.set_title(_TITLES["clients"])
    stays = _stays(line, look)
    rows = list(dict.fromkeys(who for who, _, _, _ in stays))
    hidden, rows = rows[MOST_ROWS:], rows[:MOST_ROWS]
    for who, begin_s, end_s, died in stays:
        if who in rows:
            y = rows.index(who)
            color = WRITTEN if not who.startswith("coordinator") else MUTED
            axes.plot([_date(begin_s), _date(end_s)], [y, y], color=color, linewidth=5, alpha=0.55)
            if died:
                axes.plot(_date(end_s), y, "X", color=BAD, markersize=6)
    axes.set_yticks(range(len(rows)), [_cut(who, 22) for who in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if hidden:
        axes.set_title(f"{_TITLES['clients']}: {len(rows)} of {len(rows) + len(hidden)}")


def _stays(line: Timeline, look: Look) -> list[tuple[str, float, float, bool]]:
    """Who was there, from when, until when, and whether it died; those with a name by name."""
    alive = {client["incarnation"] for client in look.living}
    here = {client["incarnation"] for client in look.found["clients"]}
    stays = []
    for incarnation, first in line.known.items():
        last = line.ended.get(incarnation)
        end_s, died = line.end_s, incarnation in here - alive
        until_s = line.recorded_until_s(line.seen_by[incarnation])
        until_s = line.begin_s - 1.0 if until_s is None else until_s
        if last is not None:
            end_s, died = last.time_s, last.kind == EventKind.DIED
            if last.recorder == BY_RECOVERY:  # it was found dead, some time later
                end_s = min(end_s, until_s)
        elif incarnation not in here:  # while nobody recorded; a coordinator would have said so
            end_s = until_s
            died = first.role == "coordinator"
        if end_s >= line.begin_s:
            begin_s = max(line.begin_s, first.time_s)
            stays.append((_row(first), begin_s, max(begin_s, end_s), died))
    order = {"collector": 1, "client": 2, "learner": 3}
    roles = {_row(one): order.get(one.role, 4) for one in line.known.values()}
    return sorted(stays, key=lambda stay: (roles.get(stay[0], 0), stay[0], stay[1]))


def _row(one: Event) -> str:
    return "coordinator" if one.role == "coordinator" else tables.clean(one.who)


def _age(axes: Axes, look: Look, line: Timeline) -> None:
    axes.set_title(_TITLES["age"])
    times, (ages, drawn) = line.lines("age_sum", "sampled")
    means = np.divide(ages, drawn, out=np.full(len(ages), np.nan), where=drawn > 0)
    if not np.isfinite(means).any():
        _nothing(axes, "nothing was drawn")
        return
    axes.plot(_dates(times), means, color=DRAWN, label="mean, when drawn")
    times, lengths = line.levels("length")
    axes.plot(
        _dates(times), lengths / 2, color=MUTED, linestyle="--", linewidth=1, label="if uniform"
    )
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    _thousands(axes.yaxis)
    axes.legend(loc="best")


def _losses(axes: Axes, look: Look, line: Timeline) -> None:
    axes.set_title(_TITLES["losses"])
    names = ("updates_stale", "updates_applied", "redraws", "sampled", "waits", "inserts")
    times, (stale, applied, redraws, drawn, waits, written) = line.lines(*names)
    shares = {
        "updates that came too late": (stale, stale + applied, BAD),
        "rows drawn again": (redraws, redraws + drawn, DRAWN),
        "waits per item written": (waits, written, WRITTEN),
    }
    shown = False
    for label, (some, all_of_them, color) in shares.items():
        share = np.divide(some, all_of_them, out=np.full(len(some), np.nan), where=all_of_them > 0)
        if np.isfinite(share).any():
            shown = True
            axes.plot(_dates(times), 100 * share, color=color, label=label)
    if not shown:
        _nothing(axes, "nothing was written, drawn or updated")
        return
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1] * 1.35))
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(loc="upper left")


def _priorities(axes: Axes, look: Look, line: Timeline) -> None:
    axes.set_title(_TITLES["priorities"])
    if not look.found["counters"]["prioritized"]:
        _nothing(axes, _without_priorities(look))
        return
    times, sums = line.levels("p_sum")
    _, lengths = line.levels("length")
    means = np.divide(sums, lengths, out=np.full(len(sums), np.nan), where=lengths > 0)
    if not (np.isfinite(means).any() and np.nanmax(means) > 0):
        _nothing(axes, "nothing was written")
        return
    _, greatest = line.levels("max_priority")
    greatest[~(greatest > 0)] = means[~(means > 0)] = np.nan
    axes.plot(_dates(times), greatest, color=MUTED, label="greatest ever")
    axes.plot(_dates(times), means, color=THIRD, label="mean mass")
    _log(axes, axes.yaxis)
    axes.margins(y=0.3)
    axes.legend(loc="best")


# ---- as it is ----


def _distribution(axes: Axes, look: Look) -> None:
    axes.set_title("priorities now")
    if not look.found["counters"]["prioritized"]:
        _nothing(axes, _without_priorities(look))
        return
    if look.census is None or not len(look.census.priorities):
        _nothing(axes, "there is no item")
        return
    known = ~np.isnan(look.census.priorities)
    given, masses = look.census.priorities[known], look.census.masses[known]
    zero = float((given == 0).mean())
    positive = given > 0
    if not positive.any():
        _nothing(axes, "every priority is 0")
        return
    low, high = np.log10(given[positive].min()), np.log10(given[positive].max())
    middle, half = (low + high) / 2, max(0.5, (high - low) / 2)
    edges = np.logspace(middle - half, middle + half, 41)
    edges[-1] *= 1 + 1e-9
    bins = edges.tolist()
    shares = 100 * np.ones(len(given)) / len(given)
    axes.hist(
        given[positive], bins, weights=shares[positive], color=WRITTEN, alpha=0.6, label="items"
    )
    if masses.sum() > 0:
        axes.hist(
            given[positive],
            bins,
            weights=100 * masses[positive] / masses.sum(),
            histtype="step",
            color=DRAWN,
            linewidth=1.6,
            label="chance to be drawn",
        )
    _log(axes, axes.xaxis)
    axes.margins(y=0.2)
    axes.set_xlabel("priority as given" + (f"; {units.percent(zero)} are 0" if zero else ""))
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(loc="best")


def _without_priorities(look: Look) -> str:
    written = look.found["counters"]["write_count"]
    return "this buffer has no priorities" if written else "nothing was written"


def _ages(axes: Axes, look: Look) -> None:
    axes.set_title("age of the items now, in writes")
    if look.census is None or not len(look.census.ages):
        _nothing(axes, "there is no item")
        return
    ages, masses = look.census.ages, look.census.masses
    bins = np.linspace(0, ages.max() + 1, 41).tolist()
    each = np.full(len(ages), 100 / len(ages))
    axes.hist(ages, bins, weights=each, color=WRITTEN, alpha=0.6, label="items")
    if len(masses) and masses.sum() > 0:
        axes.hist(
            ages,
            bins,
            weights=100 * masses / masses.sum(),
            histtype="step",
            color=DRAWN,
            linewidth=1.6,
            label="chance to be drawn",
        )
    axes.set_xlabel(_oldest(look, int(ages.max())))
    axes.locator_params(axis="x", nbins=5)
    _thousands(axes.xaxis)
    axes.margins(y=0.25)
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(loc="best")


def _oldest(look: Look, age: int) -> str:
    """When the oldest item was written, where the history reaches back so far."""
    line = look.timeline
    if line is None:
        return ""
    written = line.records["inserts"].astype(np.int64)
    at = int(np.searchsorted(written, written[-1] - age))
    span = units.span(line.end_s - float(line.times_s[at]))
    return f"the oldest was written {'more than ' if at == 0 else ''}{span} ago"


def _collectors(axes: Axes, look: Look) -> None:
    axes.set_title("items by collector")
    if look.census is None or not len(look.census.sources):
        _nothing(axes, "there is no item")
        return
    sources, counts = np.unique(look.census.sources, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    shares = 100 * counts[order] / counts.sum()
    shown = min(len(order), MOST_ROWS if len(order) <= MOST_ROWS else MOST_ROWS - 1)
    labels, colors = [], []
    for source in sources[order][:shown].tolist():
        writer = look.census.writers[source]
        labels.append(_cut(_name(look, writer), 24))
        colors.append(WRITTEN if writer.living and _is_alive(look, source) else "#9ca3af")
    values = shares[:shown].tolist()
    if shown < len(order):
        labels.append(f"{len(order) - shown} others")
        colors.append("#d1d5db")
        values.append(float(shares[shown:].sum()))
    places = np.arange(len(values))
    axes.barh(places, values, color=colors, height=0.7)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:.3g} %", (value, place), va="center", size=8)
    axes.set_yticks(places, labels)
    axes.set_ylim(max(len(values), 4) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(values))
    axes.grid(axis="y", visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    if any(color != WRITTEN for color in colors):
        axes.set_xlabel("grey: not there any more")


def _name(look: Look, writer: Writer) -> str:
    known = look.timeline.known.get(writer.incarnation) if look.timeline is not None else None
    if known is not None:
        name = tables.clean(known.name)
        return f"{name} ({known.pid})" if name else f"{known.role} {known.pid}"
    if writer.pid is not None:
        return f"{writer.role} {writer.pid}"
    return "loaded" if writer.incarnation >= 2**48 else f"client no. {writer.incarnation}"


def _is_alive(look: Look, incarnation: int) -> bool:
    return any(client["incarnation"] == incarnation for client in look.living)


# ---- what panels share ----


def _nothing(axes: Axes, why: str) -> None:
    """A panel that has nothing to show, and says why."""
    axes.set_xticks([])
    axes.set_yticks([])
    grid = axes.get_subplotspec()
    columns = 1 if grid is None else len(grid.colspan)
    lines = textwrap.fill(tables.clean(why), 34 * columns)
    where = axes.transAxes
    text = axes.text(0.5, 0.5, lines, transform=where, ha="center", va="center", color=MUTED)
    text.set_in_layout(False)


def _finish_time(axes: Axes, line: Timeline) -> None:
    """The same span of time in all panels; grey where nobody recorded."""
    from matplotlib.dates import AutoDateLocator, DateFormatter

    for begin_s, end_s in line.gaps:
        axes.axvspan(_date(begin_s), _date(end_s), color=_UNRECORDED, alpha=0.25, linewidth=0)
    end_s = max(line.end_s, line.begin_s + 1.0, *(one.time_s for one in line.events))
    span_s = end_s - line.begin_s
    axes.set_xlim(_date(line.begin_s - 0.01 * span_s), _date(end_s + 0.01 * span_s))
    if axes.get_xticks().size:  # else it has nothing to show
        locator = AutoDateLocator(minticks=3, maxticks=6)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        form = next(form for limit_s, form in _FORMS if span_s <= limit_s)
        axes.xaxis.set_major_formatter(DateFormatter(form))  # type: ignore[no-untyped-call]


_FORMS = ((600.0, "%H:%M:%S"), (2 * 86400.0, "%H:%M"), (float("inf"), "%d %b"))
"""Of a time on an axis, by the seconds that it spans."""


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
    axis.set_major_formatter(lambda value, _: f"{value:g}")  # no mathtext
    axis.set_minor_formatter(NullFormatter())


def _date(time_s: float) -> Any:
    return datetime.fromtimestamp(time_s)


def _dates(times_s: Floats | Sequence[float]) -> list[Any]:
    return [_date(time_s) for time_s in times_s]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_OVER_TIME: tuple[tuple[str, Any, Callable[[Any, Look, Timeline], None]], ...] = (
    ("rates", (0, slice(0, 2)), _rates),
    ("items", (0, 2), _items),
    ("ratio", (0, 3), _ratio),
    ("clients", (1, slice(0, 2)), _clients),
    ("age", (1, 2), _age),
    ("losses", (1, 3), _losses),
    ("priorities", (2, 0), _priorities),
)
_AS_IT_IS: tuple[tuple[str, Any, Callable[[Any, Look], None]], ...] = (
    ("distribution", (2, 1), _distribution),
    ("ages", (2, 2), _ages),
    ("collectors", (2, 3), _collectors),
)
