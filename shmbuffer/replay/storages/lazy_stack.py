"""The storage of items that differ in shape: a list, given back as a lazy stack."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict

from shmbuffer.replay.batches import stack_lazily
from shmbuffer.replay.storages.list import ListStorage
from shmbuffer.replay.storages.placing import is_int


class LazyStackStorage(ListStorage):
    """TensorDicts or tensorclasses of any shapes and keys, with text and other objects in them.

    Several items are given as one lazy stack: shapes that differ show as -1, text is a
    NonTensorStack, and ``densify()`` makes nested tensors of it. Nothing is copied for that; an
    entry that is set in the stack is not set in the items.

    Args:
        max_size: capacity; None is without a limit.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        stack_dim: dimension of the stack in the batch dimensions of a sample; negative counts from
            their end.
        device: where items are sent when they are written; None leaves them where they are.

    It cannot be passed to another process (RuntimeError).

    Cost: a shallow copy an item; reading an entry of the stack stacks it.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyStackStorage
        >>> storage = LazyStackStorage(10)
        >>> storage.set(0, TensorDict(a=torch.zeros(3), text="three"))
        >>> storage.set(1, TensorDict(a=torch.zeros(4), text="four"))
        >>> batch = storage.get([1, 0])
        >>> list(batch["text"]), batch.get_item_shape("a")
        (['four', 'three'], torch.Size([2, -1]))

    Source: ``torchrl.data.LazyStackStorage``.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.stack_dim = int(stack_dim)

    def get(self, index: Any) -> Any:
        """The item at an int; a lazy stack of items at anything else.

        Args:
            index: see `ListStorage.get`.

        Raises:
            IndexError: a place without an item.
            EmptyBufferError: a slice or mask without any item.
            TypeError: an item is no TensorDict, tensorclass or tensor.
        """
        found = super().get(index)
        return stack_lazily(found, self.stack_dim) if type(found) is list else found

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """See `ListStorage.put`. A stack from `get` is taken apart along its own dimension."""
        if isinstance(data, LazyStackedTensorDict) and not is_int(cursor):
            dim = self.stack_dim + (data.batch_dims if self.stack_dim < 0 else 0)
            data = list(data.tensordicts) if dim == data.stack_dim else data
        super().put(cursor, data, in_place=in_place)

    def collate(self, items: Any) -> Any:
        """What `get` gives is a batch already."""
        return items
