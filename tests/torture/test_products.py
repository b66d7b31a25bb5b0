"""The campaign that runs the cases which the default run of the tests leaves out."""

from __future__ import annotations

import pytest

from tests.torture import products


def test_the_crash_matrix_and_the_family_are_among_what_is_run_in_full() -> None:
    found = products.files()
    assert "tests/crash/test_write.py" in found
    assert "tests/replay/test_conformance_sampling.py" in found
    assert "tests/torture/test_kills.py" in found
    assert "tests/memory/format/test_sharing.py" in found  # because of its seeds


def test_all_cases_of_a_file_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    file, said = "tests/memory/format/test_power.py", list[str]()
    monkeypatch.setattr(products, "files", lambda: [file])
    figures = products.campaign(0, 1, said.append)
    assert figures == {"files": 1, "files_left_out": 0, "cases": 12 + 1}
    assert said == [f"{file} passed (1 of 1)"]


def test_a_failure_says_how_to_repeat_it() -> None:
    with pytest.raises(AssertionError, match=r"again: python -m pytest tests/nothing\.py --full$"):
        products.run("tests/nothing.py")
