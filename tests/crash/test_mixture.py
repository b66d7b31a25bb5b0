"""A process that sets the share of a data set is killed at each store: the share is old or new."""

from __future__ import annotations

import pytest

from shmbuffer.memory import Engine
from shmbuffer.memory.mixture import Mixture
from tests.crash.harness import dies, python_points, require_sound
from tests.kit.rings import path_of

pytestmark = pytest.mark.crash


def test_the_points_are_these() -> None:
    assert python_points("mixture") == ["mixture.fraction", "mixture.base"]


@pytest.mark.parametrize("point", [*python_points("mixture"), "control.touched"])
def test_a_beginning_counts_once_its_base_is_there(survivor: Engine, point: str) -> None:
    assert dies(path_of(survivor), point, lambda engine: str(Mixture(engine, 0.3)))
    base = float(survivor.seat.control.runtime["offline_base"][0])
    mine = base or 0.6
    assert Mixture(survivor, mine).fraction == mine
    assert base == (0.0 if point == "mixture.fraction" else 0.3)
    require_sound(survivor)


@pytest.mark.parametrize("point", ["mixture.fraction", "control.touched"])
def test_what_a_dead_process_has_set_counts(survivor: Engine, point: str) -> None:
    mixture = Mixture(survivor, 0.7)

    def anneals(engine: Engine) -> None:
        Mixture(engine, 0.7).fraction = 0.2

    assert dies(path_of(survivor), point, anneals)
    assert mixture.fraction == 0.2
    require_sound(survivor)
