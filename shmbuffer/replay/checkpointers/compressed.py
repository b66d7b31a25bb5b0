"""Compressed items: as they are, and as TorchRL has saved them."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.checkpointers.list import ListStorageCheckpointer
from shmbuffer.replay.checkpointers.memmap import read_folder
from shmbuffer.replay.checkpoints import Loaded, read_json_list
from shmbuffer.replay.form.leaves import torch_dtype

if TYPE_CHECKING:
    from shmbuffer.replay.form.packing import Packed

_METADATA = "metadata.json"
_DATA = "compressed_data"
_ZLIB = 0x78  # the first byte of what TorchRL compresses below Python 3.14


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """Items of a `CompressedListStorage`: compressed bytes are saved and loaded as they are.

    What TorchRL has saved is loaded too: decompressed with the storage's own ``decompression_fn``,
    or with zlib or zstd where it has none, whichever TorchRL has used, and compressed anew. What is
    saved here cannot be loaded there, where the codec depends on the version of Python.

    Args:
        allow_pickle: see `ListStorageCheckpointer`.

    Source: ``torchrl.data.CompressedListStorageCheckpointer``.
    """

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """See `ListStorageCheckpointer.loads`."""
        return self.loads_beside(storage, Path(path), None)

    def loads_beside(
        self, storage: Any, path: Path, written: tuple[int, int | None] | None
    ) -> Loaded:
        """See `StorageCheckpointerBase.loads_beside`."""
        if not (path / _METADATA).exists():
            return super().loads(storage, path)
        items = _items_of_torchrl(storage, path)
        slots = np.array([slot for slot, item in enumerate(items) if item is not None], np.int64)
        if len(items) > storage.max_size:
            raise ValueError(
                f"{path}: has items in {len(items)} places, and the storage has room for "
                f"{storage.max_size}; load it into a larger one. Nothing was changed"
            )
        kept = [storage.keeping.keep(item[0]) for item in items if item is not None]
        cursor, count = (len(items), None) if written is None else written
        cursor %= storage.max_size
        storage.notify_emptied()
        storage.copy_in(
            kept, slots, cursor=cursor, write_count=len(slots) if count is None else count
        )
        if len(slots):
            storage.notify(torch.from_numpy(slots))
        return Loaded(cursor, storage.max_size, 1)

    def _packed(self, storage: Any, kept: Any) -> Packed:
        packed: Packed = storage.packed(kept)
        return packed

    def _unpacked(self, storage: Any, packed: Packed) -> Any:
        return storage.unpacked(packed)


def _items_of_torchrl(storage: Any, path: Path) -> list[tuple[Any] | None]:
    """Each item, decompressed, in a tuple; None for a place without one."""
    try:
        entries = read_json_list(path / _METADATA)
        numbers = read_json_list(path / "data_indices.json")
        return [
            None if number is None else (_item(storage, path / _DATA / str(int(number)), entry),)
            for number, entry in zip(numbers, entries, strict=True)
        ]
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise CorruptBufferError(
            f"{path}: is not what TorchRL saves of a CompressedListStorage ({error!r}); take "
            "another copy of the checkpoint",
            path=str(path),
        ) from error


def _item(storage: Any, path: Path, entry: dict[str, Any]) -> Any:
    folder = read_folder(path)
    if entry["type"] == "tensor":
        return _tensor(storage, folder.tensor(("data",)), entry)
    if entry["type"] != "tensordict":
        return _plain(entry["value"])
    fields = {
        key: _tensor(storage, folder.tensor((key,)), field)
        if field["type"] == "tensor"
        else _plain(field["value"])
        for key, field in entry["fields"].items()
    }
    return TensorDict(fields, batch_size=_plain(entry.get("batch_size", [])))


def _tensor(storage: Any, chunk: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    about = {key: _plain(entry[key]) for key in ("shape", "dtype", "device")}
    compressing = storage.compressing
    if compressing.decompresses_zstd and int(chunk[0]) == _ZLIB:
        content = bytearray(zlib.decompress(chunk.numpy().tobytes()))
        found = torch.frombuffer(content, dtype=about["dtype"])
    else:
        found = compressing.expand(chunk.clone(), about)
    if found.dtype is not about["dtype"]:
        found = found.reshape(-1).view(about["dtype"])
    return found.reshape(about["shape"]).to(about["device"])


def _plain(value: Any) -> Any:
    """A value from TorchRL's JSON."""
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
            return torch.tensor(content)
    return content
