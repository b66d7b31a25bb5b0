"""After a save or load with a fault, the previous save or the new one is complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.sweeper import CHECKPOINTS, Sweeper

SEED = 1
CASES, MORE_CASES = 2, 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweeper() -> Iterator[Sweeper]:
    with Sweeper("--torch") as started:
        yield started


@pytest.mark.product(few=1)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_save_is_seen_whole_or_not_at_all(sweeper: Sweeper, name: str, full: bool) -> None:
    if name == "Export":
        pytest.importorskip("pyarrow")
    sweeper.sweep(name, "rows", count=MORE_CASES if full else CASES, seed=SEED)


@pytest.mark.full
def test_it_is_the_same_where_items_are_records(sweeper: Sweeper, full: bool) -> None:
    sweeper.sweep("SaveAgain", "records", count=MORE_CASES if full else CASES, seed=SEED)
