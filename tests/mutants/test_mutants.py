"""The tests notice when a rule of the protocol is broken.

The default run tries one of the seeded bugs in this file, and `--full` tries eight.
`scripts/mutants` tries all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.hunt import SurvivedError, kill, require_that_they_pass
from tests.mutants.mutant import Mutant, mutants
from tests.mutants.tree import (
    ROOT,
    DoesNotApplyError,
    changed,
)
from tests.native.program import CompileError

MUTANTS = {mutant.path.stem: mutant for mutant in mutants()}
#: A mutant in Python that fast tests catch, so that nothing is compiled.
ONE = ("27-barrier-in-the-wrong-order",)
#: Mutants of other parts of the protocol. If a header changes, the whole core is compiled.
MORE = (
    "06-partial-batch-kept",
    "12-stale-priority-accepted",
    "02-no-writing-mark",
    "03-no-second-look",
    "07-ticket-not-in-the-checksum",
    "10-rebuild-skipped",
    "20-liveness-file-inherited-by-fork",
)


def test_mutants_are_numbered_from_one() -> None:
    numbers = [int(name.partition("-")[0]) for name in MUTANTS]
    assert sorted(numbers) == list(range(1, len(MUTANTS) + 1))
    assert len(MUTANTS) >= 28


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_of_these_sources(name: str) -> None:
    for file, text in changed(MUTANTS[name], ROOT).items():
        assert text != (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_names_tests_that_are_there(name: str) -> None:
    for test in MUTANTS[name].caught_by:
        file, _, function = test.partition("[")[0].partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text("utf-8"), re.M), test


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize(
    "name", [*ONE, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert kill(MUTANTS[name]) >= len(MUTANTS[name].caught_by)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.crash
def test_the_same_tests_pass_where_nothing_is_broken(full: bool) -> None:
    wanted = {test for name in (*ONE, *MORE * full) for test in MUTANTS[name].caught_by}
    assert require_that_they_pass(sorted(wanted)) >= len(wanted)


# The runner itself


def a_mutant(
    folder: Path,
    file: str,
    old: str,
    new: str,
    test: str = "test_the_words_of_a_fresh_buffer_are_zero",
) -> Mutant:
    """Makes a mutant that replaces one line of a file, and names a test that does not notice it."""
    path = folder / "99-made-up.patch"
    path.write_text(
        "Made up.\n\nRule: none.\nCaught by:\n"
        f"    tests/memory/format/test_slots.py::{test}\n\n"
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-{old}\n+{new}\n",
        "utf-8",
    )
    return Mutant.read(path)


FIRST_INCLUDE = ("shmbuffer/_native/core/masses.c", "#include <math.h>")


@pytest.mark.full
@pytest.mark.slow
def test_a_mutant_that_no_test_notices_has_survived(tmp_path: Path) -> None:
    harmless = a_mutant(tmp_path, *FIRST_INCLUDE, "#include <math.h> /* harmless */")
    with pytest.raises(SurvivedError, match=r"99-made-up\.patch: these did not notice: \['tests"):
        kill(harmless)


@pytest.mark.full
@pytest.mark.slow
def test_a_case_that_is_not_there_has_noticed_nothing(tmp_path: Path) -> None:
    file = "shmbuffer/memory/upkeep/flush.py"
    line = '    _core.reached("flush.locked")'
    case = "test_the_words_of_a_fresh_buffer_are_zero[nowhere]"
    with pytest.raises(SurvivedError, match=r"pytest ended with 4:\n(.*\n)*ERROR: not found: "):
        kill(a_mutant(tmp_path, file, line, "    pass", case))


@pytest.mark.full
def test_a_mutant_that_does_not_compile_is_not_a_dead_one(tmp_path: Path) -> None:
    broken = a_mutant(tmp_path, *FIRST_INCLUDE, "#include <no such header.h>")
    with pytest.raises(CompileError, match=r"no such header\.h"):
        kill(broken)


@pytest.mark.product(few=1)
@pytest.mark.parametrize(("line", "times"), [("#include <maths.h>", 0), ("}", r"\d+")])
def test_a_mutant_of_other_sources_is_refused(tmp_path: Path, line: str, times: object) -> None:
    """The lines may also occur at several places, so that the right place is unclear."""
    other = a_mutant(tmp_path, FIRST_INCLUDE[0], line, "")
    with pytest.raises(DoesNotApplyError, match=rf"patch is of other .*masses\.c .* {times} times"):
        kill(other)


def test_a_mutant_changes_its_lines_and_no_others(tmp_path: Path) -> None:
    file, line = FIRST_INCLUDE
    before = (ROOT / file).read_text("utf-8")
    mutant = a_mutant(tmp_path, file, line, "#include <errno.h>")
    assert changed(mutant, ROOT) == {file: before.replace(line, "#include <errno.h>")}


@pytest.mark.parametrize(
    "missing", ["Made up.", "Rule: none.", "    tests/memory/format/test_slots.py"]
)
def test_a_header_says_everything(tmp_path: Path, missing: str) -> None:
    whole = a_mutant(tmp_path, *FIRST_INCLUDE, "#include <errno.h>")
    assert (whole.broken, whole.rule, whole.fails_with) == ("Made up.", "none.", "")
    assert whole.files == ("shmbuffer/_native/core/masses.c",)
    assert whole.touches_the_core
    lines = whole.path.read_text("utf-8").split("\n")
    whole.path.write_text("\n".join(line for line in lines if not line.startswith(missing)))
    with pytest.raises(ValueError, match=r"99-made-up\.patch: its header does not say '\w+'"):
        Mutant.read(whole.path)
