"""Saves and loads a sharded buffer. All keepers write to one work directory.

    <path>/storage/<node>/       the save of a shard, written by its keeper
    <path>/storage/shards.json   the nodes whose shards are in the save

`publication.publish` creates the work directory, syncs it, and replaces ``storage`` with it
atomically. If a process dies during a save, ``storage`` is either the previous save or the new one.
A keeper that is too late finds no work directory, and saves nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from shmbuffer.distributed.keeper import open_answer
from shmbuffer.distributed.runtime import require_ray
from shmbuffer.distributed.shards.member import Member
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard_pieces import ring_in
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.publication import publish, settle
from shmbuffer.saves.safe_files import make_folders, require_plain, temporary_folder
from shmbuffer.saves.saved_parts import is_saved
from shmbuffer.saves.values import damaged, read_json, reading, write_json
from shmbuffer.saves.work_directory import real_path

LIST = "shards.json"
_RENEW_S = 2.0  # maximum time in seconds between two extensions of a pause
_CHUNK = 4096  # number of items that are loaded together


def save_shards(
    members: Members,
    path: str | os.PathLike[str],
    *,
    consistent: bool = False,
    without: Collection[str] = (),
) -> None:
    """Saves all shards that contain data; see `ShardedClient.dumps`."""
    known = {*(member.node for member in members), *members.missing_nodes()}
    if strange := sorted(set(without) - known):
        raise ValueError(
            f"without={strange}: there are only shards on {', '.join(sorted(known))}; nothing was "
            "saved"
        )
    members.require_all(
        "saved", without, "; pass without=[node, ...] to leave out nodes that will not return"
    )
    written = [one for one in members if one.node not in without and one.totals.length]
    if not written:
        raise RuntimeError("no shard contains any items, so there is nothing to save")
    nodes = sorted(member.node for member in written)
    if strange := [node for node in nodes if not _is_plain(node)]:
        raise ValueError(
            f"the names of the nodes {strange} cannot be used as directory names, so nothing was "
            "saved; rename the nodes (ray start --node-name)"
        )
    target = Path(path).absolute()
    make_folders(target)
    with Directory.open(target, allow_unsafe_fs=True):
        pass  # checks that no other user can replace the directory, which keepers open by name
    with publish(target / "storage", "sharded buffer") as directory:
        place = real_path(directory)  # ``directory`` is valid only in this process
        if consistent:
            with Gate(members) as gate:
                _save_at_once(written, place, gate)
        else:
            for member in written:
                member.whole("dumps", place / member.node)
        write_json(directory / LIST, {"nodes": nodes})


class Gate:
    """Context manager that pauses the writers of all shards.

    Raises RuntimeError if the writers cannot be paused.
    """

    def __init__(self, members: Members) -> None:
        self._members, self._token = members, secrets.token_hex(8)

    def _ask(self, what: str) -> Any:
        """Calls the method ``what`` of the map's `FlowControl` with the token of this pause."""
        return self._members.ask_map("flow", what, self._token)

    def __enter__(self) -> Self:
        if why := self._ask("hold"):
            raise RuntimeError(f"a consistent save cannot be made: {why}; nothing was saved")
        return self

    def keep(self) -> None:
        """Extends the pause by `HOLD_S` seconds. Raises RuntimeError if the pause has ended.

        Must be called every few seconds, and once after the last shard has been saved.
        """
        if not self._ask("renew"):
            raise RuntimeError(
                "writers could not be paused until all shards were saved, because the shard map "
                "was restarted during the save; this save was discarded, and an earlier save is "
                "kept"
            )

    def __exit__(self, *exception: object) -> None:
        try:
            self._ask("release")
        except RuntimeError:
            return  # the map does not answer; the pause ends after `HOLD_S` seconds


def _save_at_once(written: list[Member], folder: Path, gate: Gate) -> None:
    """Makes all keepers save their shards in parallel, while the gate pauses the writers.

    Args:
        written: the shards to save.
        folder: work directory of the save, under a path that all nodes can open.
        gate: the entered gate, which is extended until all shards are saved.
    """
    ray = require_ray()
    waiting = {
        member.ask("call", "dumps", (folder / member.node,), {}).ref: member for member in written
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
                    "this save was discarded, and an earlier save is kept"
                ) from error
            open_answer(answer)


def saves_of_nodes(members: Members, path: str | os.PathLike[str]) -> dict[str, Path]:
    """Finds and checks the saves of the shards below a path.

    Args:
        members: the client's view of the shards, which must all answer.
        path: the path that was passed to `save_shards`.

    Returns:
        The path of each shard's save, keyed by node.

    Raises:
        FileNotFoundError: the list of nodes, or a save in the list, does not exist.
        CorruptBufferError, UnsafePathError: the list is damaged, or the save contains a link.
    """
    folder = Path(path).absolute() / "storage"
    settle(folder)
    nodes = _read_list(folder / LIST)
    members.require_all("loaded")
    if away := [node for node in nodes if not is_saved(folder / node)]:
        raise FileNotFoundError(
            f"{folder}: there is no save of the shards of {', '.join(away)} on this node; load "
            "from a directory that all nodes see. Nothing was changed"
        )
    require_plain(folder)
    return {node: folder / node for node in nodes}


def _read_list(file: Path) -> list[str]:
    """Returns the names of the nodes whose shards are in a save, read from its `LIST`."""
    found = read_json(file, missing="no sharded buffer was saved there")
    with reading(file):
        nodes = found["nodes"]
    if not (isinstance(nodes, list) and nodes and all(map(_is_plain, nodes))):
        raise damaged(file, f"{nodes!r:.80} is not a list of node names")
    if len(set(nodes)) < len(nodes):
        raise damaged(file, f"{nodes!r:.80} contains a node more than once")
    return nodes


def _is_plain(node: Any) -> bool:
    """True if a node's name can be used as the name of a directory."""
    return isinstance(node, str) and node not in ("", ".", "..") and not {"/", "\0"} & set(node)


def load_shards(members: Members, saves: dict[str, Path], parts: Any) -> None:
    """Loads saves into the shards; see `ShardedClient.loads`.

    Args:
        members: the client's view of the shards.
        saves: result of `saves_of_nodes`.
        parts: class and arguments of each shard's buffer; see `ShardMap.parts`.
    """
    ours = {member.node: member for member in members}
    if set(saves) == set(ours):
        for node, path in saves.items():
            ours[node].whole("loads", path)
        return
    for path in saves.values():  # a save that cannot be loaded is rejected before any change
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
    """Yields the items of a saved shard in chunks, oldest first, each with its priorities or None.

    Args:
        parts: class and arguments of the shard's buffer.
        path: directory of the shard's save.
    """
    cls, args, kwargs = parts
    with temporary_folder() as directory:
        storage = partial(kwargs["storage"], scratch_dir=directory / "buffer")
        buffer = cls(*args, **{**kwargs, "storage": storage})
        try:
            if len(buffer.transform):
                raise NotImplementedError(
                    f"{path}: the shards of a buffer with transforms can only be loaded on the "
                    "nodes on which they were saved"
                )
            buffer.loads(path)
            ring = ring_in(buffer)
            slots = ring.live.committed()
            slots = slots[np.argsort(buffer.storage.tickets(slots).numpy())]
            for at in range(0, len(slots), _CHUNK):
                chunk = slots[at : at + _CHUNK]
                raw = ring.tree.priorities(chunk) if ring.tree.prioritized else None
                yield buffer.storage.get(torch.from_numpy(chunk)), raw
        finally:
            buffer.close()
