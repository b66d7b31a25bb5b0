"""Describes a buffer from the outside, without a lock or a registry entry."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import asdict
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import numpy as np

from shmbuffer.errors import CorruptBufferError, FormatError
from shmbuffer.memory.clients import partials
from shmbuffer.memory.directory.diagnosis import Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.neighbours import directory_of
from shmbuffer.memory.flow import consumer_status
from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.flow.holders import Holder, describe_holders, holders
from shmbuffer.memory.flow.rate_status import waits
from shmbuffer.memory.format import layout, ledger
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped import extents, weights_file
from shmbuffer.memory.mapped.control import Control, Superblock
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.ring import counters
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.filesystem import UNLIMITED
from shmbuffer.memory.system.identity import ProcessState
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.private_copy import map_file
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.system.residency import Residency, residency, resident_bytes

_MAX_SLOTS = 1 << 14
"""Number of slots that are read at most for a histogram of priorities."""

_RUN = 64
"""Number of consecutive slots that are read together, because they share a page."""


def inspect(
    path: str | PathLike[str], *, priorities: bool = False, live_bytes: bool = True
) -> dict[str, Any]:
    """Returns a description of the buffer in a directory.

    Args:
        path: The directory of the buffer, or of a save.
        priorities: If True, the distribution of priorities is also returned.
        live_bytes: If False, ``live_bytes`` of ``records`` is None, which saves a pass over the
            slots.

    Returns:
        A dict with these keys:

        * ``path``, ``uuid``, ``state``, ``epoch``, ``created``, ``flags``, ``settings``,
          ``counters``, ``owner`` and ``durable_ticket``;
        * ``needs_recovery``: the reason why the next process will recover the buffer, or None;
        * ``schema``: None before the first write;
        * ``clients``: the fields of `Client`, ``mutex`` (True if the client holds the mutex), and
          ``memory_bytes`` of its process, including shared pages (None if not visible);
        * ``bytes``: the size of all files;
        * ``disk_bytes``: the space that the file system has allocated for the files, which is less
          than their size if they are sparse;
        * ``memory_bytes``: the part of all files that is in memory; None if unknown;
        * ``unwritten_bytes``: the part of ``memory_bytes`` that is not yet written to the disk;
        * ``filesystem``: ``in_memory``, and ``free_bytes`` (None without a limit);
        * ``records``: ``max_bytes``, ``used_bytes`` from the oldest record in use to the head,
          ``live_bytes`` of the items with their headers, and ``dictionary_bytes``; None if items
          are rows;
        * ``sharing``: the ``leaves`` that consecutive items share, the number of ``own_rows``, and
          the number of own rows that are ``used``; None if no leaves are shared;
        * ``consumers``: the fields of `ConsumerStatus`;
        * ``weights``: ``version``, ``step``, ``pid`` of the publisher, ``at_s``, ``tensors`` and
          ``bytes`` of the newest weights, or only the ``damage`` of their file; None if no weights
          were published;
        * ``recovery``: the time and the report of the last recovery; None if there was no recovery,
          or an earlier version of shmbuffer performed it and stored no report;
        * ``mutex``: ``tid`` and ``pid`` of the holder of the mutex; None if the mutex is free;
        * ``waits``: ``entry``, ``pid``, ``seconds`` and ``text`` of each client that waits for the
          other side of a limited buffer;
        * ``reservations``: ``entry``, ``pid``, ``reservations``, ``items``, ``nbytes`` and
          ``oldest_s`` of each client that holds reservations;
        * ``partials``: the number of rollouts of dead processes that another process can continue;
          None in the directory of another user, whose locks are not tested;
        * ``priorities``, if requested: the share of items in each range of priorities. The keys are
          the upper bounds of the ranges, which are powers of two.

    If the directory belongs to another user, but this process can read its files (like root), the
    files are copied and not mapped. A client has the state ``unknown`` if it is in another pid
    namespace or boot, where only its lock could prove that it is alive.

    Cost: about a millisecond without ``live_bytes``, for any capacity. The call reads a few pages
    of shared memory and changes nothing.
    """
    with Directory.open(directory_of(path), reading=True) as directory:
        files = Files(directory)
        diagnosis = Diagnosis.read(files, writable=False)
        control, superblock, settings = (
            diagnosis.control,
            diagnosis.superblock,
            diagnosis.settings(),
        )
        schema = diagnosis.schema
        clients = [client.to_json() for client in diagnosis.registry.clients()]
        mutex = _mutex(control)
        held = _holders(files, schema, control)
        consumers = _consumers(files, schema, control)
        spread = {"priorities": _priority_shares(files, schema, control)} if priorities else {}
        return {
            "path": str(directory.path),
            "uuid": str(uuid.UUID(bytes=superblock.uuid)),
            "state": layout.name_of(BufferState, int(control.runtime["state"][0])),
            "needs_recovery": None if diagnosis.is_save() else diagnosis.reason_to_recover(),
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
            "clients": [{**client, **_live_values(client, clients, mutex)} for client in clients],
            **_describe_space(files, schema),
            "records": _records(files, schema, control, live_bytes=live_bytes),
            "sharing": _sharing(files, schema),
            "weights": _weights(files),
            "recovery": _recovery(control, superblock),
            "mutex": mutex,
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
                held=describe_holders(held),
                consumers=consumers,
            ),
            "reservations": [asdict(holder) for holder in held],
            "consumers": [consumer.to_json() for consumer in consumers],
            "partials": None if directory.foreign else len(partials.orphans(directory)),
            **spread,
        }


def _holders(files: Files, schema: Schema | None, control: Control) -> list[Holder]:
    """Returns the clients that hold reservations. The ledger is read and not mapped."""
    if schema is None or not files.directory.exists(layout.LEDGER):
        return []
    where = files.path / layout.LEDGER
    with files.directory.open_file(layout.LEDGER, writable=False) as file, explain_errors(where):
        table = ledger.read_reservations(file.fd)
    return holders(table, control.entries, schema.width)


def _consumers(files: Files, schema: Schema | None, control: Control) -> list[ConsumerStatus]:
    """Returns the status of every consumer."""
    if schema is None or not files.directory.exists(layout.LEDGER):
        return []
    where = files.path / layout.LEDGER
    with files.directory.open_file(layout.LEDGER, writable=False) as file, explain_errors(where):
        nbytes = min(os.fstat(file.fd).st_size, schema.ledger_bytes)
        content = map_file(files.directory, layout.LEDGER, file, nbytes, writable=False)
    head = int(control.runtime["head"][0])
    return consumer_status.parse_consumers(content, schema.capacity, head, control.entries)


def _describe(schema: Schema | None) -> dict[str, Any] | None:
    """Returns the capacity, lanes, leaves and structure of a schema as JSON values."""
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


def _sharing(files: Files, schema: Schema | None) -> dict[str, Any] | None:
    """Describes the leaves that consecutive items share; None if there are none.

    In a busy buffer, the counts are not from one point in time.
    """
    if schema is None or not schema.sharing:
        return None
    live = SlotsFile(files.map_slots(schema, writable=False), schema)
    return {
        "leaves": [".".join(path) for path in schema.sharing.paths],
        "own_rows": schema.sharing.own_rows,
        "used": live.count_own_rows(),
    }


def _describe_space(files: Files, schema: Schema | None) -> dict[str, Any]:
    """Returns the size of the files on disk and in memory, and the free space."""
    names = [layout.CONTROL]
    if schema is not None:
        names += [layout.SCHEMA, *schema.mapped_files]
    names += (name for name, _ in files.extra_files())
    nbytes = 0
    on_disk, in_memory = 0, Residency(0, 0)
    known = True
    for name in names:
        stat = files.directory.stat(name)
        nbytes += stat.st_size if name != layout.SCHEMA else 0
        on_disk += stat.st_blocks * 512
        with files.directory.open_file(name, writable=False) as file:
            found = residency(file.fd, stat.st_size)
        known, in_memory = known and found is not None, in_memory + (found or Residency(0, 0))
    free = files.directory.free_bytes()
    return {
        "bytes": nbytes,
        "disk_bytes": on_disk,
        "memory_bytes": in_memory.cached if known else None,
        "unwritten_bytes": in_memory.unwritten if known and not files.in_memory else None,
        "filesystem": {
            "in_memory": files.in_memory,
            "free_bytes": None if free == UNLIMITED else free,
        },
    }


def _weights(files: Files) -> dict[str, Any] | None:
    """Describes the newest weights without reading the tensors; None if there are no weights."""
    try:
        found = weights_file.open_weights(files.directory, writable=False)
    except (FormatError, CorruptBufferError) as error:
        return {"damage": str(error)}
    if found is None or not found.newest:
        return None
    return {**found.stamp(), "tensors": len(found.form.leaves), "bytes": found.form.nbytes}


def _recovery(control: Control, superblock: Superblock) -> dict[str, Any] | None:
    """Returns the report of the last recovery; None if that recovery stored no report."""
    found = control.last_recovery()
    if found is None or found["epoch"] != superblock.epoch or not superblock.epoch:
        return None
    return {
        **{name: value for name, value in found.items() if name not in ("at_ns", "duration_ns")},
        "at_s": found["at_ns"] / 1e9,
        "duration_ms": found["duration_ns"] / 1e6,
    }


def _mutex(control: Control) -> dict[str, int] | None:
    """Returns the thread ID and the pid of the thread that holds the mutex; None if it is free."""
    tid = control.mutex_owner()
    return {"tid": tid, "pid": identity.process_of(tid)} if tid else None


_OTHER_NAMESPACE = (ProcessState.OTHER_CONTAINER, ProcessState.UNKNOWN)
"""States of processes whose pid has no meaning in the pid namespace of this process."""


def _live_values(
    client: dict[str, Any], clients: list[dict[str, Any]], mutex: dict[str, int] | None
) -> dict[str, Any]:
    """Returns the values of a client that the registry does not contain.

    These are ``mutex``, which is True if the client holds the mutex, and ``memory_bytes``. If a
    process has several clients, the one that is changing the ring counts as the holder of the
    mutex.
    """
    is_visible = client["state"] not in _OTHER_NAMESPACE
    holders = [
        other
        for other in clients
        if mutex is not None
        and other["pid"] == mutex["pid"]
        and other["state"] not in _OTHER_NAMESPACE
    ]
    holders.sort(key=lambda holder: holder["phase"] in ("IDLE", "PAYLOAD"))
    return {
        "mutex": bool(holders) and holders[0] is client,
        "memory_bytes": resident_bytes(client["pid"]) if client["alive"] and is_visible else None,
    }


def _records(
    files: Files, schema: Schema | None, control: Control, *, live_bytes: bool
) -> dict[str, int | None] | None:
    """Describes the use of the byte ring in bytes; None if items are rows.

    In a busy buffer, the numbers are not from one point in time.
    """
    if schema is None or not schema.record_bytes:
        return None
    runtime = control.runtime[0]
    tail, head = int(runtime["byte_tail"]), int(runtime["byte_head"])
    live = None
    if live_bytes:
        live = extents.live_bytes(SlotsFile(files.map_slots(schema, writable=False), schema))
    return {
        "max_bytes": schema.record_bytes,
        "used_bytes": head - tail,
        "live_bytes": live,
        "dictionary_bytes": len(files.dictionary() or b""),
    }


def _priority_shares(
    files: Files, schema: Schema | None, control: Control
) -> dict[str, float] | None:
    """Returns the share of items in each range of priorities; None without priorities.

    The keys are the upper bounds of the ranges, which are powers of two, in ascending order.
    """
    if schema is None or not control.runtime["prioritized"][0]:
        return None
    chosen = _choose_slots(min(int(control.runtime["head"][0]), schema.capacity))
    parts = _byte_ranges(chosen, schema)
    live = SlotsFile(files.map_slots(schema, writable=False, parts=parts), schema)
    committed = chosen[live.holds(chosen)]
    found = live.raw.reshape(schema.capacity, schema.width)[committed].ravel()
    found = found[found >= 0]  # not NaN, which marks an item that is being written
    mantissas, exponents = np.frexp(found)
    exponents = exponents - (mantissas == 0.5)  # a power of two belongs to the range below it
    exponents = np.where(found == 0, -1075, exponents)  # below the smallest number
    edges, counts = np.unique(exponents, return_counts=True)
    return {
        f"{0.0 if edge == -1075 else 2.0**edge:.4g}": float(count / len(found))
        for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)
    }


def _choose_slots(reached: int) -> Ints:
    """Returns the indices of at most `_MAX_SLOTS` of the first ``reached`` slots.

    The slots are in runs that are spread evenly over the ring. Each run costs a page fault, because
    each inspection maps the file again.
    """
    runs = _MAX_SLOTS // _RUN
    if reached <= _MAX_SLOTS:
        return np.arange(reached)
    starts = np.linspace(0, reached // _RUN - 1, runs).astype(np.int64) * _RUN
    return (starts[:, None] + np.arange(_RUN)).ravel()


def _byte_ranges(chosen: Ints, schema: Schema) -> list[tuple[int, int]]:
    """Returns the byte ranges of the slots file that contain the words and priorities of slots."""
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(chosen, breaks) if len(run)]
    return [
        (schema.sections[name] + first * nbytes, schema.sections[name] + end * nbytes)
        for name, nbytes in (("words", 8), ("raw", 8 * schema.width))
        for first, end in runs
    ]


def exists(path: str | PathLike[str]) -> bool:
    """True if the directory contains a buffer. The buffer is not opened."""
    return os.path.exists(os.path.join(path, layout.CONTROL))
