"""Weights are sent in both directions between the two kinds of client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmbuffer.numpy
from shmbuffer import Coordinator, SchemaMismatchError
from shmbuffer.memory.format.dtypes import DTYPES


def made(path: Path) -> Any:
    return Coordinator(path, capacity=8)


@pytest.mark.product(few=6)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_goes_there_and_back(tmp_path: Path, name: str) -> None:
    given = torch.arange(6 * DTYPES[name].itemsize, dtype=torch.uint8) % (
        2 if name == "bool" else 251
    )
    tensor = given.view(getattr(torch, name)).reshape(2, 3)
    with made(tmp_path / "rb") as coordinator, shmbuffer.numpy.attach(tmp_path / "rb") as rb:
        assert coordinator.buffer.publish({"net": {"w": tensor}}, 3) == 1
        found = rb.newest()
        assert (found.version, found.step) == (1, 3)
        array = found.state_dict["net"]["w"]
        assert array.dtype == (f"u{DTYPES[name].itemsize}" if not DTYPES[name].in_numpy else name)
        assert array.tobytes() == given.numpy().tobytes()
        assert rb.publish({"net": {"w": array}}, 4) == 2
        back = coordinator.buffer.newest(1).state_dict["net"]["w"]
        assert back.dtype == tensor.dtype
        assert torch.equal(back.reshape(-1).view(torch.uint8), given)


def test_what_says_that_it_is_an_array_is_published(tmp_path: Path) -> None:
    with made(tmp_path / "rb"), shmbuffer.numpy.attach(tmp_path / "rb") as rb:
        rb.publish({"t": torch.ones(2, dtype=torch.bfloat16), "l": [1.5, 2.5], "n": 3}, 0)
        found = rb.newest().state_dict
        assert found["t"].tolist() == [0x3F80] * 2
        assert found["l"].dtype == np.float32
        assert found["n"] == 3
        with pytest.raises(SchemaMismatchError, match=r"leaf 't' is bfloat16\[2\]"):
            rb.publish({"t": np.ones(2, np.float16), "l": [1.5, 2.5], "n": 3}, 0)
        with pytest.raises(TypeError, match=r"'t' is a NoneType that cannot be stored"):
            rb.publish({"t": None}, 0)
