"""The example learns the path of the data set, then the path that is open now, in seconds."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_to_online.py"


@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_the_door_that_is_open_since_the_data_were_recorded(seed: int) -> None:
    example = runpy.run_path(str(EXAMPLE))
    assert example["main"](seed) == (16, example["SHORTEST"])
