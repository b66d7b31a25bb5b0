"""Protocol of buffers and ensembles, for code that can sample from either."""

from __future__ import annotations

from typing import Any, Protocol

from shmbuffer.samplers.sampler import Sampler


class BufferView(Protocol):
    """Methods that `ReplayBuffer`, ensembles and offline-to-online buffers have in common.

    Type checkers need this protocol, because an ensemble is only registered as a `ReplayBuffer` and
    does not derive from it.
    """

    @property
    def sampler(self) -> Sampler:
        """The sampler, which selects the items of a batch."""

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Samples a batch."""

    def update_priority(self, index: Any, priority: Any = None, *, generation: Any = None) -> Any:
        """Sets the priorities of the items at ``index``, such as the index of a sample."""

    def __getitem__(self, index: Any) -> Any:
        """Returns items by index."""

    def stats(self) -> dict[str, Any]:
        """Returns a dict with the size, the capacity and counters."""

    def dumps(self, path: str, *, extra: Any = None) -> None:
        """Saves the buffer into a directory."""
