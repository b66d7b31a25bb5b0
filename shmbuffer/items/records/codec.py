"""Encodes and decodes the items of one buffer with the options of this buffer.

The zstd dictionary of a buffer is trained on its first items and stored in its directory. All
readers and writers of the buffer use this dictionary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from shmbuffer.items.records.compression import UnknownDictionaryError, Zstd
from shmbuffer.items.records.decoding.decoder import Decoder
from shmbuffer.items.records.encoder import Encoder
from shmbuffer.items.records.places import Places
from shmbuffer.memory import Engine, RecordBatch
from shmbuffer.memory.system.fork_lock import ForkLock

_TIMES = 100  # bytes of training data per byte of the dictionary, as zstd recommends
_PIECES = 64  # minimum number of pieces in the training data

_log = logging.getLogger(__name__)


class RecordCodec:
    """Encodes and decodes the items of a ring of bytes.

    Each record contains a description of its encoding. A codec can therefore read records that a
    codec with other options wrote. The dictionary of a buffer never changes once it exists.
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
        """Uses the dictionary of a buffer if it exists, and the buffer's name in messages."""
        self._engine = engine
        self.decoder.where = engine.where
        self._look()

    def use(self, dictionary: bytes) -> None:
        """Uses a zstd dictionary for later compression, and to read records that need it."""
        self._zstd = Zstd(self._level, dictionary=dictionary)

    def expand(self, places: Places, where: str = "a batch of records") -> None:
        """Expands frames like `Zstd.expand`.

        If a frame needs a dictionary that is not loaded, the buffer's dictionary is loaded first.
        """
        try:
            self._zstd.expand(places, where)
        except UnknownDictionaryError:
            if not self._look():
                raise
            self._zstd.expand(places, where)

    def encode(self, data: Any, single: bool) -> RecordBatch:
        """Encodes one item or a batch like `Encoder.encode`.

        The first items are also used to train the dictionary, which is then stored in the buffer.
        """
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
    """Collects training data, and trains a dictionary once there is enough data.

    ``nbytes`` is the size of the dictionary in bytes.
    """

    _lock = ForkLock()

    def __init__(self, level: int, nbytes: int) -> None:
        self._level = level
        self._nbytes = nbytes
        self._samples: list[bytes] = []
        self._seen_bytes = 0
        self.done = False

    def learn(self, samples: Sequence[bytes], where: str) -> bytes | None:
        """Adds training data, and trains the dictionary if there is now enough data.

        Returns the trained dictionary in the call that trains it, and None in all other calls. If
        the training fails, a warning is logged and the buffer continues without a dictionary.

        Cost: about one second to train a dictionary of 100 KB.
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
            _log.warning("%s: continuing without a dictionary: %s", where, str(error))
            return None
