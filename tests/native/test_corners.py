"""A second process acts in the middle of a call, in C, in an order that the test chooses."""

from __future__ import annotations

import pytest

from tests.native.conftest import Folder
from tests.native.program import CORNERS, build, corner_cases, run


@pytest.mark.parametrize("case", corner_cases())
def test_a_call_and_what_another_process_does_meanwhile(folder_of: Folder, case: str) -> None:
    program = build("address", folder_of("address"), program=CORNERS)
    assert run("address", program, case) == {}


def test_threads_that_share_a_batch_hand_it_over_in_order(folder_of: Folder) -> None:
    program = build("thread", folder_of("thread"), program=CORNERS)
    assert run("thread", program, "batches_that_threads_share") == {}
