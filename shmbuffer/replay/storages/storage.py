"""What every storage offers: items by index, and a list of who wants to hear of writes."""

from __future__ import annotations

import weakref
from typing import Any

from shmbuffer.replay.checkpoints import NoCheckpoints


class Storage(NoCheckpoints):
    """Where the items are.

    A storage of your own needs ``set``, ``get`` and ``__len__``; any sampler and any writer works
    on it, through these three. The storages of this package lie on a ring (`RingStorage`), and are
    read and written by the C core.

    Args:
        max_size: capacity in elements.
        checkpointer: not there yet; has to be None.
        compilable: not there yet; has to be False.

    Source: ``torchrl.data.Storage``.
    """

    ndim: int = 1
    """How many leading dimensions of the data belong to the storage."""

    _rng: Any = None  # torch.Generator of the buffer, as in TorchRL

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        if checkpointer is not None:
            raise NotImplementedError("Storage(checkpointer=): checkpoints come in a later release")
        refuse_compilable(type(self).__name__, compilable)
        if int(max_size) < 1:
            raise ValueError(f"max_size has to be at least 1, got {max_size}")
        self._max_size = int(max_size)
        self._watchers: list[weakref.ref[Any]] = []

    @property
    def max_size(self) -> int:
        """Capacity in elements."""
        return self._max_size

    @property
    def shared(self) -> bool:
        """Whether other processes may read and write these bytes."""
        return False

    @property
    def initialized(self) -> bool:
        """Whether the storage knows its leaves."""
        return True

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``: one item at an int, a batch at a sequence of them."""
        raise NotImplementedError(f"{type(self).__name__} has no set()")

    def get(self, index: Any) -> Any:
        """The item at an int, the batch of items at a sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no get()")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")

    def attach(self, buffer: Any) -> None:
        """Have ``buffer.mark_update(index)`` called for every write, whoever writes.

        Args:
            buffer: whatever keeps something about the items: a buffer, or a sampler. Held weakly.
        """
        if all(reference() is not buffer for reference in self._watchers):
            self._watchers.append(weakref.ref(buffer))

    def detach(self, buffer: Any) -> None:
        """Undo `attach`; nothing happens if it was not."""
        self._watchers = [one for one in self._watchers if one() not in (None, buffer)]

    def notify(self, index: Any) -> None:
        """Tell all that are attached that the items at ``index`` (element indices) were written."""
        for reference in self._watchers:
            entity = reference()
            if entity is not None:
                entity.mark_update(index)

    def notify_emptied(self) -> None:
        """Tell the samplers that are attached that every item was forgotten."""
        for reference in self._watchers:
            forget = getattr(reference(), "_empty", None)
            if forget is not None:
                forget()

    def define(self, example: Any) -> None:
        """Say what an item is before anything is written, where the storage needs to know."""

    def contains(self, index: int) -> bool:
        """Whether there is an item at ``index``."""
        return 0 <= index < len(self)

    def flatten(self) -> Any:
        """Every item, as one batch with one dimension for the storage."""
        return self.get(slice(None))

    def cleanup(self) -> bool:
        """Remove the files of the storage. False: there were none, or they are gone already."""
        return False

    def close(self) -> None:
        """Give back what the storage holds beyond memory.

        It cannot be used afterwards. Idempotent.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything in there, in memory."""
        raise NotImplementedError(f"{type(self).__name__} has no state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict")

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be emptied")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value)

    def __contains__(self, index: int) -> bool:
        return self.contains(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watchers": []}  # who is attached here is not attached there


def refuse_compilable(name: str, compilable: bool | None) -> None:
    """NotImplementedError for ``compilable=True``."""
    if compilable:
        raise NotImplementedError(
            f"{name}(compilable=True): a buffer that torch.compile traces through is not there "
            "yet; call it outside of the compiled function"
        )
