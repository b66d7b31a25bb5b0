"""Encodes items as records and decodes records, with the options of one storage."""

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
    """Encodes and decodes items with tensors; see `RecordCodec`.

    A pickled codec contains the options but not the dictionary, which `join` loads again.
    """

    def __init__(
        self,
        *,
        level: int | None = None,  # level of zstd; if None, stores leaves raw
        keys: Iterable[Any] | None = None,  # keys of the entries to compress; see `Encoder`
        compress: Compress | None = None,  # the user's ``compression_fn``, instead of zstd
        decompress: Decompress | None = None,  # the user's ``decompression_fn``
        # Size in bytes of the dictionary that is trained on the first items; 0 trains none.
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
    """Returns a function that calls a user's ``decompression_fn``, with metadata if it takes them.

    The metadata are a dict with the tensor's shape, dtype and device.
    """
    return function if _takes_two(function) else lambda chunk, _: function(chunk)


def _takes_two(function: Callable[..., Any]) -> bool:
    """True if a function requires a second positional argument, or has one named ``metadata``."""
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
