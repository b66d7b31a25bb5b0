"""Wrong numbers in the ledger: consumers, leases, reservations, and deliveries."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shmbuffer import ConsumerError
from shmbuffer.memory import Engine
from shmbuffer.memory.system import deadline
from tests.crash import harness
from tests.damage.cells import Damage, several, single
from tests.damage.judgement import answer, require_looks_answer
from tests.damage.ledgers import CONSUMERS, ConsumedSpecimen, acknowledge_all, ledger_cells
from tests.damage.specimen import Change, Specimen, contents
from tests.damage.trials import require_all

REPEAT = "pytest tests/damage/test_ledger.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("kind", ["rows", "records"]),
]
Made = Callable[[str], Specimen]


@pytest.fixture(scope="module")
def consumed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def made(kind: str) -> Specimen:
        folder: Path = tmp_path_factory.mktemp("ledger")
        return ConsumedSpecimen(folder / kind, kind)

    return made


def require_mended(specimen: Specimen, case: Damage) -> None:
    """Checks that the buffer is refused, or is recovered and can be used."""
    specimen.damage(*case.changes)
    require_looks_answer(specimen)
    engine = answer(lambda: Engine.open(specimen.path, None, timeout=5.0), specimen)
    if engine is None:
        return
    with engine:
        ring = engine.ring()
        assert ring is not None
        assert contents(ring) == specimen.truth
        assert engine.check().ok, engine.check().problems
        for name in {one.name for one in ring.consumers.status()}:
            _drain_or_remove(engine, name)
        with deadline.limit_waits(1.0):
            harness.write(ring, [77])
        assert engine.check().ok, engine.check().problems


def _drain_or_remove(engine: Engine, name: str) -> None:
    ring = engine.ring()
    assert ring is not None
    try:
        acknowledge_all(ring)
    except (ConsumerError, ValueError):  # its name or its number of acknowledgements is damaged
        ring.consumers.remove(name)


def require_answers(specimen: Specimen, *changes: Change) -> None:
    """Checks that calls on an open handle fail or do their work with a damaged ledger."""
    specimen.restore()
    engine = Engine.open(specimen.path, None)
    ring = engine.ring()
    assert ring is not None
    consumer = ring.consumers.open(CONSUMERS[0])
    taken = consumer.take(2)
    number = ring.reservations.reserve(1)
    for change in changes:
        with (specimen.path / change.file).open("r+b") as file:
            file.seek(change.offset)
            file.write(change.data)

    def commit() -> None:
        try:
            with ring.reservations.hold(number):
                harness.write(ring, [7], timeout=0.05)
        except ValueError as error:  # how much it holds is damaged, and less than this
            if "reserve more, or write fewer items. Nothing was changed" not in str(error):
                raise

    for call in (
        ring.consumers.status,
        engine.check,
        engine.stats,
        lambda: consumer.ack(taken.lease, taken.slots[:1], taken.tickets[:1]),
        consumer.item_states,
        lambda: consumer.claim(taken.slots, taken.tickets, [2]),
        lambda: consumer.drop(taken.slots, taken.tickets),
        lambda: consumer.give_back(taken.lease),
        commit,
        lambda: ring.reservations.give_back(number),
        lambda: harness.write(ring, [8], timeout=0.05),
        lambda: _take(engine),
        lambda: ring.empty(),
        lambda: [ring.consumers.remove(name) for name in CONSUMERS],
        engine.check,
        engine.close,
    ):
        answer(call, specimen)


def _take(engine: Engine) -> None:
    ring = engine.ring()
    assert ring is not None
    with deadline.limit_waits(0.05):
        ring.consumers.open(CONSUMERS[1], holds=False).take(3)


@pytest.mark.product(few=1)
def test_a_wrong_number_of_the_ledger_is_mended_or_refused(
    consumed: Made, kind: str, full: bool
) -> None:
    specimen, rng = consumed(kind), random.Random(31)
    cells = ledger_cells(specimen)
    cells = cells if full else rng.sample(cells, len(cells) // 2)
    cases = single(specimen, cells, rng, 12 if full else 1)
    require_all(cases, lambda case: require_mended(specimen, case), REPEAT)


@pytest.mark.full
def test_several_wrong_numbers_of_the_ledger_are_mended_or_refused(
    consumed: Made, kind: str, full: bool
) -> None:
    specimen, rng = consumed(kind), random.Random(32)
    cases = several(specimen, ledger_cells(specimen), rng, 500 if full else 15)
    require_all(cases, lambda case: require_mended(specimen, case), REPEAT)


@pytest.mark.full
def test_a_ledger_that_is_written_over_ends_no_process(
    consumed: Made, kind: str, full: bool
) -> None:
    specimen, rng = consumed(kind), random.Random(33)
    cells = ledger_cells(specimen)
    cases = (
        single(specimen, cells, rng, 3) if full else single(specimen, rng.sample(cells, 25), rng, 1)
    )
    require_all(cases, lambda case: require_answers(specimen, *case.changes), REPEAT, apart=True)
