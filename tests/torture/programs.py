"""Campaigns in a process of their own, which has loaded nothing but what they need."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.torture.command import Figures


def figures_of(module: str, seed: int, *, seconds: float = 0) -> Figures:
    """Run a campaign, at least one case of it; its figures, or a failure with all that it said."""
    command = [sys.executable, "-m", module, "--seconds", str(seconds), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stderr}"
    figures: Figures = json.loads(done.stdout)
    return figures
