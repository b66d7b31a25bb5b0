"""Runs a campaign in its own process, which imports only what the campaign needs."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.torture.command import Figures


def figures_of(module: str, seed: int, *, seconds: float = 0) -> Figures:
    """Runs at least one case of a campaign; returns its figures, or fails with all its output."""
    command = [sys.executable, "-m", module, "--seconds", str(seconds), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stderr}"
    figures: Figures = json.loads(done.stdout)
    return figures
