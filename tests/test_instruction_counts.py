"""Frequent calls take no more instructions than recorded; see benchmarks/instructions.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import counted, instructions
from benchmarks.instructions import RECORDED, CannotCountError, compare, count, differing, main


@pytest.mark.full  # as scripts/instructions does
@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.timeout(900)  # valgrind takes half a minute of CPU time to import torch
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


@pytest.mark.full
def test_what_is_counted_sees_paths_of_one_length_and_nothing_of_the_callers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the paths would change Python's allocations and thus the counts."""
    program = tmp_path / "bin" / "valgrind"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n{ echo "$PWD" "$@"; env; find | sort; } >&2\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    seen = []
    for folder in (tmp_path, tmp_path / "of a longer name"):
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("OF_THE_CALLER", str(folder))
        try:
            with pytest.raises(RuntimeError, match="what valgrind ran has failed") as error:
                count()
        except CannotCountError as error:
            pytest.skip(f"instructions are not counted: {error}")
        seen.append(re.sub(r"(?<=/tmp/shmbuffer-instructions-)\w{8}\b", "", str(error.value)))
    assert seen[0] == seen[1]
    assert "/root/shmbuffer/__pycache__/" in seen[0]
    assert f"/env/bin/python3 -S -m {counted.__name__} " in seen[0]
    for path in (tmp_path, Path(counted.__file__).parents[1]):
        assert str(path) not in seen[0]


@pytest.mark.full
def test_with_a_wheel_its_core_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "valgrind"
    program.write_text("#!/bin/sh\ncat root/shmbuffer/_native/_core.abi3.so >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("shmbuffer/_native/_core.abi3.so", "the core of the wheel")
    try:
        with pytest.raises(RuntimeError, match=r"has failed:\nthe core of the wheel$"):
            count(tmp_path / "some.whl")
    except CannotCountError as error:
        pytest.skip(f"instructions are not counted: {error}")


def test_without_valgrind_it_is_said_that_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main([]) == 2
    assert capsys.readouterr().err == "not counted: valgrind is not installed\n"
