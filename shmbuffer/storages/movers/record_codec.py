"""Codec between items and records, with the options of one storage.

A buffer's zstd dictionary is learned from its first items, stored in its directory, and used by all
its readers and writers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from shmbuffer.items.records import codec
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder

Compress = Callable[[torch.Tensor], torch.Tensor]
Decompress = Callable[..., torch.Tensor]


class TensorRecordCodec(codec.RecordCodec):
    """Encodes items for a byte ring. It also decodes records that another codec has encoded.

    A pickled codec contains its options but not the learned dictionary, which `join` finds again.
    """

    def __init__(
        self,
        *,
        level: int | None = None,  # level of zstd; None: leaves are stored raw
        keys: Iterable[Any] | None = None,  # leaves to compress; see `TensorEncoder`
        compress: Compress | None = None,  # function of the user, instead of zstd
        decompress: Decompress | None = None,  # function of the user that reverses ``compress``
        # Size of the dictionary that is learned from the first items, or 0 for no dictionary.
        dictionary_bytes: int = 0,
        device: torch.device | None = None,  # device of decoded tensors; None is the CPU
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
        """True if the user passed a ``decompression_fn``."""
        return self._config["decompress"] is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TensorRecordCodec, **self._config), ()


def with_metadata(function: Decompress) -> Callable[[torch.Tensor, dict[str, Any]], Any]:
    """Wraps a user's function that takes only the chunk, so that it also accepts metadata."""
    return function if _takes_two(function) else lambda chunk, _: function(chunk)


def _takes_two(function: Callable[..., Any]) -> bool:
    """True if a function requires a second positional argument or takes ``metadata``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    positional = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 2:
        return False
    return positional[1].default is inspect.Parameter.empty or positional[1].name == "metadata"
