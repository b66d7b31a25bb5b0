"""The training scripts that TorchRL ships run on our buffers, by one import."""

from __future__ import annotations

import re

import pytest

import tests.compat.family  # noqa: F401 - skips these tests where TorchRL is not installed
from tests.compat.family import said_by
from tests.compat.sota import IMPORT, SCRIPTS
from tests.docs.blocks import ROOT, blocks_of

pytest.importorskip("hydra", reason="the scripts take their settings from it")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_torchrl_ships_trains_on_our_buffer_as_on_its_own(name: str) -> None:
    losses = said_by("sota", name)
    assert len(losses["torchrl"]) >= 20
    assert losses["same draws"] == losses["torchrl"]
    assert len(losses["shipped"]) == len(losses["torchrl"])


def test_the_page_of_programs_has_the_import_and_the_files_that_are_run() -> None:
    page = "docs/programs.md"
    assert IMPORT in [block.code for block in blocks_of(page)]
    rows = re.findall(r"^\| `(\w+/\w+\.py)` \| `(\w+\.py)` \|$", (ROOT / page).read_text(), re.M)
    assert sorted(rows) == sorted((one.path, one.makes_buffer) for one in SCRIPTS.values())
