"""Items to records and back, as one buffer has been told to do it.

A buffer's dictionary for zstd is learned from its first items, kept in its directory, and followed
by all who read and write there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from shmbuffer.items.records.compression import UnknownDictionaryError, Zstd
from shmbuffer.items.records.decoder import Decoder
from shmbuffer.items.records.encoder import Encoder
from shmbuffer.items.records.places import Places
from shmbuffer.memory import Engine, RecordBatch
from shmbuffer.memory.system.fork_lock import ForkLock

_TIMES = 100  # as many times the size of the dictionary is learned from, as zstd advises
_PIECES = 64  # and of so many pieces at least: from a few, nothing can be learned

_log = logging.getLogger(__name__)


class RecordCodec:
    """How items are stored in a byte ring.

    It reads what others have written otherwise: a record says how it is stored. It follows the
    dictionary of its buffer: there is none at first, and then one that stays.
    """

    encoder: Encoder
    decoder: Decoder

    def __init__(self, level: int | None, dictionary_bytes: int) -> None:
        self._level = 3 if level is None else level
        self._zstd = Zstd(self._level)  # without a dictionary, or with the buffer's
        self._engine: Engine | None = None
        self._trainer = (
            DictionaryTrainer(self._level, dictionary_bytes) if dictionary_bytes else None
        )
        self._compresses = level is not None  # with zstd

    def join(self, engine: Engine) -> None:
        """Be the codec of this buffer: its dictionary is used, and its name in messages."""
        self._engine = engine
        self.decoder.where = engine.where
        self._look()

    def use(self, dictionary: bytes) -> None:
        """Compress with this dictionary from now on, and read what was compressed with it."""
        self._zstd = Zstd(self._level, dictionary=dictionary)

    def expand(self, places: Places, where: str = "a batch of records") -> None:
        """See `Zstd.expand`. A dictionary that is not known is looked for in the buffer."""
        try:
            self._zstd.expand(places, where)
        except UnknownDictionaryError:
            if not self._look():
                raise
            self._zstd.expand(places, where)

    def encode(self, data: Any, single: bool) -> RecordBatch:
        """Records of one item, or of a batch; see `Encoder.encode`."""
        zstd, trainer = self._zstd, self._trainer
        if self._compresses:
            self.encoder.zstd = zstd
        if trainer is None or self._engine is None or zstd.dictionary_id:
            return self.encoder.encode(data, single)
        if not single:
            data = self.encoder.listed(data)
        batch = self.encoder.encode(data, single)
        if not trainer.done:
            samples = self.encoder.samples(data, single)
            trained = trainer.learn(samples, self._engine.where)
            if trained is not None:
                self.use(self._engine.seat.publish_dictionary(trained))
        return batch

    def _look(self) -> bool:
        found = None if self._engine is None else self._engine.seat.dictionary()
        if found is not None:
            self.use(found)
        return found is not None


class DictionaryTrainer:
    """Collects what is compressed until a dictionary of ``nbytes`` can be made of it."""

    _lock = ForkLock()

    def __init__(self, level: int, nbytes: int) -> None:
        self._level = level
        self._nbytes = nbytes
        self._samples: list[bytes] = []
        self._seen_bytes = 0
        self.done = False

    def learn(self, samples: Sequence[bytes], where: str) -> bytes | None:
        """Looks at more pieces until `done`; returns the dictionary once, else None.

        The log says if nothing can be learned. Cost: a second for a dictionary of 100 KB, once.
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
            _log.warning("%s: goes on without a dictionary: %s", where, str(error))
            return None
