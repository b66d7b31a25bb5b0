"""A process that changes the consumer's version is killed: the number is the old or new one."""

from __future__ import annotations

import pytest

from shmbuffer.memory import Engine, consumer_version
from tests.crash.harness import dies, native_points, require_sound
from tests.kit.rings import path_of
from tests.memory.carried import newest, number_in, publish

pytestmark = pytest.mark.crash


def increments(engine: Engine) -> None:
    consumer_version.increment(engine.seat)


def test_the_points_are_these() -> None:
    assert native_points("version") == ["version.stored"]


@pytest.mark.parametrize("point", ["version.stored", "control.touched"])
def test_what_a_dead_process_has_set_counts(survivor: Engine, point: str) -> None:
    consumer_version.store(survivor.seat, 6)
    assert dies(path_of(survivor), point, increments)
    assert consumer_version.read(survivor.seat) == 7
    require_sound(survivor)


@pytest.mark.parametrize("point", ["weights.published", "version.stored"])
def test_the_version_is_that_of_the_weights_once_a_publish_has_come_that_far(
    survivor: Engine, point: str
) -> None:
    publish(survivor, 1)
    assert dies(path_of(survivor), point, lambda engine: publish(engine, 2) and None)
    assert number_in(newest(survivor)) == 2
    assert consumer_version.read(survivor.seat) == (2 if point == "version.stored" else 1)
    publish(survivor, 3)
    assert consumer_version.read(survivor.seat) == 3
