"""What is in there? A look at a living or a dead directory; nothing is locked or joined."""

from __future__ import annotations

import os
import time
import uuid
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import numpy as np

from shmbuffer.errors import BufferNotFoundError
from shmbuffer.memory import counters, identity, layout, records, slots
from shmbuffer.memory.control import Control, Superblock
from shmbuffer.memory.files import Files
from shmbuffer.memory.layout import BufferState, Flag
from shmbuffer.memory.recovery import reason_to_recover
from shmbuffer.memory.region import Directory
from shmbuffer.memory.registry import Registry
from shmbuffer.memory.schema import Schema
from shmbuffer.memory.settings import Settings
from shmbuffer.memory.standing import waits

#: Of a histogram of priorities: slots that are looked at, from all over the ring.
_LOOKED_SLOTS = 1 << 16


def inspect(path: str | PathLike[str], *, priorities: bool = False) -> dict[str, Any]:
    """Everything that the directory says of itself, as plain values.

    Args:
        path: the directory.
        priorities: also how they are spread, under ``priorities``: for each power of two the share
            of items whose raw priority is up to it, and above half of it. Of a large buffer some
            65,536 slots from all over are looked at. None without a priority tree.

    Returns:
        Keys ``path``, ``uuid``, ``state``, ``needs_recovery`` (None, or the reason), ``epoch``,
        ``created``, ``flags``, ``settings``, ``schema`` (None before the first write),
        ``counters``, ``clients``, ``bytes`` (of all files), ``disk_bytes`` (that the file system
        has taken for them; fewer where files are sparse), ``records`` (None where items are rows;
        ``max_bytes``, ``used_bytes`` from the oldest record in use to the head, ``live_bytes`` of
        the items with their headers, ``dictionary_bytes``), ``owner``, ``durable_ticket``,
        ``waits`` (who waits for the other side of a limited buffer: ``entry``, ``pid``,
        ``seconds``, ``text``).

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
        settings = Settings.recorded(superblock.settings, directory.path)
        registry = Registry(control, directory)
        schema = _schema(files, superblock)
        spread = {"priorities": _spread(files, schema, control)} if priorities else {}
        return {
            "path": str(directory.path),
            "uuid": str(uuid.UUID(bytes=superblock.uuid)),
            "state": layout.name_of(BufferState, int(control.runtime["state"][0])),
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
                elements=schema.elements if schema else settings.capacity,
            ),
            "clients": [client.to_json() for client in registry.clients()],
            "bytes": _bytes(files, schema),
            "disk_bytes": _disk_bytes(files, schema),
            "records": _records(files, schema, control),
            "owner": {
                "pid": superblock.owner_pid,
                "state": identity.process_state(superblock.owner_pid),
            },
            "durable_ticket": superblock.durable_ticket,
            "waits": waits(
                control.runtime[0],
                control.entries,
                width=schema.width if schema else 1,
                capacity=schema.capacity if schema else settings.capacity,
                now_ns=time.monotonic_ns(),
            ),
            **spread,
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
    return layout.CONTROL_BYTES + schema.sections["bytes"] + sum(schema.map_bytes)


def _disk_bytes(files: Files, schema: Schema | None) -> int:
    names = [layout.CONTROL]
    if schema is not None:
        names += [layout.SLOTS, layout.SCHEMA]
        names += [leaf.file for leaf in schema.leaves if leaf.nbytes]
        names += [layout.RECORDS] if schema.record_bytes else []
    return sum(files.directory.stat(name).st_blocks * 512 for name in names)


def _records(files: Files, schema: Schema | None, control: Control) -> dict[str, int] | None:
    """Of a busy buffer the numbers may be of slightly different moments."""
    if schema is None or not schema.record_bytes:
        return None
    runtime = control.runtime[0]
    tail, head = int(runtime["byte_tail"]), int(runtime["byte_head"])
    slots_map = files.map_slots(schema, writable=False)
    data = np.frombuffer(slots_map, np.uint8)
    words = data[: 8 * schema.capacity].view(np.uint64)
    return {
        "max_bytes": schema.record_bytes,
        "used_bytes": head - tail,
        "live_bytes": records.live_bytes(words, records.extents_of(data, schema)),
        "dictionary_bytes": len(files.dictionary() or b""),
    }


def _spread(files: Files, schema: Schema | None, control: Control) -> dict[str, float] | None:
    """Shares of items by the power of two that their priority is below, smallest first."""
    if schema is None or not control.runtime["prioritized"][0]:
        return None
    data = np.frombuffer(files.map_slots(schema, writable=False), np.uint8)
    step = max(1, schema.capacity // _LOOKED_SLOTS)
    held = slots.committed(data[: 8 * schema.capacity].view(np.uint64)[::step])
    at = schema.sections["raw"]
    raw = data[at : at + 8 * schema.elements].view(np.float64)
    found = raw.reshape(schema.capacity, schema.width)[::step][held].ravel()
    found = found[found >= 0]  # NaN: somebody is just writing it
    mantissas, exponents = np.frexp(found)
    exponents = exponents - (mantissas == 0.5)  # a power of two belongs to what is up to it
    exponents = np.where(found == 0, -1075, exponents)  # below the smallest there is
    edges, counts = np.unique(exponents, return_counts=True)
    return {
        f"{0.0 if edge == -1075 else 2.0**edge:.4g}": float(count / len(found))
        for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)
    }


def exists(path: str | PathLike[str]) -> bool:
    """Whether there is a buffer, without opening it."""
    return os.path.exists(os.path.join(path, layout.CONTROL))
