"""A pytest plugin that refuses tests which import torch.

`scripts/test` uses it (`-p tests.without_torch`) for tests that fork thousands of times, because a
fork of a process with torch costs ten times as much.
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
        """Returns None for all modules but torch.

        Raises:
            AssertionError: the module is torch. An ImportError would skip the test.
        """
        assert name != "torch", (
            "this test is to run without torch in its process: import it in a child, "
            "or name the file in with_torch of scripts/test"
        )


def pytest_configure() -> None:
    sys.meta_path.insert(0, _Refusal())
