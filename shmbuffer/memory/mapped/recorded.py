"""Validates the stored settings of a buffer and its storage, before a write and after a read.

The settings are validated before they are written, so that no argument can make a buffer
unreadable. They are validated again after they are read, because another program or version may
have written them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.mapped.settings import KINDS, Settings, as_json, find_invalid

REDUCTIONS = ("max", "min", "mean", "median", "sum")
"""The supported functions to combine several priorities of an item into one."""

# Maximum batch size. The indices of a larger batch alone would take more than 2 GiB.
_MOST_ITEMS = 2**28
_MOST_DIMS = 64


def to_record(settings: Settings, where: object) -> dict[str, Any]:
    """Converts settings to values for the superblock.

    Raises:
        ValueError: A setting is invalid, so that no process could open the buffer.
    """
    values, extra = asdict(settings), settings.extra
    for found, known, prefix in (
        (values, KINDS, ""),
        (extra, _OF_BUFFERS, ""),
        (extra.get("storage", {}), _OF_STORAGES, "storage."),
    ):
        if (name := find_invalid(found, known)) is not None:
            raise ValueError(
                f"{where}: {prefix}{name} cannot be {found[name]!r}, because no process could open "
                "the buffer again. Pass another value; nothing was changed"
            )
    as_json(values)
    return values


def read_buffer_arguments(settings: Settings, where: str) -> dict[str, Any]:
    """Returns the stored arguments of the buffer's class by name (`buffers.description`).

    Raises:
        CorruptBufferError: An argument is invalid.
    """
    return _require_valid(settings.extra, _OF_BUFFERS, "", where)


def read_storage_settings(settings: Settings, where: str) -> dict[str, Any]:
    """Returns the stored settings of a storage for records. They are empty for other storages.

    Raises:
        CorruptBufferError: A setting is invalid.
    """
    storage = read_buffer_arguments(settings, where).get("storage", {})
    found = _require_valid(storage, _OF_STORAGES, "storage.", where)
    keys = found.get("compress")
    if keys is None:
        return dict(found)
    # JSON has no tuples, so nested keys are stored as lists.
    return {**found, "compress": [tuple(key) if isinstance(key, list) else key for key in keys]}


def _require_valid(
    found: dict[str, Any], known: dict[str, Callable[[Any], bool]], prefix: str, where: str
) -> dict[str, Any]:
    """Returns the settings ``found``. Raises CorruptBufferError if one of them fails its test.

    Args:
        found: The settings by name.
        known: The tests by name.
        prefix: Prefix of the names in the message.
        where: Path of the buffer, for the message.
    """
    if (name := find_invalid(found, known)) is not None:
        raise CorruptBufferError(
            f"{where}: the superblock contains {prefix}{name}={found[name]!r}, which is not a "
            "valid setting; restore the directory from a copy",
            path=where,
            found=found[name],
        )
    return found


def _is_text(value: Any) -> bool:
    """True if a value is a string."""
    return type(value) is str


def _is_bool(value: Any) -> bool:
    """True if a value is True or False."""
    return type(value) is bool


def _is_key(value: Any) -> bool:
    """True if a value is a key of a TensorDict: a string, or a list or tuple of strings."""
    nested = type(value) in (list, tuple) and len(value) > 0
    return _is_text(value) or (nested and all(map(_is_text, value)))


def _is_from(least: int, most: int) -> Callable[[Any], bool]:
    """Returns a test for integers in this range, both ends included."""
    return lambda value: type(value) is int and least <= value <= most


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a test that also accepts None."""
    return lambda value: value is None or test(value)


def _is_exponent(value: Any) -> bool:
    """True if a value is a finite number of at least 0."""
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_sharing_request(value: Any) -> bool:
    """True if a value is the JSON of a `SharingRequest`."""
    return (
        type(value) is dict
        and set(value) == {"keys", "room"}
        and type(value["keys"]) is list
        and all(type(key) is list and _is_key(key) for key in value["keys"])
        and (value["room"] is None or (type(value["room"]) is int and 0 < value["room"] < 2**31))
    )


_OF_BUFFERS: dict[str, Callable[[Any], bool]] = {
    "buffer": _is_text,
    "batch_size": _or_none(_is_from(1, _MOST_ITEMS)),
    "dim_extend": _or_none(_is_from(0, _MOST_DIMS)),
    "weight_key": _or_none(_is_text),
    "priority_key": _or_none(_is_key),
    "reduction": _or_none(lambda value: _is_text(value) and value in REDUCTIONS),
    "max_priority_within_buffer": _or_none(_is_bool),
    "beta": _or_none(_is_exponent),
    "track_generations": _or_none(_is_bool),
    "storage": lambda value: type(value) is dict,
    "share_next": _is_sharing_request,
    "node": _is_text,  # the node of a shard, if the buffer is sharded
}
_OF_STORAGES: dict[str, Callable[[Any], bool]] = {
    "kind": _is_text,
    "stack_dim": _is_from(-_MOST_DIMS, _MOST_DIMS),
    "compress": _or_none(lambda value: type(value) is list and all(map(_is_key, value))),
    "compression_level": _is_from(1, 22),
    "dictionary_bytes": _is_from(0, 2**31),
    "own_functions": _is_bool,
}
