"""The share of a data set in a sample is one number for all clients of the buffer."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer import BufferClosedError, CorruptBufferError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.mixture import Mixture

SETTINGS = Settings(capacity=8)


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    with Engine.open(fast_path / "buffer", SETTINGS) as opened:
        yield opened


def of_another_handle(engine: Engine, base: float) -> Mixture:
    assert engine.path is not None
    return Mixture(Engine.open(engine.path, None), base)


def test_the_first_to_ask_says_what_it_begins_with(engine: Engine) -> None:
    assert Mixture(engine, 0.3).fraction == 0.3
    assert of_another_handle(engine, 0.3).fraction == 0.3


def test_another_beginning_is_refused_with_both_numbers(engine: Engine) -> None:
    Mixture(engine, 0.3)
    with pytest.raises(ValueError, match=r"handle set offline_fraction=0\.3, but .* passed 0\.5"):
        of_another_handle(engine, 0.5)
    assert Mixture(engine, 0.3).fraction == 0.3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 0.0])
def test_every_handle_reads_the_number_that_one_has_set_bit_for_bit(
    engine: Engine, value: float
) -> None:
    one, other = Mixture(engine, 0.7), of_another_handle(engine, 0.7)
    one.fraction = value
    assert other.fraction == value
    assert of_another_handle(engine, 0.7).fraction == value


def test_it_is_there_when_nobody_has_the_buffer_any_more(engine: Engine) -> None:
    Mixture(engine, 0.7).fraction = 0.2
    path = engine.path
    assert path is not None
    engine.close()
    with Engine.open(path, None) as later:
        assert later.report is not None
        assert Mixture(later, 0.7).fraction == 0.2


def test_a_child_of_a_fork_reads_what_its_parent_sets_in_anonymous_memory() -> None:
    with Engine.anonymous(SETTINGS) as engine:
        mixture = Mixture(engine, 0.7)
        ready, go = os.pipe()
        pid = os.fork()
        if not pid:
            os.read(ready, 1)
            os._exit(int(mixture.fraction * 100))
        mixture.fraction = 0.25
        os.write(go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 25
        os.close(ready)
        os.close(go)


def test_it_goes_with_its_engine_to_another_process(engine: Engine) -> None:
    again = pickle.loads(pickle.dumps(Mixture(engine, 0.7)))
    again.fraction = 0.125
    assert Mixture(engine, 0.7).fraction == 0.125


@pytest.mark.parametrize("wrong", [float("nan"), -0.5, 1.0, float("inf")])
def test_what_is_no_share_is_refused_and_can_be_set_again(engine: Engine, wrong: float) -> None:
    mixture = Mixture(engine, 0.7)
    engine.seat.control.runtime["offline_fraction"] = wrong
    with pytest.raises(
        CorruptBufferError, match=r"the stored fraction of the data set .* anneal\(step"
    ):
        mixture.fraction  # noqa: B018
    mixture.fraction = 0.5
    assert mixture.fraction == 0.5


def test_a_closed_handle_sets_nothing(engine: Engine) -> None:
    mixture = of_another_handle(engine, 0.7)
    mixture._engine.close()
    with pytest.raises(BufferClosedError):
        mixture.fraction = 0.5
    assert Mixture(engine, 0.7).fraction == 0.7


def test_the_two_numbers_lie_at_8712(engine: Engine) -> None:
    assert engine.path is not None
    mixture = Mixture(engine, 0.75)
    mixture.fraction = 0.5
    data = (engine.path / layout.CONTROL).read_bytes()
    assert data[8712:8728] == struct.pack("<dd", 0.75, 0.5)
