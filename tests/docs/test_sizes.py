"""The numbers in the text and code of the sizing page match the layout."""

from __future__ import annotations

import re

from shmbuffer.memory import Leaf, Schema
from shmbuffer.memory.directory import growth
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.filesystem import human_size
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/guides/sizing.md").read_text()
FIGURE = re.compile(r"\d[\d.,]* (?:bytes|KiB|MiB|GiB)")

PAGE_TABLE_ENTRY = 8  # x86-64 and aarch64
CAPACITY = 1_000_000


def overhead(schema: Schema) -> str:
    """Returns the overhead of an item in bytes, as text."""
    return f"{schema.sections['bytes'] / CAPACITY:.1f}"


def test_a_figure_in_its_text_is_one_of_the_layout() -> None:
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    tables = 2**30 // layout.PAGE * PAGE_TABLE_ENTRY
    assert FIGURE.findall(text) == [
        f"{growth.STEP_BYTES // 2**20} MiB",
        f"{layout.CONTROL_BYTES // 1024} KiB",
        f"{overhead(Schema((), CAPACITY, record_bytes=2**30))} bytes",
        f"{layout.RECORD.itemsize} bytes",
        f"{PAGE_TABLE_ENTRY} bytes",
        f"{layout.PAGE // 1024} KiB",
        human_size(tables).split(" (")[0].replace(".0", ""),
    ]


def test_a_figure_that_its_code_takes_for_granted_is_the_layouts() -> None:
    assert set(re.findall(r"\b\d{2,3}_\d{3}\b", PAGE)) == {f"{layout.CONTROL_BYTES:_}"}
    rows = Schema((Leaf(("obs",), "uint8", (4,)),), CAPACITY)
    assert re.findall(r"OVERHEAD = ([\d.]+)", PAGE) == [overhead(rows)]
