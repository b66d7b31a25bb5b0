"""Makes items of any size, and the record storages that the tests put them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import CompressedListStorage, LazyStackStorage

KINDS = (LazyStackStorage, CompressedListStorage)


def item(number: int, length: int | None = None) -> TensorDict:
    """Makes an item that identifies itself in every entry; its default length is its number."""
    length = number % 50 + 1 if length is None else length
    return TensorDict(
        {
            "id": torch.tensor(number),
            "tokens": torch.arange(number, number + length),
            "deep": TensorDict({"image": torch.full((length, 3), number % 251, dtype=torch.uint8)}),
            "text": f"number {number}",
        }
    )


def items(start: int, stop: int) -> list[TensorDict]:
    return [item(number) for number in range(start, stop)]


def is_item(found: Any, number: int | None = None, length: int | None = None) -> bool:
    """True if every entry of an item belongs to the number in its ``id``."""
    number = int(found["id"]) if number is None else number
    expected = item(number, length)
    return (
        bool(
            (found.select("id", "tokens", "deep") == expected.select("id", "tokens", "deep")).all()
        )
        and found["text"] == expected["text"]
    )


def shared(
    kind: type[Any] = LazyStackStorage,
    path: Path | None = None,
    max_size: int = 100,
    max_bytes: int = 2**20,
    **options: Any,
) -> Any:
    """Creates or attaches to a storage of records in a directory."""
    return kind(max_size, scratch_dir=path, shared_init=True, max_bytes=max_bytes, **options)
