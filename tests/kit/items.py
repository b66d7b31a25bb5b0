"""Items whose entries follow from their numbers, and items with text."""

from __future__ import annotations

import torch
from tensordict import TensorDict, tensorclass


def numbered(first: int, count: int) -> TensorDict:
    """Returns the items ``first``, ``first + 1``, ...: their only entry is ``number``."""
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


@tensorclass
class Step:
    """A tensor and a text, which is no tensor."""

    obs: torch.Tensor
    text: str
