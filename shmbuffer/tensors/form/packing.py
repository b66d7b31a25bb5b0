"""An item as compressed bytes and what is needed to make it again.

    item ──pack──▶ Packed(form, values, chunks) ──unpack──▶ item

Every tensor and array in an item, however deep, is a chunk of its own; text, numbers and other
objects are values, kept as they are. The form says where each of them belongs, and is JSON, so that
chunks can be written to a disk without pickle. Forms:

    ["tensor", dtype, shape, device]             a chunk
    ["array", numpy's dtype, shape]              a chunk
    ["number", numpy's dtype, []]                 a chunk: a scalar of numpy's
    ["bytes"]                                    a chunk
    ["value"]                                    a value

and the containers of `record_format.grammar`, with the key ``{"value": true}`` for one that is a
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.errors import FormatError
from shmbuffer.items import labels
from shmbuffer.items.arrays import PLAIN_KINDS
from shmbuffer.items.records.containers import names_of
from shmbuffer.memory.record_format.grammar import DICTS, join, split
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.containers import made, take_of
from shmbuffer.tensors.form.tensors import dtype_name, tensor_of, torch_dtype, torch_dtype_like

Form = list[Any]
Compress = Callable[[torch.Tensor], Any]  # a uint8 tensor: looked at, since users write these
Decompress = Callable[[torch.Tensor, dict[str, Any]], Any]
"""Of a chunk, with the type, shape, dtype and device of the tensor that was compressed."""

RECORD = "record"
"""The form of an item that is kept as the body of a record, which is its one chunk."""


class Packed(NamedTuple):
    """An item, compressed."""

    form: Form
    """What it is made of; JSON."""
    values: list[Any]
    """What is no tensor, in the order of the form: JSON if it is text, numbers and None only."""
    chunks: list[torch.Tensor]
    """Compressed tensors and arrays, in the order of the form: uint8, on the CPU."""

    @property
    def nbytes(self) -> int:
        """Size of the chunks."""
        return sum(chunk.numel() for chunk in self.chunks)


def pack(item: Any, compress: Compress, device: torch.device | None = None) -> Packed:
    """Compress an item."""
    packer = _Packer(compress, device)
    return Packed(packer.form(item), packer.values, packer.chunks)


def unpack(packed: Packed, decompress: Decompress) -> Any:
    """The item again: dtypes, shapes, batch sizes and devices are those that it had."""
    return _Unpacker(packed, decompress).item(packed.form)


class _Packer:
    def __init__(self, compress: Compress, device: torch.device | None) -> None:
        self.values: list[Any] = []
        self.chunks: list[torch.Tensor] = []
        self._compress = compress
        self._device = device

    def form(self, item: Any) -> Form:
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, (np.ndarray, np.generic)) and item.dtype.kind in PLAIN_KINDS:
            return self._array(item)
        if isinstance(item, bytes):
            self._chunk(item)
            return ["bytes"]
        take = take_of(type(item))
        if take is None:
            return self._value(item)
        kind, batch, about, keys, parts = take(item)
        if kind == "tensordict":
            where, names = item.device, about[1]
            where = None if where is None else str(self._device or where)
            about = (where, None if names is None else list(names))
        # A key that JSON does not have is a value, before those of what is under it.
        forms = [
            (self._key(key) if kind in DICTS else key, self.form(part))
            for key, part in zip(names_of(keys), parts, strict=True)
        ]
        return join(kind, list(batch), about, forms)

    def _value(self, item: Any) -> Form:
        self.values.append(item)
        return ["value"]

    def _key(self, key: Any) -> Any:
        if labels.is_json(key):
            return labels.to_json(key)
        self.values.append(key)
        return {"value": True}

    def _tensor(self, tensor: torch.Tensor) -> Form:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return self._value(tensor)
        tensor = tensor.as_subclass(torch.Tensor).detach()
        self._chunk(tensor)
        where = tensor.device if self._device is None else self._device
        return ["tensor", dtype_name(tensor.dtype), list(tensor.shape), str(where)]

    def _array(self, array: Any) -> Form:
        self._chunk(array)
        kind = "array" if isinstance(array, np.ndarray) else "number"
        return [kind, array.dtype.str, list(array.shape)]

    def _chunk(self, leaf: Any) -> None:
        tensor = tensor_of(leaf)
        if tensor.numel():
            self.chunks.append(compressed(self._compress, tensor))
        else:
            self.chunks.append(cpu.empty(0, dtype=torch.uint8))


class _Unpacker:
    def __init__(self, packed: Packed, decompress: Decompress) -> None:
        self._values = iter(packed.values)
        self._chunks = iter(packed.chunks)
        self._decompress = decompress

    def item(self, form: Form) -> Any:
        match form:
            case ["tensor", str(dtype), [*shape], str(device)]:
                where = torch.device(device)
                return self._tensor(torch_dtype(dtype), torch.Size(shape), where).to(where)
            case ["array" | "number" as kind, str(name), [*shape]]:
                array = self._array(np.dtype(name), tuple(shape))
                return array if kind == "array" else array[()]
            case ["bytes"]:
                return self._tensor(torch.uint8, None).numpy().tobytes()
            case ["value"]:
                return next(self._values)
        try:
            node = split(form)
        except TypeError as error:
            raise FormatError(
                f"a packed item of the form {form!r:.60} is not known to this version"
            ) from error
        if node.kind == "tensordict" and node.about[0] is not None:
            node.about[0] = torch.device(node.about[0])
        found = []
        for at, one in enumerate(node.parts):
            if node.kind in DICTS:
                node.keys[at] = self._key(node.keys[at])
            found.append(self.item(one))
        return made(node, [tuple(found)], [torch.Size(node.batch)], TensorDict)[0]

    def _key(self, key: Any) -> Any:
        return next(self._values) if isinstance(key, dict) else labels.from_json(key)

    def _tensor(
        self, dtype: torch.dtype, shape: torch.Size | None, device: torch.device = cpu.DEVICE
    ) -> torch.Tensor:
        """What a chunk holds, or its bytes. Without a shape: so many as there are."""
        chunk = next(self._chunks)
        if not (chunk if shape is None else shape).numel():
            return cpu.empty(0 if shape is None else shape, dtype=dtype)
        found = expanded(self._decompress, chunk, dtype, shape, device)
        if shape is None:
            return found.cpu().reshape(-1)
        if found.dtype is dtype:
            return found.reshape(shape)
        plain = cpu.empty(shape, dtype=dtype)
        plain.view(-1).view(torch.uint8).copy_(found.reshape(-1))
        return plain

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        if dtype.kind not in PLAIN_KINDS:
            raise FormatError(f"a packed array of {dtype} is not known to this version")
        if (like := torch_dtype_like(dtype)) is not None:
            return self._tensor(like, torch.Size(shape)).cpu().numpy()
        size = math.prod(shape) * dtype.itemsize
        return (
            self._tensor(torch.uint8, torch.Size((size,))).cpu().numpy().view(dtype).reshape(shape)
        )


def compressed(compress: Compress, tensor: torch.Tensor) -> torch.Tensor:
    """What the user's function makes of a tensor: contiguous, uint8, on the CPU."""
    chunk = compress(tensor)
    if not isinstance(chunk, torch.Tensor) or chunk.dtype is not torch.uint8:
        found = chunk.dtype if isinstance(chunk, torch.Tensor) else type(chunk).__name__
        raise TypeError(f"compression_fn gives a uint8 tensor, got {found}")
    return chunk.detach().cpu().contiguous()


def expanded(
    decompress: Decompress,
    chunk: torch.Tensor,
    dtype: torch.dtype,
    shape: torch.Size | None,
    device: torch.device = cpu.DEVICE,
) -> torch.Tensor:
    """What the user's function makes of a chunk: the tensor that was compressed, or its bytes."""
    about = {"type": "tensor", "shape": shape, "dtype": dtype, "device": device}
    found = decompress(chunk, about)
    if not isinstance(found, torch.Tensor):
        raise RuntimeError(
            f"decompression_fn gives the tensor that was compressed, got {type(found).__name__}"
        )
    if shape is None or (found.dtype, found.numel()) in (
        (dtype, shape.numel()),
        (torch.uint8, shape.numel() * dtype.itemsize),
    ):
        return found
    raise RuntimeError(
        f"decompression_fn gave {dtype_name(found.dtype)}{list(found.shape)} for what was "
        f"{dtype_name(dtype)}{list(shape)} when it was compressed"
    )
