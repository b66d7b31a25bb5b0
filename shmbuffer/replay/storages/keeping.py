"""What a list in this process keeps of an item: the item itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.replay.form.batches import unbound
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.storages.tensor import to_device


class Keeping:
    """Items are kept as they are.

    Args:
        device: where tensors in them are sent when they are written; None leaves them where they
            are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def keep(self, item: Any) -> Any:
        """What is kept of an item."""
        return item if self.device is None else to_device(item, self.device)

    def keep_all(self, data: Any) -> list[Any]:
        """What is kept of each item of a batch.

        Raises:
            TypeError, ValueError: see `unbound`.
        """
        return [self.keep(item) for item in unbound(data)]

    def give(self, kept: Any) -> Any:
        """The item, from what is kept of it."""
        return kept

    def give_all(self, kept: list[Any]) -> Any:
        """The items, from what is kept of them: a list, or `Fetched`."""
        return kept

    def saved(self, kept: Any) -> Any:
        """What a state has of an item."""
        return kept

    def loaded(self, saved: Any) -> Any:
        """What is kept of an item of a state. Its tensors are copies."""
        return self.keep(cloned(saved))


def cloned(item: Any) -> Any:
    """An item whose tensors are copies."""
    if isinstance(item, torch.Tensor) or is_collection(item):
        return item.clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if type(item) is dict:
        return {key: cloned(value) for key, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(cloned(value) for value in item)
    return item
