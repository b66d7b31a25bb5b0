from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.program import missing_tool

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Returns the folder with the programs of a flavour; skips the test if a tool is missing."""
    folders: dict[str, Path] = {}
    missing: dict[str, str | None] = {}

    def of(flavour: str) -> Path:
        if flavour not in folders:
            folders[flavour] = tmp_path_factory.mktemp(flavour)
            missing[flavour] = missing_tool(flavour, folders[flavour])
        if tool := missing[flavour]:
            pytest.skip(f"{tool} does not work here")
        return folders[flavour]

    return of
