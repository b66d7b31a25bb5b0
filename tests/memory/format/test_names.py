"""Files and folders whose names are numbers."""

from __future__ import annotations

import pytest

from shmbuffer.memory.format.key_names import is_number


@pytest.mark.parametrize("name", ["0", "7", "007", "12345678901234567890"])
def test_a_name_of_ascii_digits_is_a_number(name: str) -> None:
    assert is_number(name)
    assert int(name) >= 0


@pytest.mark.parametrize("name", ["", "²", "٣", "1²", "٣3", "-1", "+1", " 1", "1_0", "1.0", "x"])
def test_a_name_with_anything_else_is_no_number(name: str) -> None:
    assert not is_number(name)
