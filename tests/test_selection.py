"""The tests that the default run omits, never omits, and keeps in one process."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.groups import GROUPS
from tests.mutants.mutant import mutants
from tests.selection import sample

ROOT = Path(__file__).parents[1]
POINTS = [f"point {number}" for number in range(40)]


Cases = dict[str, dict[str, object]]


def crossed(**values: Sequence[object]) -> Cases:
    """Makes every combination of values, by name."""
    combined = itertools.product(*values.values())
    return {"-".join(map(str, some)): dict(zip(values, some, strict=True)) for some in combined}


def met(cases: Cases, *names: str) -> set[tuple[object, ...]]:
    return {tuple(case[name] for name in names) for case in cases.values()}


def taken(cases: Cases, *together: str) -> Cases:
    return {name: cases[name] for name in sample(cases, together)}


def test_every_value_of_every_parameter_is_met() -> None:
    cases = crossed(kind=["rows", "records"], point=POINTS, there=[0, 3, 11])
    some = taken(cases)
    assert len(some) == len(POINTS)
    for name in ("kind", "point", "there"):
        assert met(some, name) == met(cases, name)


def test_no_value_is_preferred_for_being_the_first() -> None:
    some = taken(crossed(kind=["rows", "records"], point=POINTS))
    kinds = [case["kind"] for case in some.values()]
    assert min(kinds.count("rows"), kinds.count("records")) > len(POINTS) / 4


def test_values_that_matter_together_are_met_together() -> None:
    cases = crossed(kind=["rows", "records"], point=POINTS, there=[0, 3, 11])
    some = taken(cases, "kind point")
    assert met(some, "kind", "point") == met(cases, "kind", "point")
    assert len(some) == 2 * len(POINTS)


def test_where_few_are_asked_for_they_are_those_that_meet_most() -> None:
    cases = crossed(kind=["rows", "records"], point=POINTS, there=[0, 3, 11])
    some = {name: cases[name] for name in sample(cases, few=3)}
    assert len(some) == len(met(some, "point")) == len(met(some, "there")) == 3
    assert met(some, "kind") == met(cases, "kind")
    assert sample(cases, few=len(cases)) == sample(cases)


@dataclass(frozen=True)
class Parts:
    storage: str
    sampler: str


def test_a_dataclass_counts_as_its_fields() -> None:
    parts = [Parts(*both) for both in itertools.product("abc", "xyz")]
    some = [case["case"] for case in taken(crossed(case=parts)).values()]
    assert len(some) == 3
    assert {one.storage for one in some if isinstance(one, Parts)} == set("abc")
    assert {one.sampler for one in some if isinstance(one, Parts)} == set("xyz")
    assert len(taken(crossed(case=parts), "storage sampler")) == 9


def test_values_without_a_hash_count_too() -> None:
    assert len(taken(crossed(index=[[0, 1], [2]], kind=["rows", "records"]))) == 2


def test_every_process_takes_the_same_cases() -> None:
    """The processes of xdist need the same cases, but each hashes text differently."""
    program = (
        "import sys; from tests.test_selection import POINTS, crossed, taken; "
        "cases = [crossed(kind=['rows', 'records'], boot=[str(n), 'another']) for n in range(9)]; "
        "print(*map(taken, cases))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(set(said)) == 1


def test_equal_values_of_two_types_are_two() -> None:
    assert len(taken(crossed(value=[1, True, 1.0], kind=["rows", "records"]))) == 3


# -- what pytest makes of it ----------------------------------------------------------------------

UPKEEP = "tests/crash/test_upkeep.py"


@functools.cache  # each call runs pytest
def collected(*arguments: str) -> frozenset[str]:
    """Returns the tests that a run with these arguments would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[1]
    done = subprocess.run([*command, *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return frozenset(line for line in done.stdout.splitlines() if "::" in line)


def test_a_run_takes_a_sample_and_with_full_it_takes_all() -> None:
    some, every = collected(UPKEEP), collected(UPKEEP, "--full")
    assert some < every
    assert {name.partition("[")[0] for name in some} == {name.partition("[")[0] for name in every}
    chosen = collected(UPKEEP, "-k", "repair_that_dies")
    assert chosen == {name for name in some if "repair_that_dies" in name}


@pytest.mark.full
def test_a_case_that_is_named_is_run() -> None:
    left_out = sorted(collected(UPKEEP, "--full") - collected(UPKEEP))[0]
    assert collected(left_out) == {left_out}
    whole = "tests/torture/test_full_kills.py"
    assert collected(whole) == set()
    (test,) = collected(whole, "--full")
    assert collected(test) == {test}


@pytest.mark.full  # scripts/mutants runs them, too
def test_a_case_that_has_to_catch_a_seeded_bug_always_runs() -> None:
    wanted = {test for mutant in mutants() for test in mutant.caught_by if "[" in test}
    assert wanted <= collected(*{test.partition("::")[0] for test in wanted})


def test_a_group_is_of_files_that_are_there_and_in_no_other() -> None:
    files = [file for group in GROUPS for file in group]
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_no_file_has_the_mark_of_xdist_which_says_nothing() -> None:
    """A file that shares an expensive fixture is named in tests/groups.py."""
    mark = "mark." + "xdist_group"
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [file.name for file in files if mark in file.read_text("utf-8")] == []


def test_the_tests_of_a_group_run_in_one_process_of_two(tmp_path: Path) -> None:
    """If these tests ran in any process, all would pass, but everything would start twice."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += ["--numprocesses", "2", "--dist", "loadgroup", "tests/docs/test_code_blocks.py"]
    command += ["tests/test_holdings.py", "-k", "not blocks_of_a_page"]
    command += ["--basetemp", str(tmp_path / "temporary")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^\[(gw\d)\] .*PASSED (\S+?)::", done.stdout, re.M)
    assert {file for _, file in ran} == {"tests/docs/test_code_blocks.py", "tests/test_holdings.py"}
    assert len({process for process, _ in ran}) == 2
    assert len({process for process, file in ran if "code_blocks" in file}) == 1
