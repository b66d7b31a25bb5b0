"""A dead buffer with wrong numbers: every kind of number, one at a time and several at once."""

from __future__ import annotations

import random

import pytest

from tests.damage.cells import Damage, payload_cells, several, shared_cells, single, text_cells
from tests.damage.conftest import Specimens
from tests.damage.judgement import require_looks_answer, require_mended_or_refused
from tests.damage.specimen import Specimen
from tests.damage.trials import require_all

REPEAT = "pytest tests/damage/test_dead.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.product,
    pytest.mark.parametrize("rebooted", [False, True], ids=["this boot", "another boot"]),
    pytest.mark.parametrize("kind", ["rows", "records"]),
]
#: Wrong sizes in a record header. If they are trusted, they lead past items once the tail is there.
SIZES = (8, 56, 1000, 2616, 2**40)


def require_mended(specimen: Specimen, cases: list[Damage]) -> None:
    def trial(case: Damage) -> None:
        specimen.damage(*case.changes)
        require_looks_answer(specimen)
        require_mended_or_refused(specimen)

    require_all(cases, trial, REPEAT)


@pytest.mark.product(few=1)
def test_a_wrong_number_is_mended_or_refused(
    specimens: Specimens, kind: str, rebooted: bool, full: bool
) -> None:
    specimen, rng = specimens(kind, rebooted), random.Random(11)
    cells = rng.sample(shared_cells(specimen), 90 if full else 45)
    require_mended(specimen, single(specimen, cells, rng, 1))


@pytest.mark.full
def test_several_wrong_numbers_are_mended_or_refused(
    specimens: Specimens, kind: str, rebooted: bool, full: bool
) -> None:
    specimen, rng = specimens(kind, rebooted), random.Random(12)
    count = 40 if full else 20
    require_mended(specimen, several(specimen, shared_cells(specimen), rng, count))


@pytest.mark.product(few=1)
def test_wrong_bytes_of_an_item_are_dropped_or_named(
    specimens: Specimens, kind: str, rebooted: bool
) -> None:
    specimen, rng = specimens(kind, rebooted), random.Random(13)
    cells = rng.sample(payload_cells(specimen), 20)
    require_mended(specimen, single(specimen, cells, rng, 1))


@pytest.mark.product(few=1)
def test_a_wrong_byte_of_a_text_is_refused_or_does_no_harm(
    specimens: Specimens, kind: str, rebooted: bool
) -> None:
    specimen, rng = specimens(kind, rebooted), random.Random(14)
    cells = rng.sample(text_cells(specimen), 25)
    require_mended(specimen, single(specimen, cells, rng, 1))


@pytest.mark.product(few=1)
def test_a_wrong_chain_of_records_is_rebuilt(
    specimens: Specimens, kind: str, rebooted: bool
) -> None:
    specimen, rng = specimens(kind, rebooted), random.Random(15)
    cells = [
        cell
        for cell in shared_cells(specimen)
        if cell.name.startswith("record[") and cell.name.endswith("].bytes")
    ]
    assert bool(cells) == (kind == "records")
    cases = [Damage((cell.name,), (cell.becomes(size),)) for cell in cells for size in SIZES]
    require_mended(specimen, rng.sample(cases, min(len(cases), 30)))
