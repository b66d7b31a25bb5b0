"""Items to records and back, as one storage has been told to do it.

A buffer's dictionary for zstd is learned from its first items, kept in its directory, and followed
by all who read and write there.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.replay.form.batches import is_batch, stack_lazily, unbound
from shmbuffer.replay.records.compression import Buffer, Destination, UnknownDictionaryError, Zstd
from shmbuffer.replay.records.decoder import Decoder
from shmbuffer.replay.records.encoder import Encoder

if TYPE_CHECKING:
    from shmbuffer.memory import Engine, RecordBatch

Compress = Callable[[torch.Tensor], torch.Tensor]
Decompress = Callable[..., torch.Tensor]

_TIMES = 100  # as many times the size of the dictionary is learned from, as zstd advises
_PIECES = 64  # and of so many pieces at least: from a few, nothing can be learned

_log = logging.getLogger(__name__)


class RawBatch:
    """Several items as they lie in a byte ring, validated; a result may lie in their bytes."""

    def __init__(self, batch: RecordBatch, decoder: Decoder) -> None:
        self.batch = batch
        self.decoder = decoder

    def __len__(self) -> int:
        """How many there are."""
        return len(self.batch)

    def items(self) -> list[Any]:
        """One by one."""
        return self.decoder.items(self.batch)

    def stacked(self, dim: int) -> Any:
        """As a lazy stack, whose items are made when somebody looks at them."""
        stack = self.decoder.stack(self.batch, dim)
        return stack_lazily(self.items(), dim, fresh=True) if stack is None else stack

    def dense(self) -> Any:
        """As one batch of their form; None where they differ in form or in the shape of a leaf."""
        return self.decoder.dense(self.batch)


class RecordCodec:
    """How items are stored in a byte ring.

    It reads what others have written otherwise: a record says how it is stored. It pickles as it
    was told, without what it has learned; `join` finds that again.
    """

    def __init__(
        self,
        *,
        level: int | None = None,  # of zstd; None: leaves are stored raw
        keys: Iterable[Any] | None = None,  # which leaves are compressed; see `Encoder`
        compress: Compress | None = None,  # the user's, in place of zstd
        decompress: Decompress | None = None,  # the user's, for what was compressed with it
        share: bool = False,  # frames that consecutive items have in common are stored once
        # of the dictionary that is learned from the first items; 0: none is
        dictionary_bytes: int = 0,
        device: torch.device | None = None,  # where tensors of what is read are; None is the CPU
    ) -> None:
        self._config: dict[str, Any] = {
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
        self._trainer = (
            DictionaryTrainer(self._zstd.level, dictionary_bytes) if dictionary_bytes else None
        )
        self._compresses = level is not None and compress is None
        self.encoder = Encoder(
            zstd=self._zstd.current if self._compresses else None,
            own=compress,
            keys=self._config["keys"],
            share=share,
        )
        self.decoder = Decoder(
            self._zstd.expand, device, None if decompress is None else with_metadata(decompress)
        )

    def join(self, engine: Engine) -> None:
        """Be the codec of this buffer: its dictionary is used, and its name in messages."""
        self._engine = engine
        self._zstd.join(engine)
        self.decoder.where = engine.where

    def use(self, dictionary: bytes) -> None:
        """Compress with this dictionary from now on, and read what was compressed with it."""
        self._zstd.use(dictionary)

    def encode(self, data: Any, single: bool, *, apart: bool = False) -> RecordBatch:
        """Records of one item, or of a batch; see `Encoder.encode`."""
        zstd, trainer = self._zstd.current, self._trainer
        if self._compresses:
            self.encoder.zstd = zstd
        if trainer is None or self._engine is None or zstd.dictionary_id:
            return self.encoder.encode(data, single, apart=apart)
        if not single and not is_batch(data):
            data = unbound(data)  # it is looked at twice
        batch = self.encoder.encode(data, single, apart=apart)
        if not trainer.done:
            samples = self.encoder.samples(data, single)
            trained = trainer.learn(samples, self._engine.where)
            if trained is not None:
                self.use(self._engine.seat.publish_dictionary(trained))
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RecordCodec, **self._config), ()


def with_metadata(function: Decompress) -> Callable[[torch.Tensor, dict[str, Any]], Any]:
    """A user's function that may take the chunk alone, as one that is given what belongs to it."""
    return function if _takes_two(function) else lambda chunk, _: function(chunk)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether it takes a second positional argument that it cannot do without, or ``metadata``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        return False
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    positional = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 2:
        return False
    return positional[1].default is inspect.Parameter.empty or positional[1].name == "metadata"


class BufferZstd:
    """Follows a buffer's dictionary: there is none at first, and then one that stays."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.current = Zstd(level)  # without a dictionary, or with the buffer's
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
        found = None if self._engine is None else self._engine.seat.dictionary()
        if found is not None:
            self.use(found)
        return found is not None


class DictionaryTrainer:
    """Collects what is compressed until a dictionary of ``nbytes`` can be made of it."""

    def __init__(self, level: int, nbytes: int) -> None:
        self._level = level
        self._nbytes = nbytes
        self._samples: list[bytes] = []
        self._seen_bytes = 0
        self._lock = threading.Lock()
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
