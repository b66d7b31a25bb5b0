"""Changes of items that nobody has written over since; where a storage can tell."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from shmbuffer.numpy.arrays import Flags, Ints


class Conditional:
    """The part of a storage that changes items only if they are still those that are meant."""

    @property
    def supports_conditional_update(self) -> bool:
        """Whether `change_if_present` can tell if an item is still the same."""
        return False

    def change_if_present(self, index: Any, generation: Any, patch: Any) -> Flags:
        """Change entries of items that have not been written over since.

        Args:
            index: of a sample.
            generation: of the same sample.
            patch: the entries, each ``[n, ...]``.

        Returns:
            bool ``[n]``: what was changed.

        Raises:
            RuntimeError: the storage keeps no generations.
        """
        raise RuntimeError(self._no_generations)

    def entry(self, index: Any, path: tuple[str, ...]) -> tuple[NDArray[Any], Ints, Ints]:
        """One entry of some items.

        Returns:
            Elements int64 ``[n]``; the numbers ``[n, ...]``; the tickets, -1 without an item.
        """
        raise RuntimeError(self._no_generations)

    @property
    def _no_generations(self) -> str:
        return (
            f"a {type(self).__name__} keeps no generations; use a LazyTensorStorage or a "
            "LazyMemmapStorage"
        )
