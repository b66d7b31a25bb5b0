"""What a save has in files of our own: JSON, and Python values, without pickle.

    <name>.jsonl   {"format": 1}                                first line
                   {"form": <form>}                             the next form, numbered from 0
                   [<form's number>, [<value>], [<nbytes>]]     one value: see `form.packing`
    <name>.data    the chunks, one after the other, each from a multiple of 8

What a value is made of (tensors with dtype and shape, containers of any depth) is its form, which
values share; text, numbers, None and a few of torch's own words are written as JSON. Any other
object is refused, unless pickle is allowed: then its bytes are among the chunks, and loading them
runs whatever code the file says.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.errors import CorruptBufferError, ShmBufferError
from shmbuffer.saves.safe_files import create_file, exists, open_binary, read_file, write_file
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.packing import Packed, pack, unpack
from shmbuffer.tensors.form.tensors import contiguous, dtype_name, torch_dtype

OURS = "shmbuffer"
"""Our key in TorchRL's JSON files."""

_STATE = "shmbuffer.state"
_ALIGN = 8
_PLAIN = (bool, int, float, str, type(None))  # JSON has them
# Values that JSON has no words for: what they are called in a file, and there and back.
_WORDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "size": (torch.Size, list, torch.Size),
    "dtype": (torch.dtype, dtype_name, torch_dtype),
    "device": (torch.device, str, torch.device),
}
# What values that make no sense lead to, where they are read. Numpy parses the head of a file as
# Python, and torch says in a RuntimeError what it cannot make of them.
_DAMAGES = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(EOFError, StopIteration, MemoryError, SyntaxError, TokenError, FileNotFoundError),
)


class ValueRefusedError(ValueError):
    """The files are whole, and a value is not given back for another reason."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Have values that make no sense be an error that names the file that they are read from."""
    try:
        yield
    except ValueRefusedError:
        raise
    except ShmBufferError as error:
        if str(file.parent) in error.message:
            raise
        raise type(error)(f"{file}: {error.message}", **error.parts) from error
    except _DAMAGES as error:
        raise damaged(file, f"cannot be read ({error!r:.200})") from error


def read_array(file: Path) -> NDArray[Any]:
    """The array in a ``.npy`` file. `fromfile` would turn an interrupt into a TypeError."""
    found: NDArray[Any] = np.load(io.BytesIO(read_file(file)), allow_pickle=False)
    return found


def write_array(file: Path, array: NDArray[Any]) -> None:
    """Writes a ``.npy`` file."""
    with create_file(file) as target:
        np.lib.format.write_array(target, array, allow_pickle=False)


def damaged(file: Path | str, why: str, **parts: Any) -> CorruptBufferError:
    """The error for a file of a save, or a directory of it, that is not what it should be."""
    return CorruptBufferError(
        f"{file}: {why}; take another copy of the checkpoint", path=str(file), **parts
    )


# -- JSON ------------------------------------------------------------------------------------------


def read_json(file: Path, kind: type = dict, *, missing: str | None = None) -> Any:
    """A JSON file."""
    try:
        found = json.loads(read_file(file))
    except FileNotFoundError as error:
        if missing is None:
            raise
        raise FileNotFoundError(f"{file}: not there, so {missing}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"is not JSON ({error})") from error
    if not isinstance(found, kind):
        raise damaged(file, f"holds {found!r:.40}, not a {kind.__name__}")
    return found


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; numpy's numbers are numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, (np.integer, np.floating)):
            return value.item()
        raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")

    write_file(file, json.dumps(content, default=plain))


# -- values ----------------------------------------------------------------------------------------


def write_state(directory: Path, state: dict[str, Any], what: str) -> None:
    """Write the state of a part, for which TorchRL has no files; ``what`` it is, for messages."""
    write_values(directory, _STATE, [state], allow_pickle=False, what=what)


def read_state(directory: Path) -> dict[str, Any] | None:
    """What `write_state` wrote; None if it did not."""
    if not exists(directory / f"{_STATE}.jsonl"):
        return None
    with reading(directory / f"{_STATE}.jsonl"):
        (state,) = read_values(directory, _STATE, allow_pickle=False)
        return dict(state)


def pack_plainly(value: Any) -> Packed:
    """A value as its form, what JSON can hold of it, and the bytes of its tensors."""
    return pack(value, lambda tensor: contiguous(tensor).reshape(-1).view(torch.uint8), cpu.DEVICE)


def unpack_plainly(packed: Packed) -> Any:
    """The value again; its tensors are on the CPU."""
    return unpack(packed, lambda chunk, _: chunk)


def write_values(
    directory: Path,
    name: str,
    values: Iterable[Any],
    *,
    allow_pickle: bool,
    what: str,
    remedy: str | None = None,
    packing: Callable[[Any], Packed] = pack_plainly,
) -> None:
    """Write values, one after the other."""
    forms: dict[str, int] = {}
    with (
        create_file(directory / f"{name}.jsonl") as lines,
        create_file(directory / f"{name}.data") as data,
    ):
        lines.write(b'{"format": 1}\n')
        for number, packed in enumerate(map(packing, values)):
            form = json.dumps(packed.form)
            if form not in forms:
                forms[form] = len(forms)
                lines.write(f'{{"form": {form}}}\n'.encode())
            for chunk in packed.chunks:
                _write(data, chunk.numpy().data)
            words = [
                value
                if type(value) in _PLAIN
                else _in_words(value)
                or _pickled(value, data, f"{what} {number}", remedy, allow_pickle)
                for value in packed.values
            ]
            sizes = [chunk.numel() for chunk in packed.chunks]
            lines.write(json.dumps([forms[form], words, sizes]).encode() + b"\n")


def read_values(
    directory: Path,
    name: str,
    *,
    allow_pickle: bool,
    unpacking: Callable[[Packed], Any] = unpack_plainly,
) -> Iterator[Any]:
    """The values that `write_values` wrote; tensors are on the CPU."""
    where = directory / f"{name}.jsonl"
    with open_binary(where) as lines, open_binary(directory / f"{name}.data") as data:
        forms: list[Any] = []
        with reading(where):
            if json.loads(next(lines)) != {"format": 1}:
                raise ValueError("its first line names another format")
        while True:
            with reading(where):
                line = next(lines, None)
                if line is None:
                    return
                found = json.loads(line)
                if isinstance(found, dict):
                    forms.append(found["form"])
                    continue
                number, words, sizes = found
                chunks = [_chunk(data, size) for size in sizes]
                given = [_value(word, data, allow_pickle, where) for word in words]
                value = unpacking(Packed(forms[number], given, chunks))
            yield value


def _write(data: BinaryIO, content: Any) -> None:
    data.write(content)
    data.write(bytes(-data.tell() % _ALIGN))


def _chunk(data: BinaryIO, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return cpu.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_take(data, nbytes), dtype=torch.uint8)


def _take(data: BinaryIO, nbytes: int) -> bytearray:
    """The next bytes; not more than there are is allocated for what a file says."""
    there = os.fstat(data.fileno()).st_size - data.tell()
    if not 0 <= nbytes <= there:
        raise ValueError(f"{nbytes} bytes are to be read, {there} are left")
    content = bytearray(data.read(nbytes))
    data.seek(-data.tell() % _ALIGN, os.SEEK_CUR)
    return content


def is_word(value: Any) -> bool:
    """Whether a value is text, a number, None, or has a word in JSON."""
    return type(value) in _PLAIN or _in_words(value) is not None


def _in_words(value: Any) -> dict[str, Any] | None:
    """A value that JSON does not have, in words; None if there are none for it."""
    return next(
        ({word: to(value)} for word, (kind, to, _) in _WORDS.items() if type(value) is kind), None
    )


def _pickled(
    value: Any, data: BinaryIO, what: str, remedy: str | None, allow_pickle: bool
) -> dict[str, Any]:
    if not allow_pickle:
        risk = f", or {remedy}, which runs code from the file when it is loaded" if remedy else ""
        raise TypeError(
            f"{what} holds {value!r:.60} of type {type(value).__qualname__}, which can only be "
            f"saved by pickle; leave it out, or turn it into tensors, text or numbers{risk}"
        )
    content = pickle.dumps(value)
    _write(data, content)
    return {"pickled": len(content)}


def _value(value: Any, data: BinaryIO, allow_pickle: bool, where: Path) -> Any:
    if not isinstance(value, dict):
        return value
    ((word, content),) = value.items()
    if word != "pickled":
        return _WORDS[word][2](content)
    if not allow_pickle:
        raise ValueRefusedError(
            f"{where}: holds pickled objects, and loading them runs code from the file; if you "
            "trust it, set storage.checkpointer to one made with allow_pickle=True, as the one "
            "that saved it was"
        )
    return pickle.loads(_take(data, content))
