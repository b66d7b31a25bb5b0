"""Every publication without the mutex has a named sync point at both ends and in the docs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.native.program import CORE

PACKAGE = CORE.parent
DESIGN = (PACKAGE.parent / "docs" / "design" / "concurrency.md").read_text()
HEADER = (CORE / "core/sync.h").read_text()
SOURCES = {path: path.read_text() for path in sorted(CORE.glob("*/*.c"))}
SOURCES[CORE / "core/ring.h"] = (CORE / "core/ring.h").read_text()
ENDS = ("release", "acquire")

Ends = dict[str, dict[str, set[str]]]


def ends_in_c(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"\bSYNC_(\w+)_(RELEASE|ACQUIRE)\b", text)
    return [(name.lower().replace("_", "-"), end.lower()) for name, end in found]


def ends_in_python(text: str) -> list[tuple[str, str]]:
    return re.findall(r"# SYNC ([\w-]+), (\w+)$", text, re.MULTILINE)


def ends_in_the_sources() -> Ends:
    """Returns the files that contain each end of each sync point."""
    found: Ends = defaultdict(lambda: {end: set() for end in ENDS})
    python: dict[Path, str] = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path, text in (SOURCES | python).items():
        ends = ends_in_c(text) if path in SOURCES else ends_in_python(text)
        for name, end in ends:
            found[name][end].add(path.name)
    return dict(found)


def ends_in_the_document() -> Ends:
    table = DESIGN.partition("## Sync points\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| ([a-z].*) \|$", table, re.MULTILINE)]
    return {
        name: {
            end: {*re.findall(r"`(\w+\.(?:c|h|py))`", cell)}
            for end, cell in zip(ENDS, cells, strict=False)
        }
        for name, *cells in rows
        if name != "name"
    }


def test_a_name_of_a_sync_point_stands_at_both_ends() -> None:
    found = ends_in_the_sources()
    assert {"slot-claim", "slot-commit", "limiter-set", "limiter-reuse", "define"} <= found.keys()
    assert {name: ends for name, ends in found.items() if not all(map(ends.get, ENDS))} == {}


def test_the_document_says_in_which_files_the_ends_are() -> None:
    assert ends_in_the_document() == ends_in_the_sources()


def test_the_header_has_the_order_of_each_end_in_c() -> None:
    orders = re.findall(r"^#define SYNC_(\w+)_(\w+) memory_order_(\w+)$", HEADER, re.MULTILINE)
    assert all(end.lower() == order for _, end, order in orders)
    in_c = {each for text in SOURCES.values() for each in ends_in_c(text)}
    assert in_c == {(name.lower().replace("_", "-"), order) for name, _, order in orders}


def test_no_fence_and_no_look_at_a_word_goes_without_a_name() -> None:
    nameless = [
        line.strip()
        for text in SOURCES.values()
        for line in text.split("\n")
        if re.search(
            r"atomic_thread_fence\((?!SYNC_|memory_order_seq_cst)", line
        )  # `reached` is one of them
        or re.search(r"words\[.*(memory_order_acquire|SHMB_COMMITTED\), memory_order)", line)
    ]
    assert nameless == []
