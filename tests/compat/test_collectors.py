"""TorchRL's collectors in processes write into our buffers as into TorchRL's own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

import tests.compat.family  # noqa: F401 - skips this module where TorchRL is not installed

pytestmark = pytest.mark.timeout(240)

# TorchRL keeps, and fills with zeros, what only the invented first item had.
INVENTED = {"_reset", "index"}


@cache
def collected(*arguments: str) -> dict[str, Any]:
    """What the script says at its end, which it comes to."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.compat.collect", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "storage",
    [("LazyTensorStorage",), ("LazyMemmapStorage",), ("LazyMemmapStorage", "shared_init")],
    ids="+".join,
)
def test_collectors_in_processes_write_the_items_that_torchrl_gets(
    kind: str, storage: tuple[str, ...]
) -> None:
    ours = collected(kind, "shmbuffer", *storage)
    theirs = collected(kind, "torchrl", "LazyTensorStorage")
    assert ours["sampled"]
    assert ours["len"] == theirs["len"] == 400
    assert {*ours["keys"]} == {*theirs["keys"]} - INVENTED
