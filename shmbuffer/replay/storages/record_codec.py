"""Items to records and back, as one storage has been told to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.replay.form.batches import is_batch, unbound
from shmbuffer.replay.records.decoder import Decoder
from shmbuffer.replay.records.encoder import Encoder
from shmbuffer.replay.storages.buffer_zstd import BufferZstd
from shmbuffer.replay.storages.compressing import Compress, Decompress, takes_two
from shmbuffer.replay.storages.learner import Learner

if TYPE_CHECKING:
    from shmbuffer.memory import Engine, RecordBatch


class RecordCodec:
    """How items are stored in a byte ring.

    Args:
        level: of zstd; None: leaves are stored raw.
        keys: which leaves are compressed; see `Encoder`.
        compress: the user's, in place of zstd.
        decompress: the user's, for what was compressed with his.
        share: frames that consecutive items have in common are stored once.
        dictionary_bytes: of the dictionary that is learned from the first items; 0: none is.
        device: where tensors of what is read are; None is the CPU.

    Whatever it was told, it reads what others have written: a record says how it is stored. For
    what a user's function has compressed ``decompress`` is needed.

    It pickles as it was told, without what it has learned; `join` finds that again.
    """

    def __init__(
        self,
        *,
        level: int | None = None,
        keys: Iterable[Any] | None = None,
        compress: Compress | None = None,
        decompress: Decompress | None = None,
        share: bool = False,
        dictionary_bytes: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._told: dict[str, Any] = {
            "level": level,
            "keys": None if keys is None else list(keys),
            "compress": compress,
            "decompress": decompress,
            "share": share,
            "dictionary_bytes": dictionary_bytes,
            "device": device,
        }
        self._zstd = BufferZstd(3 if level is None else level)
        self._engine: Engine | None = None
        self._learner = Learner(self._zstd.level, dictionary_bytes) if dictionary_bytes else None
        self._compresses = level is not None and compress is None
        self.encoder = Encoder(
            zstd=self._zstd.current if self._compresses else None,
            own=compress,
            keys=self._told["keys"],
            share=share,
        )
        self.decoder = Decoder(self._zstd.expand, device, _with_two(decompress))

    def join(self, engine: Engine) -> None:
        """Be the codec of this buffer: its dictionary is used, and its name in messages."""
        self._engine = engine
        self._zstd.join(engine)
        self.decoder.where = engine.where

    def use(self, dictionary: bytes) -> None:
        """Compress with this dictionary from now on, and read what was compressed with it."""
        self._zstd.use(dictionary)

    def with_dictionary(self, dictionary: bytes) -> RecordCodec:
        """Another one, that was told the same, for records that were compressed with this."""
        other = RecordCodec(**self._told)
        other.use(dictionary)
        return other

    def encode(self, data: Any, single: bool, *, apart: bool = False) -> RecordBatch:
        """Records of one item, or of a batch; see `Encoder.encode`."""
        zstd, learner = self._zstd.current, self._learner
        if self._compresses:
            self.encoder.zstd = zstd
        if learner is None or self._engine is None or zstd.dictionary_id:
            return self.encoder.encode(data, single, apart=apart)
        if not single and not is_batch(data):
            data = unbound(data)  # it is looked at twice
        batch = self.encoder.encode(data, single, apart=apart)
        if not learner.done:
            samples = self.encoder.samples(data, single)
            trained = learner.learn(samples, self._engine.where)
            if trained is not None:
                self.use(self._engine.publish_dictionary(trained))
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._told,)


def _made(told: dict[str, Any]) -> RecordCodec:
    return RecordCodec(**told)


def _with_two(function: Decompress | None) -> Callable[[torch.Tensor, dict[str, Any]], Any] | None:
    """A user's function that takes the chunk alone, as one that takes what belongs to it, too."""
    if function is None or takes_two(function):
        return function
    return lambda chunk, _: function(chunk)
