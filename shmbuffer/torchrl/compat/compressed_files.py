"""Reads items from a ``CompressedListStorage`` that TorchRL has saved.

Such files cannot be written, because TorchRL's codec depends on the version of Python.

metadata.json           type of each item, and shape, dtype and device of its tensors
data_indices.json       number of the item at each index, or null
compressed_data/<n>/    compressed bytes of item n, in tensordict's files
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.saves.safe_files import exists
from shmbuffer.saves.values import damaged, read_json
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import torch_dtype
from shmbuffer.tensors.records.tensor_memory import Decompress
from shmbuffer.torchrl.compat.folders import TensorDictFolder, read_folder

_METADATA = "metadata.json"
_ZLIB = 0x78  # first byte of data compressed by TorchRL with Python versions before 3.14


def is_of_torchrl(path: Path) -> bool:
    """True if the directory contains a ``CompressedListStorage`` saved by TorchRL."""
    return exists(path / _METADATA)


def read_items(path: Path, decompress: Decompress, *, reads_zlib: bool) -> list[tuple[Any] | None]:
    """Returns a list with a tuple of the decompressed item, or None, for each index.

    If ``reads_zlib`` is set, chunks that zlib compressed are decompressed with zlib instead of
    ``decompress``.
    """
    if reads_zlib:
        decompress = partial(_by_zlib_or, decompress)
    try:
        entries = read_json(path / _METADATA, list)
        numbers = read_json(path / "data_indices.json", list)
        where = path / "compressed_data"
        return [
            None if number is None else (_item(where / str(int(number)), entry, decompress),)
            for number, entry in zip(numbers, entries, strict=True)
        ]
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        why = f"is not a CompressedListStorage saved by TorchRL ({error!r})"
        raise damaged(path, why) from error


def _item(path: Path, entry: dict[str, Any], decompress: Decompress) -> Any:
    folder = read_folder(path)
    if entry["type"] != "tensordict":
        return _value(folder, "data", entry, decompress)
    fields = {key: _value(folder, key, field, decompress) for key, field in entry["fields"].items()}
    return TensorDict(fields, batch_size=_plain(entry.get("batch_size", [])))


def _value(
    folder: TensorDictFolder, key: str, entry: dict[str, Any], decompress: Decompress
) -> Any:
    if entry["type"] != "tensor":
        return _plain(entry["value"])
    chunk = folder.tensor((key,))
    about = {key: _plain(entry[key]) for key in ("shape", "dtype", "device")}
    found = decompress(chunk.clone(), about)
    if found.dtype is not about["dtype"]:
        found = found.reshape(-1).view(about["dtype"])
    return found.reshape(about["shape"]).to(about["device"])


def _by_zlib_or(decompress: Decompress, chunk: torch.Tensor, about: dict[str, Any]) -> Any:
    if int(chunk[0]) != _ZLIB:
        return decompress(chunk, about)
    content = bytearray(zlib.decompress(chunk.numpy().tobytes()))
    return torch.frombuffer(content, dtype=about["dtype"])


def _plain(value: Any) -> Any:
    if not isinstance(value, dict) or "__type__" not in value:
        return value
    content = value["value"]
    match value["__type__"]:
        case "torch.Size":
            return torch.Size(content)
        case "torch.dtype":
            return torch_dtype(str(content).removeprefix("torch."))
        case "torch.device":
            return torch.device(str(content))
        case "torch.Tensor":
            return cpu.tensor(content)
    return content
