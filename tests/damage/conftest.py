from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.damage.specimen import Specimen

Specimens = Callable[[str, bool], Specimen]


@pytest.fixture(scope="session")
def specimens() -> Iterator[Specimens]:
    """Dead buffers, by what an item is and whether the machine was started again since.

    In memory where that is possible: thousands of times they are damaged, opened and put back.
    """
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="shmbuffer-damage-", dir=base))

    @cache
    def made(kind: str, rebooted: bool) -> Specimen:
        return Specimen(folder / f"{kind}-{rebooted}", kind, rebooted=rebooted)

    yield made
    shutil.rmtree(folder)


@pytest.fixture(params=["rows", "records"])
def specimen(request: pytest.FixtureRequest, specimens: Specimens) -> Iterator[Specimen]:
    """A dead buffer of this boot."""
    found = specimens(request.param, False)
    found.restore()
    yield found
    found.renew()
