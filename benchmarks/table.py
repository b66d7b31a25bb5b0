"""The table of targets: what was promised of each operation, and what it takes, beside the peers.

It is made from what a run has written, so it can be made again from the file. In ``README.md`` it
stands between two markers, where `write` puts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.items import KINDS
from benchmarks.library import ARRAYS, ELSEWHERE, IN_PLACE, INDEX, OUT, TENSORDICT
from benchmarks.report import (
    FIRST,
    OURS,
    bound_of,
    bounds,
    digits,
    header,
    peers_of,
    ratio,
    scale_of,
    times,
)

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table of targets -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Row:
    """One promise.

    Attributes:
        items: their kind.
        benchmark: which measures it.
        operation: its title there; ``{capacity}`` stands for the capacity of the buffer.
        form: of ours.
        target: seconds at most, or so many a second at least; None: no more than to be known.
    """

    items: str
    benchmark: str
    operation: str
    form: str
    target: float | None = None


def _rows_for(items: str, targets: dict[str, float]) -> list[Row]:
    rows = [
        Row(items, "add", "add(1)", ARRAYS),
        Row(items, "extend", "extend(1), prioritized", TENSORDICT),
        Row(items, "extend", "extend(32), prioritized", TENSORDICT),
        Row(items, "extend", "extend(32), prioritized", ARRAYS),
        Row(items, "sample", "sample(256), uniform", TENSORDICT),
        Row(items, "sample", "sample(256), prioritized", TENSORDICT),
        Row(items, "sample", "sample(256), prioritized", OUT),
        Row(items, "cycle", "update(256)", INDEX),
        Row(items, "cycle", "cycle(256)", INDEX),
        Row(items, "cycle", "cycle(256)", TENSORDICT),
    ]
    return [
        Row(row.items, row.benchmark, row.operation, row.form, targets.get(row.operation))
        for row in rows
    ]


ROWS = [
    *_rows_for(
        "S",
        {
            "add(1)": 2.5e-6,
            "extend(1), prioritized": 4e-6,
            "extend(32), prioritized": 6e-6,
            "sample(256), uniform": 15e-6,
            "sample(256), prioritized": 22e-6,
            "update(256)": 8e-6,
            "cycle(256)": 32e-6,
        },
    ),
    *_rows_for("M", {"cycle(256)": 95e-6}),
    Row("L", "sample", "sample(256), uniform", TENSORDICT, 0.8e-3),
    Row("L", "sample", "sample(256), uniform", OUT, 0.8e-3),
    Row("S", "writers", "4 x extend(32): items", "processes", 3e6),
    Row("S", "writers", "4 x extend(32): cycles(256)", "processes", 3e3),
    Row("S", "attach", "attach to {capacity} items", "beside others", 10e-3),
    Row("S", "recover", "recover {capacity} items", "attach()"),
    Row("S", "save", "save {capacity} items, in memory", IN_PLACE),
    Row("S", "save", "save {capacity} items", IN_PLACE),
    Row("S", "save", "save {capacity} items", ELSEWHERE),
]


@dataclass(frozen=True)
class Line:
    """A row with what was found.

    Attributes:
        row: see there.
        title: of the operation.
        ours: our result.
        peers: the best result of each peer that has the operation.
        bound: what plain C takes.
    """

    row: Row
    title: str
    ours: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    bound: dict[str, Any] | None

    def best(self) -> str | None:
        """The peer that comes nearest."""
        return min(
            self.peers, key=lambda peer: ratio(self.ours, self.peers[peer])["median"], default=None
        )


def lines(found: dict[str, Any]) -> list[Line]:
    """The rows that this run has measured."""
    made = []
    for row in ROWS:
        for part in found["benchmarks"]:
            if (part["name"], part["items"]) != (row.benchmark, row.items):
                continue
            operation = row.operation.format(capacity=f"{part['capacity']:,}")
            made += [
                Line(
                    row,
                    f"{row.items}: {operation}, {row.form}",
                    one,
                    peers_of(one, part["results"]),
                    bound_of(one, part["results"]),
                )
                for one in part["results"]
                if (one["operation"], one["library"], one["form"]) == (operation, OURS, row.form)
            ]
    return made


def markdown(found: dict[str, Any]) -> str:
    """The table, its columns aligned, so that it reads well in a terminal too."""
    made = lines(found)
    names = list(dict.fromkeys(peer for line in made for peer in line.peers))
    titles = ["operation", "target", OURS, "ratio", "to the best peer", "of the bound", *names]
    cells = [titles]
    for line in made:
        ours, best = line.ours, line.best()
        cells.append(
            [
                line.title,
                _target(line),
                f"{_figure(ours)} [{bounds(ours)}]",
                *(
                    times(ratio(ours, line.peers[peer])) if peer in line.peers else "-"
                    for peer in (FIRST, best)
                ),
                "-" if line.bound is None else _share(line.ours, line.bound),
                *(_figure(line.peers[name]) if name in line.peers else "-" for name in names),
            ]
        )
    widths = [max(len(row[at]) for row in cells) for at in range(len(titles))]
    rows = [_row(row, widths) for row in cells]
    return "\n".join([rows[0], _row(["-" * width for width in widths], widths), *rows[1:]])


def document(found: dict[str, Any]) -> str:
    """The table with what it was measured on, as it stands in ``README.md``."""
    others = [part["others_cpus"]["median"] for part in found["benchmarks"]]
    sizes = {part["items"]: part["capacity"] for part in found["benchmarks"]}
    full = ", ".join(
        f"{capacity:,} {items} items ({KINDS[items].nbytes:,} bytes)"
        for items, capacity in sizes.items()
    )
    return (
        f"```\n{header(found)}\n```\n\nBuffers are full: {full}. Other programs used "
        f"{min(others):.1f} to {max(others):.1f} CPUs meanwhile (medians of the benchmarks).\n\n"
        f"{markdown(found)}"
    )


def write(found: dict[str, Any], readme: Path = README) -> None:
    """Put the table between the markers of ``readme``.

    Raises:
        ValueError: they are not there.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: has no {BEGIN!r} and {END!r} after it")
    readme.write_text(f"{before}{begin}\n\n{document(found)}\n\n{end}{after}")


def _target(line: Line) -> str:
    if line.row.target is None:
        return "-"
    least = line.ours["unit"] != "s"
    met = (
        line.ours["median"] >= line.row.target if least else line.ours["median"] <= line.row.target
    )
    scale, unit = scale_of(line.row.target, line.ours["unit"])
    sign = "≥" if least else "≤"
    return f"{sign} {digits(line.row.target * scale)} {unit}{'' if met else ', missed'}"


def _share(ours: dict[str, Any], bound: dict[str, Any]) -> str:
    """How many times as long as plain C it takes."""
    return f"{digits(1 / ratio(ours, bound)['median'])}x {_figure(bound)}"


def _figure(one: dict[str, Any]) -> str:
    scale, unit = scale_of(one["median"], one["unit"])
    return f"{digits(one['median'] * scale)} {unit}"


def _row(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
