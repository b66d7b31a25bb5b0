"""Applies a mutant to a copy of the repository and runs the tests that must catch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.tree import apply, compile_core, copy_of_the_repository
from tests.mutants.verdict import Outcomes

PATIENCE_S = 300.0
TEST_PATIENCE_S = 60


class SurvivedError(AssertionError):
    """The tests have not noticed a mutant, or have failed for another reason."""


def kill(mutant: Mutant, *, full: bool = False) -> int:
    """Runs the tests that have to catch a mutant.

    Args:
        mutant: the seeded bug.
        full: whether to run all cases of the tests, instead of the cases of a default run.

    Returns:
        The number of test cases that noticed the mutant.

    Raises:
        SurvivedError: a test did not notice the mutant.
        DoesNotApplyError, CompileError: the mutant does not fit these sources.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = copy_of_the_repository(Path(folder))
        apply(mutant, tree)
        if mutant.touches_the_core:
            compile_core(mutant, tree)
        outcomes = tested(tree, mutant.caught_by, full=full)
    if why := outcomes.survived(mutant.caught_by, mutant.fails_with):
        raise SurvivedError(f"{mutant.path.name}: {why}\n{mutant.broken}")
    return len(outcomes.failed)


def require_that_they_pass(tests: Iterable[str], *, full: bool = False) -> int:
    """Runs the same tests without a mutant; returns the number of their cases.

    Raises:
        SurvivedError: a test fails without a mutant, or does not exist.
    """
    wanted = tuple(dict.fromkeys(tests))
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        outcomes = tested(copy_of_the_repository(Path(folder)), wanted, full=full)
    if why := outcomes.not_passed(wanted):
        raise SurvivedError(f"without a mutant: {why}")
    return len(outcomes.passed)


def tested(tree: Path, tests: tuple[str, ...], *, full: bool) -> Outcomes:
    """Runs tests of a copy in a separate process, which imports nothing from this repository.

    Raises:
        SurvivedError: pytest did not finish, or could not find or import the tests.
    """
    report = tree / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_PATIENCE_S}", f"--basetemp={tree / 'tmp'}"]
    command += [f"--junitxml={report}", *tests, *["--full"] * full]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise SurvivedError(f"the tests did not end in {PATIENCE_S:g} s: {tests}") from error
    if process.returncode not in (0, 1) or not report.exists():
        raise SurvivedError(f"pytest ended with {process.returncode}:\n{output[-4000:]}")
    return Outcomes.read(report.read_text("utf-8"))
