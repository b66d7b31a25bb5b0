"""BenchMARL, which is built on TorchRL, trains on our buffers."""

from __future__ import annotations

import importlib.util

import pytest

import tests.compat.family  # noqa: F401 - skips these tests where TorchRL is not installed
from tests.compat.family import said_by

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("benchmarl") is None, reason="BenchMARL is not installed"
    ),
]


def test_an_algorithm_of_benchmarl_has_the_same_losses_on_our_buffer_as_on_torchrls() -> None:
    found = said_by("marl")
    losses, here = dict(found["torchrl"]), dict(found["same draws"])
    assert len(losses["losses"]) == 90
    assert losses.pop("library") == "torchrl"
    assert here.pop("library") == "shmbuffer"
    assert here == losses


@pytest.mark.parametrize("run", ["private", "shared"])
def test_an_algorithm_of_benchmarl_trains_on_our_buffer_in_memory_and_in_a_directory(
    run: str,
) -> None:
    found = said_by("marl")[run]
    assert len(found["losses"]) == 90
    assert {key: value for key, value in found.items() if key != "losses"} == {
        "items": 150,
        "library": "shmbuffer",
        "in a directory": run == "shared",
    }


def test_benchmarl_with_priorities_ends_with_the_same_error_on_our_buffer_as_on_torchrls() -> None:
    found = said_by("marl")
    shapes = "torch.Size([16, 2]) and torch.Size([16])"
    error = f"ValueError: Tensor and weights shapes must match, but got {shapes}"
    assert found["torchrl, prioritized"] == error
    assert found["private, prioritized"] == error
