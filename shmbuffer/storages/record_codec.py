"""Items to records and back, as one storage has been told to do it.

A buffer's dictionary for zstd is learned from its first items, kept in its directory, and followed
by all who read and write there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from shmbuffer.items.records import codec
from shmbuffer.tensors.records.decoder import TensorDecoder
from shmbuffer.tensors.records.encoder import TensorEncoder

Compress = Callable[[torch.Tensor], torch.Tensor]
Decompress = Callable[..., torch.Tensor]


class TensorRecordCodec(codec.RecordCodec):
    """How items are stored in a byte ring; records of other codecs are read, too.

    It pickles as it was told, without what it has learned; `join` finds that again.
    """

    def __init__(
        self,
        *,
        level: int | None = None,  # of zstd; None: leaves are stored raw
        keys: Iterable[Any] | None = None,  # which leaves are compressed; see `TensorEncoder`
        compress: Compress | None = None,  # the user's, in place of zstd
        decompress: Decompress | None = None,  # the user's, for what was compressed with it
        # of the dictionary that is learned from the first items; 0: none is
        dictionary_bytes: int = 0,
        device: torch.device | None = None,  # where tensors of what is read are; None is the CPU
    ) -> None:
        self._config: dict[str, Any] = {
            "level": level,
            "keys": None if keys is None else list(keys),
            "compress": compress,
            "decompress": decompress,
            "dictionary_bytes": dictionary_bytes,
            "device": device,
        }
        super().__init__(level if compress is None else None, dictionary_bytes)
        self.encoder = TensorEncoder(own=compress, keys=self._config["keys"])
        self.decoder: TensorDecoder = TensorDecoder(
            self.expand, device, None if decompress is None else with_metadata(decompress)
        )

    @property
    def decompresses_own(self) -> bool:
        """True if a ``decompression_fn`` was given."""
        return self._config["decompress"] is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TensorRecordCodec, **self._config), ()


def with_metadata(function: Decompress) -> Callable[[torch.Tensor, dict[str, Any]], Any]:
    """A user's function that may take the chunk alone, as one that is given what belongs to it."""
    return function if _takes_two(function) else lambda chunk, _: function(chunk)


def _takes_two(function: Callable[..., Any]) -> bool:
    """True if a function needs a second positional argument, or takes ``metadata``."""
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
