"""G8 and G9: a power cut at any step of any protocol, and another one during the recovery.

A failure names the kind, the seed, the step and the image. `Simulation(kind, seed, ...)` with the
same arguments makes the same image.
"""

from __future__ import annotations

import pytest

from tests.power import scripts
from tests.power.simulation import Simulation, apart

pytestmark = [pytest.mark.crash, pytest.mark.slow]

#: The kinds of each script. By default only the first one is cut, with one image of each sort at
#: each step. Writes are cut with each kind.
KINDS = [
    "records",
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("rows", "short records")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_is_created_and_defined_as_a_whole_or_not_at_all(kind: str, full: bool) -> None:
    each = 2 if full else 1
    simulation = Simulation(kind, 1, images=each, worst=each, again=2)
    figures = apart(lambda: simulation.run(scripts.writes))
    assert figures["images"] > 400 * each
    assert figures["recoveries cut"] == 2


@pytest.mark.product(few=1)
@pytest.mark.parametrize("kind", ["rows", "records", "short records"])
@pytest.mark.parametrize(
    ("script", "images"), [(scripts.changes, 3), (scripts.restarts, 3), (scripts.writers, 2)]
)
def test_items_covered_by_a_flush_are_there_and_none_is_torn(
    script: scripts.Script, images: int, kind: str, full: bool
) -> None:
    each = images if full else 1
    simulation = Simulation(kind, 2, images=each, worst=each, again=2, created=False)
    figures = apart(lambda: simulation.run(script))
    assert figures["images"] > 200 * each
    assert figures["items checked"] > figures["images"]
    assert figures["recoveries cut"] == 2


def test_slots_in_use_have_their_space_where_it_is_taken_in_steps() -> None:
    simulation = Simulation("rows", 3, images=1, worst=1, again=2, created=False)
    figures = apart(lambda: simulation.run(scripts.grows))
    assert figures["images"] > 100
    assert figures["items checked"] > figures["images"]
    assert figures["recoveries cut"] == 2


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_flush_found_acknowledged_is_and_nothing_else(kind: str) -> None:
    simulation = Simulation(kind, 1, images=1, worst=1, again=1, created=False, mapped=False)
    figures = apart(lambda: simulation.run(scripts.consumed))
    assert figures["images"] > 300
    assert figures["recoveries cut"] == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rows", pytest.param("records", marks=pytest.mark.full)])
def test_a_buffer_that_is_removed_is_there_as_a_whole_or_not_at_all(kind: str) -> None:
    figures = apart(
        lambda: Simulation(kind, 1, images=2, worst=2, again=1, used=0.15).run(scripts.removed)
    )
    assert figures["images"] > 400
    assert figures["images used"] > 50


@pytest.mark.full
def test_a_dictionary_that_was_published_is_there_as_a_whole() -> None:
    figures = apart(
        lambda: Simulation("records", 1, images=4, again=1, used=0.2).run(scripts.trained)
    )
    assert figures["images"] > 500


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_goes_on_after_a_power_cut_and_survives_the_next(kind: str) -> None:
    figures = apart(
        lambda: Simulation(kind, 1, images=2, worst=1, lives=3, created=False).run(scripts.writes)
    )
    assert figures["lives"] == 3
