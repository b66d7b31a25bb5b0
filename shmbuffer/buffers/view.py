"""The protocol of a buffer for code that samples, whether it is one buffer or several."""

from __future__ import annotations

from typing import Any, Protocol

from shmbuffer.samplers.sampler import Sampler


class BufferView(Protocol):
    """Calls that a `ReplayBuffer`, an ensemble and offline-to-online have in common.

    Type checkers need it, because an ensemble is only registered as a `ReplayBuffer`, not derived
    from it.
    """

    @property
    def sampler(self) -> Sampler:
        """Draws items."""

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draws a batch."""

    def update_priority(self, index: Any, priority: Any = None, *, generation: Any = None) -> Any:
        """Changes priorities of the items at an index of a sample."""

    def __getitem__(self, index: Any) -> Any:
        """Items by index."""

    def stats(self) -> dict[str, Any]:
        """Sizes and counts."""

    def dumps(self, path: str, *, extra: Any = None) -> None:
        """Saves everything into a directory."""
