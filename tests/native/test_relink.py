"""The byte ring after a power cut: remaining items are read, and overwritten in order."""

from __future__ import annotations

import pytest

from tests.native.conftest import Folder
from tests.native.program import RELINK, build, run


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [1, *(pytest.param(first, marks=pytest.mark.full) for first in (2500, 14000))],
    ids=lambda first: f"from seed {first}",
)
def test_no_item_is_passed_over_on_the_way_from_record_to_record(
    folder_of: Folder, first: int, full: bool
) -> None:
    program = build("address", folder_of("address"), program=RELINK)
    rounds = 2000 if full else 400
    assert run("address", program, str(first), str(rounds))["checked"] > 50 * rounds
