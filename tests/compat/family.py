"""The two families side by side: TorchRL's names and ours, and how results are compared.

Importing this module skips the importing module if TorchRL is not installed.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

import shmbuffer.torchrl

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL logs every storage that it creates

with warnings.catch_warnings():
    # While it is imported, TorchRL warns about deprecations and missing optional parts.
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "torchrl", reason="TorchRL is not installed here: scripts/compat runs these tests"
    )
    import torchrl.data
    import torchrl.data.replay_buffers.checkpointers
    import torchrl.data.replay_buffers.samplers
    import torchrl.data.replay_buffers.scheduler
    import torchrl.data.replay_buffers.storages
    import torchrl.data.replay_buffers.utils
    import torchrl.data.replay_buffers.writers

MODULES = [
    torchrl.data.replay_buffers,
    torchrl.data.replay_buffers.checkpointers,
    torchrl.data.replay_buffers.scheduler,
    torchrl.data.replay_buffers.samplers,
    torchrl.data.replay_buffers.storages,
    torchrl.data.replay_buffers.writers,
    torchrl.data.replay_buffers.utils,
]


class _Theirs(SimpleNamespace):
    """TorchRL's family in one namespace, as ours is."""

    def __getattr__(self, name: str) -> Any:
        for module in MODULES:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"TorchRL's family has no {name}")


theirs = _Theirs()
ours = shmbuffer


def described(value: Any, *, values: bool = True) -> Any:
    """Describes a result in plain Python, so that two results can be compared.

    Args:
        value: what a call returned.
        values: include the numbers; otherwise only keys, shapes and dtypes.
    """
    if isinstance(value, shmbuffer.PriorityUpdate):
        return None  # TorchRL returns nothing; docs/torchrl.md says so
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return ("non-tensor", value.tolist() if values else list(value.batch_size))
    if isinstance(value, TensorDictBase):
        entries = {
            key: described(value.get(key), values=values) for key in sorted(value.keys(), key=str)
        }
        return ("tensordict", list(value.batch_size), entries)
    if is_tensor_collection(value):
        name, (_, batch, entries) = (
            type(value).__name__,
            described(value.to_tensordict(), values=values),
        )
        return (name, batch, entries)
    if isinstance(value, torch.Tensor):
        numbers = value.tolist() if values else None
        return ("tensor", str(value.dtype), list(value.shape), numbers)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), list(value.shape), value.tolist() if values else None)
    if isinstance(value, dict):
        return {key: described(one, values=values) for key, one in value.items()}
    if hasattr(value, "_fields"):
        return (type(value).__name__, *(described(one, values=values) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(described(one, values=values) for one in value)
    if isinstance(value, torch.Size):
        return list(value)
    return value


def outcome(step: Callable[[], Any], *, values: bool = True) -> Any:
    """Returns the described result of a step, or the error that it raises."""
    with warnings.catch_warnings():
        # TorchRL warns about deprecations; only results are compared
        warnings.simplefilter("ignore")
        try:
            return described(step(), values=values)
        except Exception as error:
            return error


def same(mine: Any, theirs_: Any) -> bool:
    """True if two outcomes are equal, or are errors that the same handler catches."""
    if isinstance(theirs_, Exception) or isinstance(mine, Exception):
        if not (isinstance(theirs_, Exception) and isinstance(mine, Exception)):
            return False
        return isinstance(mine, type(theirs_))
    return bool(mine == theirs_)


@functools.cache
def said_by(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script of this folder and returns the JSON in its last line of output."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.compat.{script}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
