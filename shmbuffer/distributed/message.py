"""Packs a value into one array of bytes, from which its tensors are unpacked without a copy.

    size of the pickle (8) │ the pickle │ the bytes of each tensor and array, cache line aligned

Ray sends one large array faster than many small ones. The receiver gets a read-only view of Ray's
object store. A caller that returns the unpacked tensors to the user copies the whole array before
it unpacks the array. A caller that stores an unpacked tensor elsewhere copies the tensor, because
otherwise the tensor keeps the whole message in memory.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import io
import pickle
from collections import ChainMap
from typing import Any

import numpy as np
import torch

from shmbuffer.distributed.runtime import require_ray
from shmbuffer.memory.format.array_types import Bytes
from shmbuffer.tensors.form import cpu

_LINE = 64
_BYTES = np.dtype("<u8").itemsize


def pack(value: Any) -> Bytes:
    """Packs a value into a message, and returns the message, uint8 ``[bytes]``."""
    try:
        data, parts = _pickled(_ByName, value)
    except Exception:  # the receiver cannot import one of the classes or functions by name
        data, parts = _pickled(_by_value(), value)
    sizes = [part.nbytes for part in parts]
    head = pickle.dumps((sizes, data))
    places, end = _places(len(head), sizes)
    message = np.empty(end, np.uint8)
    memory = message.data
    memory[:_BYTES] = len(head).to_bytes(_BYTES, "little")
    memory[_BYTES : _BYTES + len(head)] = head
    for place, part in zip(places, parts, strict=True):
        memory[place : place + part.nbytes] = part
    return message


def unpack(message: Bytes) -> Any:
    """Returns the value packed into a message. Its tensors and arrays are views of the message."""
    # torch.frombuffer() accepts only writable memory.
    memory: Any = (ctypes.c_uint8 * message.size).from_address(message.ctypes.data)
    memory.source = message  # keeps the message alive
    view = memoryview(memory).cast("B")
    length = int.from_bytes(view[:_BYTES], "little")
    sizes, data = pickle.loads(view[_BYTES : _BYTES + length])
    places, _ = _places(length, sizes)
    parts = [view[place : place + size] for place, size in zip(places, sizes, strict=True)]
    return pickle.loads(data, buffers=parts)


def _pickled(pickler: Any, value: Any) -> tuple[bytes, list[memoryview]]:
    """Pickles a value, and returns the pickle and the out-of-band buffers of its tensors."""
    parts: list[memoryview] = []
    stream = io.BytesIO()
    collect = lambda part: parts.append(part.raw())  # noqa: E731
    pickler(stream, protocol=5, buffer_callback=collect).dump(value)
    return stream.getvalue(), parts


def _reduced(part: torch.Tensor) -> Any:
    """Reduces a tensor for pickling.

    The data of a plain strided CPU tensor are passed out of band. Any other tensor, such as a
    sparse tensor or one that requires a gradient, is reduced by torch.
    """
    more = part.requires_grad or part.is_quantized or part.is_conj() or part.is_neg()
    if more or not part.is_cpu or part.layout is not torch.strided:
        return part.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (pickle.PickleBuffer(flat.numpy().data), part.dtype, tuple(part.shape))


class _ByName(pickle.Pickler):
    """Pickler that stores classes and functions by name, in half the time of `_by_value`."""

    dispatch_table = ChainMap({torch.Tensor: _reduced}, copyreg.dispatch_table)  # type: ignore[arg-type]  # noqa: RUF012


@functools.cache
def _by_value() -> Any:
    """Returns a pickler class that pickles classes and functions by value, as Ray does."""
    base: Any = require_ray().cloudpickle.CloudPickler
    table = ChainMap({torch.Tensor: _reduced}, base.dispatch_table)
    return type("_ByValue", (base,), {"dispatch_table": table})


def _places(head: int, sizes: list[int]) -> tuple[list[int], int]:
    """Returns the offset of each out-of-band buffer in a message, and the size of the message.

    Args:
        head: size of the pickle in bytes.
        sizes: sizes of the buffers in bytes.
    """
    places, at = [], _BYTES + head
    for size in sizes:
        at += -at % _LINE
        places.append(at)
        at += size
    return places, at


def _tensor(raw: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor that is a view of the given bytes of a message."""
    if not raw.nbytes:
        return cpu.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)
