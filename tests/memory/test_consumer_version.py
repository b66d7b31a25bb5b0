"""The version of the learners' policy is one number for all processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer import CorruptBufferError
from shmbuffer.memory import Engine, consumer_version
from shmbuffer.memory.upkeep import inspect
from tests.crash.harness import settings
from tests.memory.carried import publish


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(tmp_path / "buffer", settings("rows")) as engine:
        yield engine


def test_it_is_0_until_somebody_says_otherwise(engine: Engine) -> None:
    assert consumer_version.read(engine.seat) == 0


def test_every_handle_sees_it_and_what_shows_the_buffer_does(engine: Engine) -> None:
    assert engine.path is not None
    consumer_version.store(engine.seat, 41)
    with Engine.open(engine.path, None) as other:
        assert consumer_version.increment(other.seat) == 42
    assert consumer_version.read(engine.seat) == 42
    assert engine.stats()["consumer_version"] == 42
    assert inspect.inspect(engine.path)["counters"]["consumer_version"] == 42


def test_it_may_be_set_back_but_a_publish_only_raises_it(engine: Engine) -> None:
    publish(engine, 1)
    consumer_version.store(engine.seat, 100)
    publish(engine, 1)
    assert consumer_version.read(engine.seat) == 100
    consumer_version.store(engine.seat, 1)
    assert publish(engine, 2) == 3
    assert consumer_version.read(engine.seat) == 3


def test_the_first_weights_are_newer_than_what_consumers_have(engine: Engine) -> None:
    consumer_version.store(engine.seat, 100)
    assert publish(engine, 1) == consumer_version.read(engine.seat) > 100


def test_increments_of_several_processes_all_count(engine: Engine) -> None:
    assert engine.path is not None
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            with Engine.open(engine.path, None) as mine:
                for _ in range(500):
                    consumer_version.increment(mine.seat)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert consumer_version.read(engine.seat) == 1500


def test_it_outlives_a_recovery(engine: Engine) -> None:
    assert engine.path is not None
    consumer_version.store(engine.seat, 7)
    engine.close()
    with Engine.open(engine.path, None) as again:
        assert consumer_version.read(again.seat) == 7


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (-1, ValueError, "consumer_version must be a number from 0 to 2**62 - 1, but is -1"),
        (
            2**62,
            ValueError,
            "consumer_version must be a number from 0 to 2**62 - 1, but is 4611686018427387904",
        ),
        (1.5, TypeError, "consumer_version must be an integer, but is 1.5"),
    ],
)
def test_what_is_no_version_is_refused(
    engine: Engine, given: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        consumer_version.store(engine.seat, given)
    assert str(caught.value) == says
    assert consumer_version.read(engine.seat) == 0


def test_a_number_that_something_else_has_written_is_not_believed(engine: Engine) -> None:
    engine.seat.control.runtime["consumer_version"] = 2**63
    with pytest.raises(CorruptBufferError, match="the consumer version 9223372036854775808"):
        consumer_version.read(engine.seat)
    consumer_version.store(engine.seat, 3)
    assert consumer_version.read(engine.seat) == 3
