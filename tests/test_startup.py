"""What tests/startup does to each Python that a test starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"

COMPILER = """
def allow_in_graph(function):
    import torch._dynamo
    torch._dynamo.told.append(("allowed", function))
    return function

def assume_constant_result(function):
    import torch._dynamo
    torch._dynamo.told.append(("constant", function))
    return function
"""

PROGRAM = """
import sys, torch.compiler

def one(): pass
def two(): pass
def three(): pass

assert torch.compiler.allow_in_graph(one) is one
assert torch.compiler.assume_constant_result(two) is two
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert set(torch._dynamo.told) == {("allowed", one), ("constant", two)}
assert torch.compiler.allow_in_graph(three) is three
assert torch._dynamo.told[2:] == [("allowed", three)]
"""


def test_the_compiler_of_torch_is_imported_late_and_told_everything(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    for name, text in {"__init__": "", "compiler": COMPILER, "_dynamo": "told = []"}.items():
        (torch / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{STARTUP}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
