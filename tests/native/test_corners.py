"""What a second process does in the middle of a call, in C, where the order can be chosen."""

from __future__ import annotations

import pytest

from tests.native.conftest import Folder
from tests.native.program import CORNERS, build, corner_cases, run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", corner_cases())
def test_a_call_and_what_another_process_does_meanwhile(folder_of: Folder, case: str) -> None:
    program = build("address", folder_of("address"), program=CORNERS)
    assert run("address", program, case) == {}
