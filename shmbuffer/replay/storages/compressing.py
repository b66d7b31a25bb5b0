"""What a list in this process keeps of an item: each of its tensors, compressed on its own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import zstandard

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.form.packing import Packed, pack, unpack
from shmbuffer.replay.storages.keeping import Keeping

_KEPT_FORMS = 1024  # that items to come may share

Compress = Callable[[torch.Tensor], torch.Tensor]
Decompress = Callable[..., torch.Tensor]


class Compressing(Keeping):
    """Items are kept as `Packed`.

    Args:
        level: of zstd.
        compress: called with a tensor, gives a uint8 tensor; None is zstd.
        decompress: called with what ``compress`` gave, and with a dict of the tensor's shape, dtype
            and device if it takes two arguments; None is zstd.
        device: where tensors of what is given are; None is where they were.
    """

    def __init__(
        self,
        level: int,
        compress: Compress | None,
        decompress: Decompress | None,
        device: torch.device | None,
    ) -> None:
        super().__init__(device)
        self.level = level
        self.decompresses_zstd = decompress is None
        self.compress: Compress = self._compress if compress is None else compress
        self.decompress: Decompress = self._decompress if decompress is None else decompress
        self._takes_metadata = takes_two(self.decompress)
        self._codecs = threading.local()  # of zstd: one for each thread
        self._forms: dict[str, list[Any]] = {}  # items of one form share it

    def keep(self, item: Any) -> Packed:
        """See `Keeping.keep`.

        Raises:
            TypeError: ``compress`` gave something else than a uint8 tensor.
        """
        packed = pack(item, self.compress, self.device)
        if len(self._forms) >= _KEPT_FORMS:
            self._forms.clear()
        return packed._replace(form=self._forms.setdefault(repr(packed.form), packed.form))

    def give(self, kept: Packed) -> Any:
        """See `Keeping.give`.

        Raises:
            CorruptBufferError: these are no bytes that zstd has written.
            RuntimeError: ``decompress`` gave something else than what was compressed.
        """
        return unpack(kept, self.expand)

    def give_all(self, kept: list[Packed]) -> list[Any]:
        """See `Keeping.give_all`."""
        return [self.give(one) for one in kept]

    def saved(self, kept: Packed) -> dict[str, Any]:
        """See `Keeping.saved`."""
        return kept._asdict()

    def loaded(self, saved: dict[str, Any]) -> Packed:
        """See `Keeping.loaded`."""
        chunks = [chunk.clone() for chunk in saved["chunks"]]
        return Packed(saved["form"], list(saved["values"]), chunks)

    def expand(self, chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        """The tensor of a chunk, or its bytes."""
        if self._takes_metadata:
            return self.decompress(chunk, metadata)
        return self.decompress(chunk)

    def _compress(self, tensor: torch.Tensor) -> torch.Tensor:
        codec = getattr(self._codecs, "compressor", None)
        if codec is None:
            codec = self._codecs.compressor = zstandard.ZstdCompressor(self.level)
        return torch.frombuffer(bytearray(codec.compress(bytes_of(tensor))), dtype=torch.uint8)

    def _decompress(self, chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        codec = getattr(self._codecs, "decompressor", None)
        if codec is None:
            codec = self._codecs.decompressor = zstandard.ZstdDecompressor()
        shape, dtype = metadata["shape"], metadata["dtype"]
        content = bytes_of(chunk)
        try:
            size = zstandard.frame_content_size(content)
            expected = size if shape is None else shape.numel() * dtype.itemsize
            if size != expected:  # before anything is allocated for what a file says
                raise zstandard.ZstdError(f"{size} bytes where {expected} belong")
            return torch.frombuffer(bytearray(codec.decompress(content)), dtype=torch.uint8)
        except zstandard.ZstdError as error:
            raise CorruptBufferError(
                f"a compressed item cannot be decompressed ({error}): it was not compressed with "
                "zstd, or its bytes are damaged"
            ) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order; of its own memory where they lie so."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one number, of which torch says that it is contiguous anyway
        flat = flat.new_empty(flat.shape).copy_(flat)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # of typeshed's 3.11


def takes_two(function: Callable[..., Any]) -> bool:
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
