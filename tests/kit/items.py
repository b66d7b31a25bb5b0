"""Items whose entries follow from their numbers, and items that are more than tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")
