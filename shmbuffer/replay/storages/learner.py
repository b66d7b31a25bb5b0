"""What the items of a buffer have in common, learned from the first of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from shmbuffer.replay.records.compression import Zstd

_TIMES = 100  # as many times the size of the dictionary is learned from, as zstd advises
_PIECES = 64  # and of so many pieces at least: from a few, nothing can be learned

_log = logging.getLogger(__name__)


class Learner:
    """Collects what is compressed until a dictionary can be made of it.

    Args:
        level: of zstd, that it will be used with.
        nbytes: size of the dictionary.
    """

    def __init__(self, level: int, nbytes: int) -> None:
        self._level = level
        self._nbytes = nbytes
        self._samples: list[bytes] = []
        self._seen_bytes = 0
        self._lock = threading.Lock()
        self.done = False

    def learn(self, samples: Sequence[bytes], where: str) -> bytes | None:
        """Look at more pieces, until it is `done`.

        Args:
            samples: as `Encoder.samples` gives them.
            where: the buffer, for the log.

        Returns:
            The dictionary, once; None: not yet, or nothing can be learned (the log says so).

        Cost: a second for a dictionary of 100 KB, once.
        """
        with self._lock:
            if self.done:
                return None
            self._samples += samples
            self._seen_bytes += sum(map(len, samples))
            if self._seen_bytes < _TIMES * self._nbytes or len(self._samples) < _PIECES:
                return None
            self.done = True
            found, self._samples = self._samples, []
        try:
            return Zstd.train(found, self._nbytes, self._level)
        except ValueError as error:
            _log.warning("%s: goes on without a dictionary: %s", where, error)
            return None
