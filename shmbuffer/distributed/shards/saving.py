"""Saves of a buffer of several shards: each is saved by its keeper, then the list of them.

    <path>/shards-<random>/<node>/   the save of a shard; see `replay.buffers.saving`
    <path>/shards.json               which folder is the save, and its nodes: replaced at the end

An incomplete save leaves the previous one as it was; the next save removes its files.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.distributed.host import opened
from shmbuffer.distributed.runtime import require_ray
from shmbuffer.distributed.shards.limited import Gate
from shmbuffer.distributed.shards.member import Member
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard_pieces import ring_in
from shmbuffer.replay.compat.buffers import METADATA
from shmbuffer.replay.values import read_json, reading, write_json

LIST = "shards.json"
_FOLDER = "shards-"
_RENEW_S = 2.0  # between two messages to the gate
_CHUNK = 4096  # items that are moved at once


def save_shards(
    members: Members, path: Any, *, consistent: bool = False, without: Collection[str] = ()
) -> None:
    """See `ShardedClient.dumps`."""
    known = {*(member.node for member in members), *members.missing_nodes()}
    if strange := sorted(set(without) - known):
        raise ValueError(
            f"without={strange}: shards are on {', '.join(sorted(known))}; nothing was saved"
        )
    members.require_all("saved", without, "; without=[node, ...] leaves out nodes that are gone")
    target = Path(path).absolute()
    target.mkdir(parents=True, exist_ok=True)
    written = [one for one in members if one.node not in without and one.totals.length]
    if not written:
        raise RuntimeError("nothing was written to any shard yet, so there is nothing to save")
    folder = target / f"{_FOLDER}{secrets.token_hex(4)}"
    if consistent:
        with Gate(members) as gate:
            _save_at_once(written, folder, gate)
    else:
        for member in written:
            member.whole("dumps", folder / member.node)
    listed = target / f"{LIST}.{os.getpid()}"
    nodes = sorted(member.node for member in written)
    write_json(listed, {"folder": folder.name, "nodes": nodes})
    listed.replace(target / LIST)
    for other in target.glob(f"{_FOLDER}*"):
        if other != folder:
            shutil.rmtree(other)


def _save_at_once(written: list[Member], folder: Path, gate: Gate) -> None:
    """Has all keepers save their shards at the same time."""
    ray = require_ray()
    waiting = {
        member.keeper.answer.remote(
            ray.cloudpickle.dumps(("call", ("dumps", (folder / member.node,), {})))
        ): member
        for member in written
    }
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_RENEW_S)
        gate.keep()
        for ref in ready:
            member = waiting.pop(ref)
            try:
                answer = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"the shard of node {member.node} does not answer ({type(error).__name__}); "
                    "this save is not kept, an earlier one is"
                ) from error
            opened(answer)


def saves_of_nodes(members: Members, path: Any) -> dict[str, Path]:
    """The save of each node, before anything is changed."""
    source = Path(path).absolute()
    if not (source / LIST).exists():
        raise FileNotFoundError(f"{source / LIST}: not there, so no sharded buffer was saved there")
    with reading(source / LIST):
        found = read_json(source / LIST)
        source, nodes = source / str(found["folder"]), list[str](found["nodes"])
    members.require_all("loaded")
    if away := [node for node in nodes if not (source / node / METADATA).is_file()]:
        raise FileNotFoundError(
            f"{source}: this node sees no save of the shards of {', '.join(away)}; load from a "
            "directory that all nodes see. Nothing was changed"
        )
    return {node: source / node for node in nodes}


def load_shards(members: Members, saves: dict[str, Path], parts: Any) -> None:
    """See `ShardedClient.loads`."""
    ours = {member.node: member for member in members}
    if set(saves) == set(ours):
        for node, path in saves.items():
            ours[node].whole("loads", path)
        return
    for path in saves.values():  # what cannot be loaded is refused before anything is changed
        next(_items_of(parts, path), None)
    for member in members:
        member.whole("empty")
    receivers = itertools.cycle(sorted(members, key=lambda one: one.node))
    for path in saves.values():
        for data, priorities in _items_of(parts, path):
            member = next(receivers)
            index = member.whole("extend", data)
            if priorities is not None:
                member.whole("update_priority", index, priorities)


def _items_of(parts: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """The items of a saved shard, the oldest first, in chunks, with their priorities."""
    cls, args, kwargs = parts
    with tempfile.TemporaryDirectory(prefix="shmbuffer-") as directory:
        storage = partial(kwargs["storage"], scratch_dir=Path(directory) / "buffer")
        buffer = cls(*args, **{**kwargs, "storage": storage})
        try:
            if len(buffer.transform):
                raise NotImplementedError(
                    f"{path}: shards of buffers with transforms can only be loaded on the nodes "
                    "that they were saved on"
                )
            buffer.loads(path)
            ring = ring_in(buffer)
            slots = ring.live.committed()
            slots = slots[np.argsort(buffer.storage.tickets(slots).numpy())]
            for at in range(0, len(slots), _CHUNK):
                some = slots[at : at + _CHUNK]
                raw = ring.tree.priorities(some) if ring.tree.prioritized else None
                yield buffer.storage.get(torch.from_numpy(some)), raw
        finally:
            buffer.close()
