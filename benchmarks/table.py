"""Creates the tables of operations: times, peers, the bound and targets.

    OVERVIEW        operation, shmbuffer, TorchRL, the best peer
    folded below    the spread of the rounds, the bound with its targets, the other libraries

The tables are created from the file of a run, and can be created again. `write` inserts them
between two markers in ``README.md``.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
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
BEGIN, END = "<!-- table of operations -->", "<!-- end of the table -->"
OVERVIEW = "Each operation beside TorchRL and the best peer"
WIDTH = 76
"""Number of columns of a code block that the site shows without scrolling."""

_NAMES = {FIRST: "TorchRL"}
_SERVERS = ("reverb", "ray")
"""Peers whose buffer is in another process. They have their own table."""


@dataclass(frozen=True)
class Row:
    """An operation in the tables, with its target.

    Attributes:
        items: kind of the items.
        benchmark: name of the benchmark.
        operation: title in the benchmark; ``{capacity}`` is replaced by the capacity.
        form: form of the data for shmbuffer.
        target: largest ratio to the bound; None if there is no target.
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
    return [replace(row, target=targets.get(row.operation)) for row in rows]


# A small item has six columns, each a cache line of its own, where the bound reads one record.
# Other calls add a lock, checks, checksums and output tensors, which large items hide.
ROWS = [
    *_rows_for(
        "S",
        {
            "extend(32), prioritized": 4,
            "sample(256), uniform": 6,
            "sample(256), prioritized": 4,
            "update(256)": 2,
            "cycle(256)": 3,
        },
    ),
    *_rows_for(
        "M",
        {
            "extend(32), prioritized": 2,
            "sample(256), uniform": 2,
            "sample(256), prioritized": 2,
            "update(256)": 2,
            "cycle(256)": 2,
        },
    ),
    Row("L", "sample", "sample(256), uniform", TENSORDICT, 1),
    Row("L", "sample", "sample(256), uniform", OUT, 1),
    Row("S", "writers", "4 x extend(32): items", "processes"),
    Row("S", "writers", "4 x extend(32): cycles(256)", "processes"),
    Row("S", "attach", "attach to {capacity} items", "beside others"),
    Row("S", "recover", "recover {capacity} items", "attach()"),
    Row("S", "save", "save {capacity} items, in memory", IN_PLACE),
    Row("S", "save", "save {capacity} items", IN_PLACE),
    Row("S", "save", "save {capacity} items", ELSEWHERE),
]


@dataclass(frozen=True)
class Line:
    """A row with its results.

    Attributes:
        row: the row.
        title: title of the operation.
        ours: result of shmbuffer.
        peers: best result of each peer that has the operation.
        bound: result of plain C.
    """

    row: Row
    title: str
    ours: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    bound: dict[str, Any] | None

    def best(self) -> str | None:
        """Name of the fastest peer."""
        return min(
            self.peers, key=lambda peer: ratio(self.ours, self.peers[peer])["median"], default=None
        )


def lines(found: dict[str, Any]) -> list[Line]:
    """Returns the rows that a run has measured."""
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


def tables(found: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Returns the cells of each table by its title; the first row is the head."""
    made = lines(found)
    peers = list(dict.fromkeys(peer for line in made for peer in line.peers))
    local = [peer for peer in peers if peer != FIRST and peer not in _SERVERS]
    servers = [peer for peer in peers if peer in _SERVERS]
    parts = {
        OVERVIEW: [["operation", OURS, _NAMES[FIRST], "best peer"], *map(_overview, made)],
        "The spread of the rounds": [
            ["operation", OURS, f"times {_NAMES[FIRST]}", "times the best peer"],
            *map(_spread, made),
        ],
        "The bound, and the targets": [
            ["operation", "bound", "times the bound", "target"],
            *(_bounded(line) for line in made if line.bound is not None),
        ],
        "Buffers of other libraries": [
            ["operation", *local],
            *([line.title, *_of_peers(line, local)] for line in made),
        ],
        "Servers of other libraries": [
            ["operation", *servers],
            *([line.title, *_of_peers(line, servers)] for line in made),
        ],
    }
    return {
        title: [rows[0], *(row for row in rows[1:] if set(row[1:]) != {"-"})]
        for title, rows in parts.items()
        if len(rows) > 1 and len(rows[0]) > 1
    }


def markdown(found: dict[str, Any]) -> str:
    """Returns the tables below their titles, with aligned columns."""
    return "\n\n".join(f"{title}:\n\n{_table(rows)}" for title, rows in tables(found).items())


def document(found: dict[str, Any]) -> str:
    """Returns the tables with the machine of the run; all but the first are folded."""
    others = [part["others_cpus"]["median"] for part in found["benchmarks"]]
    sizes = {part["items"]: part["capacity"] for part in found["benchmarks"]}
    full = ", ".join(
        f"{capacity:,} {items} items ({KINDS[items].nbytes:,} bytes)"
        for items, capacity in sizes.items()
    )
    machine = "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in header(found).splitlines()
    )
    first, *rest = tables(found).items()
    return "\n\n".join(
        [
            f"Buffers are full: {full}. Other programs used {min(others):.1f} to "
            f"{max(others):.1f} CPUs meanwhile (medians of the benchmarks).",
            _table(first[1]),
            *(_folded(title, _table(rows)) for title, rows in rest),
            _folded("Machine and versions", f"```\n{machine}\n```"),
        ]
    )


def write(found: dict[str, Any], readme: Path = README) -> None:
    """Writes the tables between the markers of ``readme``.

    Raises:
        ValueError: the markers are missing.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: has no {BEGIN!r} and {END!r} after it")
    readme.write_text(f"{before}{begin}\n\n{document(found)}\n\n{end}{after}")


def _overview(line: Line) -> list[str]:
    best = line.best()
    return [
        line.title,
        _figure(line.ours),
        *_of_peers(line, [FIRST], ratios=True),
        "-" if best is None else f"{best} {_of_peers(line, [best], ratios=True)[0]}",
    ]


def _spread(line: Line) -> list[str]:
    best = line.best()
    return [
        line.title,
        f"{_figure(line.ours)} [{bounds(line.ours)}]",
        *(
            times(ratio(line.ours, line.peers[peer])) if peer in line.peers else "-"
            for peer in (FIRST, best)
        ),
    ]


def _bounded(line: Line) -> list[str]:
    assert line.bound is not None
    share = 1 / ratio(line.ours, line.bound)["median"]
    most = line.row.target
    target = "-" if most is None else f"≤ {digits(most)}x{'' if share <= most else ', missed'}"
    return [line.title, _figure(line.bound), f"{digits(share)}x", target]


def _of_peers(line: Line, peers: list[str], *, ratios: bool = False) -> list[str]:
    """Formats the result of each peer, with the ratio to it on request."""
    cells = []
    for peer in peers:
        cell = _figure(line.peers[peer]) if peer in line.peers else "-"
        if ratios and peer in line.peers:
            cell += f" ({digits(ratio(line.ours, line.peers[peer])['median'])}x)"
        cells.append(cell)
    return cells


def _figure(one: dict[str, Any]) -> str:
    scale, unit = scale_of(one["median"], one["unit"])
    return f"{digits(one['median'] * scale)} {unit}"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(_row(row, widths) for row in (rows[0], rule, *rows[1:]))


def _row(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _folded(title: str, text: str) -> str:
    """Returns a section of the page that a browser opens on a click."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'
