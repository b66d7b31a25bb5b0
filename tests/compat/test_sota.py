"""The training scripts in TorchRL's wheel run on our buffers after a change of one line."""

from __future__ import annotations

import pytest

import tests.compat.family  # noqa: F401 - skips these tests where TorchRL is not installed
from tests.compat.family import said_by
from tests.compat.sota import SCRIPTS
from tests.docs.blocks import ROOT

pytest.importorskip("hydra", reason="the scripts take their settings from it")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_torchrl_ships_trains_on_our_buffer_as_on_its_own(name: str) -> None:
    losses = said_by("sota", name)
    assert len(losses["torchrl"]) >= 20
    assert losses["same draws"] == losses["torchrl"]
    assert len(losses["shipped"]) == len(losses["torchrl"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_of_programs_has_the_line_that_is_run(name: str) -> None:
    script = SCRIPTS[name]
    row = next(
        line
        for line in (ROOT / "docs/programs.md").read_text().splitlines()
        if f"`{script.path}`" in line
    )
    assert f"`{script.line}`" in row
