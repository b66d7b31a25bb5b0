"""Learners that take groups, windows or items of limited age are killed at random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.torture.deliveries import ROW, Deliveries
from tests.torture.history import History
from tests.torture.programs import figures_of
from tests.torture.units import SIZE, pieces_of, violations


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 9))]
)
def test_no_unit_is_lost_torn_or_too_old_when_any_process_is_killed(seed: int) -> None:
    figures = figures_of("tests.torture.units", seed)
    assert figures["kills"] >= 120
    assert figures["at_once"] > 100
    assert figures["items_checked"] > figures["at_once"]
    assert figures["redeliveries"] > 0
    assert figures["keys_read"] > 0
    assert figures["versions"] > 10


def test_a_unit_ends_with_its_last_piece() -> None:
    whole = pieces_of(3, 8, 0, SIZE)
    parts = torch.cat([pieces_of(3, 8, 0, 1), pieces_of(3, 8, 1, SIZE - 1)])
    assert (whole == parts).all()
    assert whole["next", "done"].squeeze(-1).tolist() == [False] * (SIZE - 1) + [True]
    assert len(whole["unit"].unique()) == 1


def test_only_what_was_written_at_once_is_missed() -> None:
    batches = np.zeros(2, History.BATCH)
    batches["ticket"], batches["count"] = [0, 4], [4, 1]
    found = Deliveries(np.empty(0, ROW), batches, (1,))
    assert len(violations(found, {0, 1, 2, 3})) == 4
    assert violations(found, set()) == []
