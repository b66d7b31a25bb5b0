"""Decides by the report of pytest whether a test run has caught a mutant.

A failed assertion kills a mutant. Some failures show nothing about the tests and do not: a test
that could not be collected or set up, an unexpected error, or a test that does not exist.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

#: Beginnings of failure messages that show a failed check.
ASSERTIONS = (
    *("assert ", "AssertionError", "Failed: DID NOT RAISE", "Failed: DID NOT WARN"),
    "tests.native.program.FoundError",
)


@dataclass
class Outcomes:
    """The outcomes of all tests in a run.

    Attributes:
        passed: ids of tests.
        failed: the first line of the failure of each test id.
        errors: the reason why a test id could not be run. A teardown after a failure is no error.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, xml: str) -> Outcomes:
        """Parses a file of ``--junitxml``."""
        outcomes = cls()
        for case in ElementTree.fromstring(xml).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            failure, error = case.find("failure"), case.find("error")
            if failure is not None:
                outcomes.failed[name] = failure.get("message", "").split("\n")[0]
            elif error is not None and name not in outcomes.failed:
                outcomes.errors[name] = error.get("message", "").split("\n")[0]
            elif error is None and case.find("skipped") is None:
                outcomes.passed.append(name)
        return outcomes

    def survived(self, caught_by: tuple[str, ...], fails_with: str = "") -> str:
        """Returns why the mutant has survived, or "" if all tests that have to catch it failed."""
        if self.errors:
            return f"tests that could not be run: {self.errors}"
        accepted = (*ASSERTIONS, *((f"shmbuffer.errors.{fails_with}",) if fails_with else ()))
        strange = {k: why for k, why in self.failed.items() if not why.startswith(accepted)}
        if strange:
            return f"it was no assertion that failed: {strange}"
        blind = [name for name in caught_by if not any(_is_of(case, name) for case in self.failed)]
        return f"these did not notice: {blind}" if blind else ""

    def not_passed(self, tests: tuple[str, ...]) -> str:
        """Returns the tests that failed without a mutant or do not exist, or "" if all passed."""
        if self.failed or self.errors:
            return f"{self.failed | self.errors}"
        missing = [name for name in tests if not any(_is_of(case, name) for case in self.passed)]
        return f"these were not run: {missing}" if missing else ""


def _is_of(case: str, test: str) -> bool:
    return case == test or case.startswith(f"{test}[")
