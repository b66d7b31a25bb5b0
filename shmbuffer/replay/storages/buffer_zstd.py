"""zstd with the dictionary that a buffer has by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmbuffer.replay.records.compression import Buffer, Destination, UnknownDictionaryError, Zstd

if TYPE_CHECKING:
    from shmbuffer.memory import Engine


class BufferZstd:
    """Follows a buffer's dictionary: there is none at first, and then one that stays.

    Args:
        level: of zstd.

    Attributes:
        current: without a dictionary, or with the buffer's.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self.current = Zstd(level)
        self._engine: Engine | None = None

    def join(self, engine: Engine) -> None:
        """Follow the dictionary of this buffer."""
        self._engine = engine
        self._look()

    def use(self, dictionary: bytes) -> None:
        """Compress with this one from now on, and read what was compressed with it."""
        self.current = Zstd(self.level, dictionary=dictionary)

    def expand(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Destination],
        where: str = "a batch of records",
    ) -> None:
        """See `Zstd.expand`. A dictionary that is not known is looked for in the buffer."""
        try:
            self.current.expand(sources, destinations, where)
        except UnknownDictionaryError:
            if not self._look():
                raise
            self.current.expand(sources, destinations, where)

    def _look(self) -> bool:
        """Use the buffer's dictionary, if it has one."""
        found = None if self._engine is None else self._engine.dictionary()
        if found is not None:
            self.use(found)
        return found is not None
