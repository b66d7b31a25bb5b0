"""Which results of a test run show that a mutant was noticed, and which show nothing."""

from __future__ import annotations

import pytest

from tests.mutants.verdict import Outcomes

TEST = "tests/memory/test_x.py::test_a"


def case(inside: str, name: str = "test_a") -> str:
    return f'<testcase classname="tests.memory.test_x" name="{name}">{inside}</testcase>'


def outcomes(*cases: str) -> Outcomes:
    return Outcomes.read(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def failure(message: str) -> str:
    return f'<failure message="{message}">...</failure>'


@pytest.mark.parametrize(
    "message",
    [
        "assert 3 == 4",
        "AssertionError: row 3 is torn\nassert False",
        "AssertionError: Regex pattern did not match.",
        "Failed: DID NOT RAISE ValueError",
    ],
)
def test_an_assertion_that_fails_kills(message: str) -> None:
    assert outcomes(case(failure(message))).survived((TEST,)) == ""


@pytest.mark.parametrize(
    "message",
    [
        "Failed: Timeout (&gt;30.0s) from pytest-timeout.",
        "AttributeError: no such thing",
        "shmbuffer.errors.LockTimeout: waited",
    ],
)
def test_another_failure_does_not(message: str) -> None:
    found = outcomes(case(failure(message)), case(failure("assert 0"), "test_b"))
    assert "it was no assertion that failed" in found.survived((TEST,))


def test_an_error_that_was_announced_kills_too() -> None:
    found = outcomes(case(failure("shmbuffer.errors.LockTimeout: waited 5 s")))
    assert found.survived((TEST,), "LockTimeout") == ""
    assert "no assertion" in found.survived((TEST,), "BufferNeedsRestart")


def test_a_test_that_could_not_be_run_shows_nothing() -> None:
    collection = '<error message="collection failure">SyntaxError</error>'
    found = outcomes(case(collection), case(failure("assert 0"), "test_b"))
    assert "tests that could not be run" in found.survived((TEST,))
    assert found.not_passed((TEST,))


def test_a_teardown_after_a_failure_is_not_checked() -> None:
    torn_down = '<error message="failed on teardown">AssertionError</error>'
    assert outcomes(case(failure("assert 0") + torn_down)).survived((TEST,)) == ""
    assert "could not be run" in outcomes(case(torn_down)).survived((TEST,))


def test_each_test_has_to_notice_and_of_its_cases_one() -> None:
    found = outcomes(case("", "test_a[1]"), case(failure("assert 0"), "test_a[2]"), case(""))
    assert found.survived((TEST,)) == ""
    assert found.survived((TEST, f"{TEST}[2]")) == ""
    assert found.survived((TEST, f"{TEST}[1]")) == f"these did not notice: ['{TEST}[1]']"
    assert "test_ab" in found.survived((TEST, f"{TEST}b"))


def test_without_a_mutant_everything_has_to_be_run_and_to_pass() -> None:
    assert outcomes(case("", "test_a[1]"), case("", "test_a[2]")).not_passed((TEST,)) == ""
    assert "test_a[2]" in outcomes(
        case("", "test_a[1]"), case(failure("assert 0"), "test_a[2]")
    ).not_passed((TEST,))
    skipped = outcomes(case("<skipped/>"))
    assert skipped.not_passed((TEST,)) == f"these were not run: ['{TEST}']"
