"""What is in there? A look at a living or a dead directory; nothing is locked or joined."""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime
from os import PathLike
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError
from shmbuffer.memory import counters, identity, layout
from shmbuffer.memory.control import Superblock
from shmbuffer.memory.files import Files
from shmbuffer.memory.layout import BufferState, Flag
from shmbuffer.memory.recovery import reason_to_recover
from shmbuffer.memory.region import Directory
from shmbuffer.memory.registry import Registry
from shmbuffer.memory.schema import Schema


def inspect(path: str | PathLike[str]) -> dict[str, Any]:
    """Everything that the directory says of itself, as plain values.

    Returns:
        Keys ``path``, ``uuid``, ``state``, ``needs_recovery`` (None, or the reason), ``epoch``,
        ``created``, ``flags``, ``settings``, ``schema`` (None before the first write),
        ``counters``, ``clients``, ``bytes`` (of all files), ``owner``, ``durable_ticket``.

    Raises:
        BufferNotFoundError, FormatError, CorruptBufferError, UnsafePathError: as they say.
    """
    with Directory.open(path) as directory:
        files = Files(directory)
        if not files.has_control():
            raise BufferNotFoundError(
                f"{directory.path}: there is no buffer here; check the path",
                path=str(directory.path),
            )
        control = files.open_control(writable=False)
        superblock = control.superblock()
        registry = Registry(control, directory)
        schema = _schema(files, superblock)
        return {
            "path": str(directory.path),
            "uuid": str(uuid.UUID(bytes=superblock.uuid)),
            "state": BufferState(int(control.runtime["state"][0])).name,
            "needs_recovery": reason_to_recover(files, superblock, registry),
            "epoch": superblock.epoch,
            "created": datetime.fromtimestamp(superblock.created_ns / 1e9, UTC).isoformat(
                timespec="seconds"
            ),
            "flags": [flag.name for flag in Flag if flag in superblock.flags],
            "settings": superblock.settings,
            "schema": _describe(schema),
            "counters": counters.totals(
                control.runtime[0],
                control.entries,
                width=schema.width if schema else 1,
                elements=schema.elements if schema else int(superblock.settings["capacity"]),
            ),
            "clients": [client.to_json() for client in registry.clients()],
            "bytes": _bytes(files, schema),
            "owner": {
                "pid": superblock.owner_pid,
                "state": identity.process_state(superblock.owner_pid),
            },
            "durable_ticket": superblock.durable_ticket,
        }


def _schema(files: Files, superblock: Superblock) -> Schema | None:
    if superblock.schema_sha256 == bytes(32):
        return None
    where = f"{files.path}/{layout.SCHEMA}"
    return Schema.from_json(files.directory.read(layout.SCHEMA, limit=layout.SCHEMA_LIMIT), where)


def _describe(schema: Schema | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {
        "capacity": schema.capacity,
        "lanes": list(schema.lanes),
        "leaves": {
            leaf.name: {"dtype": leaf.dtype, "shape": list(leaf.shape), "bytes": nbytes}
            for leaf, nbytes in zip(schema.leaves, schema.leaf_bytes, strict=True)
        },
        "structure": schema.structure,
    }


def _bytes(files: Files, schema: Schema | None) -> int:
    if schema is None:
        return layout.CONTROL_BYTES
    slots = _core.sections(schema.capacity, schema.width)["bytes"]
    return layout.CONTROL_BYTES + int(slots) + sum(schema.leaf_bytes)


def exists(path: str | PathLike[str]) -> bool:
    """Whether there is a buffer, without opening it."""
    return os.path.exists(os.path.join(path, layout.CONTROL))
