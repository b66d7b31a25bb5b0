"""The C layout agrees with the types of the Python fields and with docs/format."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shmbuffer._native import _core
from shmbuffer.memory.format import layout, ledger, limiter

FORMAT = Path(__file__).parents[3] / "docs" / "format" / "directory.md"
STRUCTURES = {
    "Superblock": layout.SUPERBLOCK,
    "Runtime page": layout.RUNTIME,
    "Limiter": layout.LIMITER,
    "Reservation": ledger.RESERVATION,
    "Ages": limiter.AGES,
    "Recovery record": layout.RECOVERY,
    "Registry entry": layout.ENTRY,
    "Weights": layout.WEIGHTS_HEAD,
    "A stamp": layout.STAMP,
    "Ledger": ledger.HEAD,
    "Consumer": ledger.CONSUMER,
    "A lease of items": ledger.LEASE,
    "Delivery": ledger.DELIVERY,
}
NATIVE = _core.layout()

Field = tuple[int, int, str]


def fields(structure: np.dtype[np.void]) -> list[Field]:
    """Returns (offset, bytes, name) of each field, in order."""
    assert structure.fields is not None
    return sorted(
        (int(offset), int(kind.itemsize), name)
        for name, (kind, offset, *_) in structure.fields.items()
    )


def table(heading: str) -> list[Field]:
    """Returns the rows below a heading of docs/format/directory.md."""
    text = FORMAT.read_text("utf-8")
    found = re.search(rf"^#+ {heading}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/format/directory.md has no heading {heading!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert names[:3] == ["offset", "bytes", "name"], f"{heading}: columns are {names}"
    rows = []
    for line in lines[2:]:
        offset, size, name = [cell.strip() for cell in line.strip("|").split("|")][:3]
        rows.append((int(offset), int(size), name.strip("`")))
    return rows


@pytest.mark.parametrize("heading", STRUCTURES)
def test_the_document_has_every_field_where_python_has_it(heading: str) -> None:
    assert table(heading) == fields(STRUCTURES[heading])


def test_c_and_python_agree_on_the_sizes() -> None:
    assert {name: value for name, value in NATIVE.items() if "." not in name} == {
        "page": layout.PAGE,
        "runtime": layout.RUNTIME_OFFSET,
        "registry": layout.REGISTRY_OFFSET,
        "entries": layout.ENTRIES,
        "entry_bytes": layout.ENTRY_BYTES,
        "control_bytes": layout.CONTROL_BYTES,
        "recovery_bytes": layout.RECOVERY_BYTES,
        "fanout": layout.FANOUT,
        "streams": layout.STREAMS,
        "incarnations": layout.INCARNATIONS,
        "mutex_bytes": NATIVE["mutex_bytes"],
        "mutex_align": NATIVE["mutex_align"],
    }
    assert layout.SUPERBLOCK.itemsize == layout.SUPERBLOCK_BYTES == layout.PAGE
    assert layout.RUNTIME.itemsize == layout.PAGE
    assert layout.ENTRY.itemsize == layout.ENTRY_BYTES
    assert 2 * layout.SUPERBLOCK_BYTES == layout.RUNTIME_OFFSET
    assert layout.RUNTIME_OFFSET + layout.PAGE == layout.REGISTRY_OFFSET
    assert layout.RECOVERY_OFFSET + layout.RECOVERY_BYTES == layout.REGISTRY_OFFSET
    assert layout.RUNTIME_OFFSET + max(map(sum, _ends(layout.RUNTIME))) <= layout.RECOVERY_OFFSET
    assert layout.CONTROL_BYTES == 143360


def _ends(structure: np.dtype[np.void]) -> list[tuple[int, int]]:
    return [(offset, size) for offset, size, _ in fields(structure)]


def test_the_mutex_has_its_place() -> None:
    offset, size, name = fields(layout.RUNTIME)[0]
    assert (offset, name) == (0, "mutex")
    assert NATIVE["mutex_bytes"] <= size
    assert (layout.RUNTIME_OFFSET + offset) % NATIVE["mutex_align"] == 0


@pytest.mark.parametrize("heading", STRUCTURES)
def test_fields_lie_side_by_side_and_are_aligned(heading: str) -> None:
    found = fields(STRUCTURES[heading])
    for (offset, size, name), (following, _, other) in pairwise(found):
        assert offset + size <= following, f"{name} reaches into {other}"
    assert found[-1][0] + found[-1][1] <= STRUCTURES[heading].itemsize
    for offset, size, name in found:
        if size in (2, 4, 8):
            assert offset % size == 0, f"{name} is not aligned: it could be half written"


def test_every_number_is_little_endian() -> None:
    for structure in STRUCTURES.values():
        assert structure.fields is not None
        for name, (kind, *_) in structure.fields.items():
            assert kind.kind == "V" or kind.str[0] in "<|", name


def test_the_runtime_page_and_the_entries_start_on_cache_lines() -> None:
    assert layout.RUNTIME_OFFSET % 64 == 0
    assert layout.REGISTRY_OFFSET % 64 == 0
    assert layout.ENTRY_BYTES % 64 == 0


def test_the_two_limiters_are_a_cache_line_each() -> None:
    assert layout.RUNTIME.fields is not None
    kind, offset, *_ = layout.RUNTIME.fields["limiters"]
    assert kind.itemsize == 2 * layout.LIMITER.itemsize == 128
    assert offset % 64 == 0


def expected_sections(capacity: int, lanes: int) -> dict[str, int]:
    """Computes the slots file as layout.h and the document describe it."""
    elements, at, found = capacity * lanes, 0, {}

    def padded(count: int) -> int:
        return -(-count // 16) * 16

    def section(name: str, size: int) -> None:
        nonlocal at
        found[name] = at
        at = -(-(at + size) // 64) * 64

    section("words", 8 * capacity)
    section("checksums", 4 * capacity)
    section("sources", 8 * capacity)
    section("raw", 8 * elements)
    section("mass", 8 * padded(elements))
    level, nodes = 0, elements
    while nodes > 1 or level == 0:
        level, nodes = level + 1, -(-nodes // 16)
        found[f"nodes{level}"] = nodes
        section(f"sum{level}", 8 * padded(nodes))
        section(f"min{level}", 8 * padded(nodes))
    return {**found, "depth": level, "bytes": at}


@pytest.mark.product(few=8)
@pytest.mark.parametrize("lanes", [1, 3, 16])
@pytest.mark.parametrize(
    "capacity", [1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097, 65537, 1_000_000, 2**32]
)
def test_the_sections_of_the_slots_file_follow_from_its_size(capacity: int, lanes: int) -> None:
    assert _core.sections(capacity, lanes) == expected_sections(capacity, lanes)


@pytest.mark.parametrize("capacity", [1, 17, 4096, 1_000_000])
def test_of_records_the_slots_file_has_the_extents_too(capacity: int) -> None:
    expected = expected_sections(capacity, 1)
    end = expected["bytes"]
    padded = -(-16 * capacity // 64) * 64
    assert _core.sections(capacity, 1, True) == {**expected, "extents": end, "bytes": end + padded}


@pytest.mark.parametrize("wholes", [1, 64, 1001])
def test_where_observations_are_stored_once_the_slots_file_says_where_they_are(wholes: int) -> None:
    expected = expected_sections(17, 1)
    nexts = expected["bytes"]
    holders = nexts + -(-8 * 17 // 64) * 64
    end = holders + -(-4 * wholes // 64) * 64
    found = _core.sections(17, 1, False, wholes)
    assert found == {**expected, "nexts": nexts, "holders": holders, "bytes": end}


@pytest.mark.parametrize(("capacity", "wholes"), [(2**31, 1), (1, 2**31)])
def test_slots_and_wholes_of_a_buffer_that_shares_fit_into_the_word_of_a_slot(
    capacity: int, wholes: int
) -> None:
    with pytest.raises(ValueError, match="are out of range"):
        _core.sections(capacity, 1, False, wholes)


@pytest.mark.parametrize(
    ("capacity", "lanes"), [(0, 1), (1, 0), (2**40 + 1, 1), (2**20, 2**21), (2**63, 2)]
)
def test_sizes_that_cannot_be_laid_out_are_refused(capacity: int, lanes: int) -> None:
    with pytest.raises(ValueError, match=rf"{capacity} slots of {lanes} lanes are out of range"):
        _core.sections(capacity, lanes)


@pytest.mark.parametrize("capacity", [1, 256, 257, 1_000_000])
def test_the_parts_of_the_ledger_follow_from_its_slots(capacity: int) -> None:
    leases = 64 * ledger.LEASES
    each = leases + -(-16 * capacity // 4096) * 4096
    first = layout.PAGE + 64 * ledger.RESERVATIONS
    assert _core.parts(capacity) == {
        "reservations": layout.PAGE,
        "consumers": first,
        "each": each,
        "deliveries": leases,
        "bytes": first + ledger.CONSUMERS * each,
    }


def test_a_ledger_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="a ledger of 0 slots is out of range"):
        _core.parts(0)


def test_every_phase_and_state_has_its_number_in_the_document() -> None:
    text = FORMAT.read_text("utf-8")
    for kind in (layout.SlotState, layout.Phase, layout.EntryState, layout.BufferState):
        assert ", ".join(f"{one.name} {one.value}" for one in kind) in text
    assert ", ".join(f"{flag.name} {flag.value}" for flag in layout.Flag) in text
