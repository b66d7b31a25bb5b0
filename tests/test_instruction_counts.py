"""The hot calls take no more instructions than recorded: see benchmarks/instructions.py."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import instructions
from benchmarks.instructions import RECORDED, CannotCountError, compare, count, differing, main


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.timeout(900)  # valgrind imports torch in half a minute of a processor's time
def test_no_hot_call_takes_a_tenth_more_instructions_than_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    if (why := differing(recorded)) is not None:
        pytest.skip(why)
    try:
        found = count()
    except CannotCountError as error:
        pytest.skip(f"instructions are not counted: {error}")
    assert compare(found, recorded) == []


def test_a_call_that_grew_by_more_than_a_tenth_is_named() -> None:
    recorded = {"instructions": {"add": 1000, "sample": 1000, "update": 1000, "gone": 5}}
    assert compare({"add": 1100, "sample": 1101, "update": 10, "new": 1}, recorded) == [
        "sample: 1,101 instructions, +10.1% of 1,000",
        "gone: not counted any more",
    ]


def test_counts_of_other_versions_are_not_compared() -> None:
    here = instructions.versions()
    assert differing({"versions": here}) is None
    why = differing({"versions": {**here, "torch": "1.0"}})
    assert why == f"recorded with other versions: torch {here['torch']}, not 1.0"


def test_without_valgrind_it_is_said_that_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main([]) == 2
    assert capsys.readouterr().err == "not counted: valgrind is not installed\n"
