"""Fixtures of the tests of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread_and_no_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables the log folders of Stable-Baselines3 and trains in one thread."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "logs"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
