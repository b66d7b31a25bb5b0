"""Threads in every role use one ring under a sanitizer; some of them die at crash points."""

from __future__ import annotations

import pytest

from tests.native.conftest import Folder
from tests.native.program import build, run
from tests.native.scenarios import MORTAL, SCENARIOS

pytestmark = pytest.mark.slow


@pytest.mark.full  # scripts/sanitize runs each scenario with it before the tests
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_byte_is_touched_by_two_threads_without_order(folder_of: Folder, name: str) -> None:
    folder = folder_of("thread")
    counts = run("thread", build("thread", folder), *SCENARIOS[name], "--rounds", "120")
    assert counts["checked"] > (0 if "once" in name else 1000)
    if name in MORTAL:
        assert counts["deaths"] > 0
    if name in MORTAL and "weights" not in name:
        assert counts["repairs"] > 0
        assert counts["reaped"] > 0


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    "name", [*MORTAL[1::2], *(pytest.param(name, marks=pytest.mark.full) for name in MORTAL[::2])]
)
def test_no_byte_outside_the_ring_is_touched(folder_of: Folder, name: str) -> None:
    folder = folder_of("address")
    counts = run("address", build("address", folder), *SCENARIOS[name], "--rounds", "120")
    assert counts["deaths" if "weights" in name else "repairs"] > 0


@pytest.mark.parametrize(
    "name", [pytest.param("rows", marks=pytest.mark.full), "one handle on records"]
)
def test_a_handle_that_is_closed_has_given_back_its_memory(folder_of: Folder, name: str) -> None:
    program = build("address", folder_of("address"))
    assert run("leak", program, *SCENARIOS[name], "--rounds", "120")["writes"] > 100
