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
    """Dead buffers, by the kind of items and by whether the machine was restarted since.

    They are in memory if possible, because they are damaged, opened and restored thousands of
    times.
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
    """A dead buffer from the present boot."""
    found = specimens(request.param, False)
    found.restore()
    yield found
    found.renew()
