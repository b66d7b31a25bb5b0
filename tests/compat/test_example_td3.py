"""The TD3 example in JAX trains without torch and resumes after a kill."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adapters.cleanrl_programs import assert_ratio_after_a_kill

pytest.importorskip("gymnasium", reason="the example needs it")
pytest.importorskip("jax", reason="scripts/compat runs this test")


def test_collectors_and_learner_of_arrays_keep_their_ratio_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = tmp_path / "no torch" / "torch.py"
    torch.parent.mkdir()
    torch.write_text('raise ImportError("neither collectors nor the learner import torch")')
    paths = [str(torch.parent), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # only a few updates are compiled
    assert_ratio_after_a_kill("examples/cleanrl_td3_jax.py", tmp_path / "td3", "--collectors", "1")
