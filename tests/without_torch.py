"""A plugin of pytest: tests that import torch are refused.

`scripts/test` gives it to the tests that fork thousands of times (`-p tests.without_torch`): a fork
of a process that has torch in it costs ten times as much.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _Refusal(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Find nothing.

        Raises:
            AssertionError: it is torch; no ImportError, which would have the test skipped.
        """
        assert name != "torch", (
            "this test is to run without torch in its process: import it in a child, "
            "or name the file in with_torch of scripts/test"
        )


def pytest_configure() -> None:
    sys.meta_path.insert(0, _Refusal())
