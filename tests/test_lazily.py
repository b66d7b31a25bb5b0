"""The short cut of the default run: Dynamo is loaded when it is used; see tests/lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.programs import environment

PROGRAM = """
import sys
import shmbuffer
shmbuffer.TensorDictPrioritizedReplayBuffer
assert "torch._dynamo" not in sys.modules

from tensordict import utils
from torch._dynamo import trace_rules
assert utils._lock_warn._dynamo_marked_constant
assert trace_rules.lookup_callable(utils._add_batch_dim_c) is not None
"""


def test_what_tensordict_registers_with_the_compiler_waits_until_that_is_loaded() -> None:
    lazily = environment(PYTHONPATH=str(Path(__file__).parent / "lazily"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=lazily, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
