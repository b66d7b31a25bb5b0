"""Messages for data that do not fit, where they may be TensorDicts."""

from __future__ import annotations

from typing import Any

from tensordict import NonTensorData, is_non_tensor

from shmbuffer.numpy import mismatch
from shmbuffer.numpy.nodes import KeyPath
from shmbuffer.replay.form.nodes import fields, is_collection


def not_a_tensor(data: Any, why: Exception | None = None) -> str:
    """The message for data that a tensor storage cannot hold, and why."""
    return mismatch.not_a_tensor(data.data if isinstance(data, NonTensorData) else data, why)


def leaves_of(data: Any, nested: bool = True) -> dict[KeyPath, Any]:
    """The leaves of any data by their place, without the entries that a sample adds."""
    return mismatch.leaves_of(data, nested, (), _opened)


def _opened(data: Any) -> Any:
    """What is in a TensorDict; None of text and objects in one."""
    if not is_collection(data):
        return data
    return None if is_non_tensor(data) else fields(data)
