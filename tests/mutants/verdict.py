"""What a run of tests says about a mutant, as pytest wrote it down.

An assertion that fails kills a mutant. What shows nothing about the tests does not: a test that
could not be collected or prepared, an error that nobody announced, a test that does not exist.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

#: How the message of a failure begins where a test has looked and has not liked what it saw.
ASSERTIONS = (
    *("assert ", "AssertionError", "Failed: DID NOT RAISE", "Failed: DID NOT WARN"),
    "tests.native.program.FoundError",
)


@dataclass
class Outcomes:
    """What became of each test.

    Attributes:
        passed: ids.
        failed: id, and the first line of what it failed with.
        errors: id, and what kept the test from being run; teardowns after a failure are no errors.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, xml: str) -> Outcomes:
        """From the file of ``--junitxml``."""
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
        """Why the mutant is not dead; "" if every test that has to catch it did."""
        if self.errors:
            return f"tests that could not be run: {self.errors}"
        accepted = (*ASSERTIONS, *((f"shmbuffer.errors.{fails_with}",) if fails_with else ()))
        strange = {k: why for k, why in self.failed.items() if not why.startswith(accepted)}
        if strange:
            return f"it was no assertion that failed: {strange}"
        blind = [name for name in caught_by if not any(_is_of(case, name) for case in self.failed)]
        return f"these did not notice: {blind}" if blind else ""

    def not_passed(self, tests: tuple[str, ...]) -> str:
        """Which tests did not pass where nothing is broken, or do not exist; "" for none."""
        if self.failed or self.errors:
            return f"{self.failed | self.errors}"
        missing = [name for name in tests if not any(_is_of(case, name) for case in self.passed)]
        return f"these were not run: {missing}" if missing else ""


def _is_of(case: str, test: str) -> bool:
    return case == test or case.startswith(f"{test}[")
