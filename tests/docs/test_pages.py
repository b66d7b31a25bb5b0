"""What the pages name is there: files, tests; and the first screen has what a reader needs."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

import pytest

from tests.docs.blocks import ROOT, blocks_of, pages

LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_every_file_that_is_linked_is_there(page: str) -> None:
    folder = PurePosixPath(page).parent
    missing = [
        target
        for target in LINK.findall((ROOT / page).read_text())
        if not re.match(r"\w+:", target) and not (ROOT / os.path.normpath(folder / target)).exists()
    ]
    assert missing == []


def test_the_first_example_is_short() -> None:
    assert len(blocks_of("README.md")[1].code.splitlines()) <= 15


def test_the_first_screen_has_the_install_line_an_example_and_the_two_commands() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    for needed in ("pip install", "```python", "scripts/demo", "scripts/test"):
        assert needed in screen
