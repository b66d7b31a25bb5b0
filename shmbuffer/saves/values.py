"""Reads and writes JSON and Python values in the files of a save, without pickle.

``docs/format/saves.md`` describes the format: lines of JSON, and a file of chunks, which are the
bytes of tensors and arrays. An object that cannot be represented in this way is rejected unless
pickle is allowed. With pickle, its bytes are stored among the chunks, and loading them runs code
from the file.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from shmbuffer.errors import (
    CorruptBufferError,
    FormatError,
    IncompatibleVersionError,
    ShmBufferError,
)
from shmbuffer.items.form import labels
from shmbuffer.items.form.arrays import PLAIN_KINDS, is_plain_array
from shmbuffer.items.records.containers import names_of
from shmbuffer.memory.mapped.record_batch import RecordBody
from shmbuffer.memory.record_format.grammar import DICTS, join, split
from shmbuffer.saves.safe_files import create_file, open_binary, read_file, write_file
from shmbuffer.saves.value_chunks import Chunks
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_containers import make_containers, take_of
from shmbuffer.tensors.form.tensors import bytes_of, dtype_name, torch_dtype

OURS = "shmbuffer"
"""The key of this package in TorchRL's JSON files."""
FORMAT = 1
"""The version of the format of the value under the key `OURS`."""

_PLAIN = (bool, int, float, str, type(None))  # types that JSON supports
# Types that JSON does not support: the name in a file, and the conversions to JSON and back.
_NAMED_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "size": (torch.Size, list, torch.Size),
    "dtype": (torch.dtype, dtype_name, torch_dtype),
    "device": (torch.device, str, torch.device),
}
# Errors that are raised when damaged values are read. NumPy parses the header of a file as Python
# code, and torch raises RuntimeError for invalid data.
_DAMAGE_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(EOFError, StopIteration, MemoryError, SyntaxError, TokenError, FileNotFoundError),
)


class ValueRefusedError(ValueError):
    """Raised if a value is rejected although the file is not damaged, such as a pickled object."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Converts the errors that damaged values cause to a CorruptBufferError that names the file."""
    try:
        yield
    except ValueRefusedError:
        raise
    except ShmBufferError as error:
        if str(file.parent) in error.message:
            raise
        raise type(error)(f"{file}: {error.message}", **error.parts) from error
    except _DAMAGE_ERRORS as error:
        raise damaged(file, f"cannot be read ({error!r:.200})") from error


def find_ours(content: dict[str, Any], file: Path) -> dict[str, Any] | None:
    """Returns the value of this package's key in a JSON file of TorchRL.

    Returns None if TorchRL itself has written the file.

    Raises:
        IncompatibleVersionError: The save has another format version.
    """
    found: dict[str, Any] | None = content.get(OURS)
    if found is not None and found["format"] != FORMAT:
        raise IncompatibleVersionError(
            f"{file}: was saved in format {found['format']!r} by another version of shmbuffer, but "
            f"this version only reads format {FORMAT}; load the save with the version that wrote it"
        )
    return found


def damaged(file: Path | str, why: str, **parts: Any) -> CorruptBufferError:
    """Returns the error for a damaged file or directory of a save.

    Args:
        file: The path.
        why: The damage, as the rest of a sentence that begins with the path.
        parts: Additional attributes of the error.
    """
    return CorruptBufferError(
        f"{file}: {why}; use another copy of the checkpoint", path=str(file), **parts
    )


# -- JSON ------------------------------------------------------------------------------------------


def read_json(file: Path, kind: type = dict, *, missing: str | None = None) -> Any:
    """Reads a JSON file that contains a value of the type ``kind``.

    ``missing`` is the end of the message if the file does not exist.
    """
    try:
        found = json.loads(read_file(file))
    except FileNotFoundError as error:
        if missing is None:
            raise
        raise FileNotFoundError(f"{file}: no such file, so {missing}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"is not valid JSON ({error})") from error
    if not isinstance(found, kind):
        raise damaged(file, f"must contain a {kind.__name__}, got {found!r:.40}")
    return found


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file. Scalars of NumPy are written as numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, (np.integer, np.floating)):
            return value.item()
        raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")

    write_file(file, json.dumps(content, default=plain))


# -- values ----------------------------------------------------------------------------------------


class Parts:
    """The objects and the chunks of a value, and the structure that combines them.

    Args:
        value: The value.
        cpu_only: If True, tensors must be on the CPU.

    Raises:
        TypeError: ``cpu_only`` is True, and a tensor is on another device.
    """

    def __init__(self, value: Any, *, cpu_only: bool = False) -> None:
        self._cpu_only = cpu_only
        self.objects: list[Any] = []
        """All objects except tensors, arrays and bytes, in the order of ``form``."""
        self.chunks: list[bytes | memoryview] = []
        """The bytes of tensors and arrays, in the order of ``form``."""
        self.form = self._form_of(value)
        """The structure of the value, as JSON."""

    def _form_of(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if is_plain_array(value):
            self.chunks.append(np.asarray(value).tobytes())
            kind = "array" if isinstance(value, np.ndarray) else "number"
            return [kind, value.dtype.str, list(value.shape)]
        if isinstance(value, bytes):
            self.chunks.append(value)
            return ["record" if isinstance(value, RecordBody) else "bytes"]
        take = take_of(type(value))
        if take is None:
            return self._object(value)
        kind, batch, about, keys, parts = take(value)
        # a key that JSON does not support is stored as an object before the objects of its value
        forms = [
            (self._key(key) if kind in DICTS else key, self._form_of(part))
            for key, part in zip(names_of(keys), parts, strict=True)
        ]
        return join(kind, list(batch), about, forms)

    def _object(self, value: Any) -> list[Any]:
        self.objects.append(value)
        return ["value"]

    def _key(self, key: Any) -> Any:
        if labels.is_json(key):
            return labels.to_json(key)
        self.objects.append(key)
        return {"value": True}

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return self._object(tensor)
        if self._cpu_only and tensor.device.type != "cpu":
            raise TypeError(f"tensors must be on the CPU, got a tensor on {tensor.device}")
        self.chunks.append(bytes_of(tensor.as_subclass(torch.Tensor)))
        return ["tensor", dtype_name(tensor.dtype), list(tensor.shape), "cpu"]


class _Builder:
    """Builds a value from its structure, objects and chunks; the inverse of `Parts`."""

    def __init__(self, objects: Iterable[Any], chunks: Iterable[bytearray]) -> None:
        self._objects = iter(objects)
        self._chunks = iter(chunks)

    def value(self, form: Any) -> Any:
        match form:
            case ["tensor", str(name), [*shape], "cpu"]:
                dtype = torch_dtype(name)
                chunk = self._chunk(shape, dtype.itemsize)
                if not chunk:
                    return cpu.empty(shape, dtype=dtype)
                return torch.frombuffer(chunk, dtype=torch.uint8).view(dtype).reshape(shape)
            case ["array" | "number" as kind, str(name), [*shape]]:
                plain = np.dtype(name)
                if plain.kind not in PLAIN_KINDS:
                    raise FormatError(f"an array of {plain} is not supported by this version")
                array: NDArray[Any] = np.ndarray(shape, plain, self._chunk(shape, plain.itemsize))
                return array if kind == "array" else array[()]
            case ["bytes"]:
                return bytes(next(self._chunks))
            case ["record"]:
                return RecordBody(next(self._chunks))
            case ["value"]:
                return next(self._objects)
        try:
            node = split(form)
        except TypeError as error:
            raise FormatError(
                f"a value of the form {form!r:.60} is not supported by this version"
            ) from error
        if node.kind == "tensordict" and node.about[0] is not None:
            node.about[0] = cpu.DEVICE
        found = []
        for at, part in enumerate(node.parts):
            if node.kind in DICTS:
                node.keys[at] = self._key(node.keys[at])
            found.append(self.value(part))
        return make_containers(node, [tuple(found)], [torch.Size(node.batch)], TensorDict)[0]

    def _key(self, key: Any) -> Any:
        return next(self._objects) if isinstance(key, dict) else labels.from_json(key)

    def _chunk(self, shape: list[int], itemsize: int) -> bytearray:
        chunk, expected = next(self._chunks), math.prod(shape) * itemsize
        if len(chunk) != expected:
            raise ValueError(f"a chunk must have {expected} bytes, got {len(chunk)}")
        return chunk


def write_value(folder: Path, name: str, value: Any, what: str) -> None:
    """Writes a value without pickle into the files ``<name>.jsonl`` and ``<name>.data``.

    Raises TypeError if the value contains an object that could only be pickled. The message calls
    the value ``what``.
    """
    write_values(folder, name, [value], allow_pickle=False, what=what)


def read_value(folder: Path, name: str) -> Any:
    """Reads a value that `write_value` wrote.

    Raises CorruptBufferError if the files are missing or damaged.
    """
    with reading(folder / f"{name}.jsonl"):
        (value,) = read_values(folder, name, allow_pickle=False)
    return value


def write_values(
    directory: Path,
    name: str,
    values: Iterable[Any],
    *,
    allow_pickle: bool,
    what: str,
    remedy: str | None = None,
    cpu_only: bool = False,
) -> None:
    """Writes values into the files ``<name>.jsonl`` and ``<name>.data``, one line per value.

    Args:
        directory: The directory of the files.
        name: The name of the files, without the suffix.
        values: The values.
        allow_pickle: If True, objects that have no other representation are pickled.
        what: The name of a value in messages.
        remedy: Instruction for allowing pickle, for the message; None if this is not possible.
        cpu_only: As for `Parts`.
    """
    forms: dict[str, int] = {}
    with (
        create_file(directory / f"{name}.jsonl") as lines,
        create_file(directory / f"{name}.data") as data,
    ):
        checked = Chunks(data)
        lines.write(b'{"format": 1}\n')
        for number, value in enumerate(values):
            parts = Parts(value, cpu_only=cpu_only)
            form = json.dumps(parts.form)
            if form not in forms:
                forms[form] = len(forms)
                lines.write(f'{{"form": {form}}}\n'.encode())
                checked.add(json.loads(form))
            for chunk in parts.chunks:
                checked.write(chunk)
            where = f"{what} {number}"
            objects = [
                one
                if type(one) in _PLAIN
                else _to_json(one) or _pickle(one, checked, where, remedy, allow_pickle)
                for one in parts.objects
            ]
            sizes = [len(chunk) for chunk in parts.chunks]
            checked.add([forms[form], objects, sizes])
            line = [forms[form], objects, sizes, checked.crc]
            lines.write(json.dumps(line).encode() + b"\n")


def read_values(directory: Path, name: str, *, allow_pickle: bool) -> Iterator[Any]:
    """Yields the values that `write_values` wrote. Tensors are on the CPU.

    Raises:
        CorruptBufferError: A file is missing or damaged.
        ValueRefusedError: A value contains a pickled object, and ``allow_pickle`` is False.
    """
    where = directory / f"{name}.jsonl"
    with open_binary(where) as lines, open_binary(directory / f"{name}.data") as data:
        forms: list[Any] = []
        checked = Chunks(data)
        with reading(where):
            if json.loads(next(lines)) != {"format": 1}:
                raise ValueError("the first line does not contain the supported format version")
        while True:
            with reading(where):
                line = next(lines, None)
                if line is None:
                    return
                found = json.loads(line)
                if isinstance(found, dict):
                    forms.append(found["form"])
                    checked.add(found["form"])
                    continue
                number, encoded, sizes, crc = found
                chunks = [checked.take(size) for size in sizes]
                pickles = [_read_pickle(one, checked, allow_pickle, where) for one in encoded]
                checked.add([number, encoded, sizes])
                if crc != checked.crc:
                    raise ValueError(f"value {number} does not match its checksum")
                objects = list(map(_from_json, encoded, pickles))
                value = _Builder(objects, chunks).value(forms[number])
            yield value


def is_scalar(value: Any) -> bool:
    """True if a value is text, a number, a bool, None, or of one of the types in `_NAMED_TYPES`."""
    return type(value) in _PLAIN or _to_json(value) is not None


def _to_json(value: Any) -> dict[str, Any] | None:
    """Returns a value of one of the types in `_NAMED_TYPES` as JSON; None for other types."""
    for name, (kind, convert, _) in _NAMED_TYPES.items():
        if type(value) is kind:
            return {name: convert(value)}
    return None


def _pickle(
    value: Any, data: Chunks, what: str, remedy: str | None, allow_pickle: bool
) -> dict[str, Any]:
    """Pickles an object into the next chunk, and returns a JSON value that refers to the chunk.

    Raises TypeError if pickling is not allowed.
    """
    if not allow_pickle:
        risk = f", or {remedy}, which runs code from the file when it is loaded" if remedy else ""
        raise TypeError(
            f"{what} contains {value!r:.60} of type {type(value).__qualname__}, which could only "
            f"be saved by pickle; leave it out, or convert it to tensors, strings or numbers{risk}"
        )
    content = pickle.dumps(value)
    data.write(content)
    return {"pickled": len(content)}


def _read_pickle(encoded: Any, data: Chunks, allow_pickle: bool, where: Path) -> bytearray | None:
    """Reads the bytes of a pickled object, without unpickling it. Returns None for other objects.

    ``encoded`` is the JSON of the object.
    """
    if not isinstance(encoded, dict) or "pickled" not in encoded:
        return None
    if not allow_pickle:
        raise ValueRefusedError(
            f"{where}: contains pickled objects, and loading them runs code from the file; if you "
            "trust the file, set storage.checkpointer to one that was created with "
            "allow_pickle=True, like the one that saved it"
        )
    return data.take(encoded["pickled"])


def _from_json(encoded: Any, pickled: bytearray | None) -> Any:
    """Returns an object, given its JSON and its pickled bytes; None if it was not pickled."""
    if pickled is not None:
        return pickle.loads(pickled)
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    return _NAMED_TYPES[name][2](content)
