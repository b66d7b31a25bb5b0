"""An open buffer with wrong numbers: a call fails, or returns correct results."""

from __future__ import annotations

import random

import pytest

from tests.damage.cells import Damage, several, shared_cells, single
from tests.damage.conftest import Specimens
from tests.damage.living import damage_under_a_handle
from tests.damage.specimen import Specimen
from tests.damage.trials import require_all

REPEAT = "pytest tests/damage/test_living.py"
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["rows", "records"])]


def require_answers(specimen: Specimen, cases: list[Damage]) -> None:
    require_all(
        cases, lambda case: damage_under_a_handle(specimen, *case.changes), REPEAT, apart=True
    )


@pytest.mark.product(few=1)
def test_a_number_that_is_written_over_ends_no_process(
    specimens: Specimens, kind: str, full: bool
) -> None:
    specimen, rng = specimens(kind, False), random.Random(21)
    cells = rng.sample(shared_cells(specimen), 50 if full else 20)
    require_answers(specimen, single(specimen, cells, rng, 1))


@pytest.mark.full
def test_several_numbers_that_are_written_over_end_no_process(
    specimens: Specimens, kind: str, full: bool
) -> None:
    specimen, rng = specimens(kind, False), random.Random(22)
    count = 15 if full else 6
    require_answers(specimen, several(specimen, shared_cells(specimen), rng, count))
