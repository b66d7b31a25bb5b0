"""Serves the handles of other processes, in the process that owns the buffer.

    Handle ──answer: call, get, put, offer──▶ Owner ──▶ buffer
                                                └─ mark ──▶ its directory, read by `LocalHandle`

A process that opens the owner's directory receives a copy of the current configuration: transforms,
`collate_fn`, sampler and batch size. After a call that may have changed the configuration, the
owner pickles it again. If the result differs, the owner writes a new mark to the directory. A
process that reads an unknown mark requests the configuration again. Calls that move data do not
change the configuration and skip the comparison.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensordict import MemoryMappedTensor

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.nearby import MARK, READ, SAMPLE, WRITE, Address
from shmbuffer.errors import ShmBufferError
from shmbuffer.memory import Engine
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.storages.indexing import extent
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.writers.writer import Writer

_IN_MEMORY = {
    READ: (
        *("__getitem__", "__len__", "flush", "newest", "publish", "read_all_in_order", "stats"),
        *("batch_size", "dim_extend", "initialized", "priority_key", "shared", "storage"),
        *("transform", "write_count", "writer"),
    ),
    WRITE: (
        *("__setitem__", "add", "extend", "set_", "set_at_", "update_", "update_if_present"),
        "write_all",
    ),
    SAMPLE: (
        *("can_sample", "mark_update", "next", "sample", "sampler", "synchronize"),
        *("update_priority", "update_tensordict_priority"),
    ),
}
GROUP_OF = {name: group for group, names in _IN_MEMORY.items() for name in names}
"""Methods that move data, and properties that any process with the directory can read.

The owner handles all other names. Their methods may change the configuration.
"""

_EXCHANGE = ("set_sampler", "set_storage", "set_writer")


class Itself:
    """Placeholder for the buffer or one of its methods, which the handle replaces with its own."""


@dataclass(frozen=True)
class Message:
    """A pickled part of the buffer, which the owner has closed. The handle unpickles it."""

    data: bytes


class Owner:
    """Serves the handles of a buffer. ``dumps`` pickles the buffer's configuration."""

    fatal: tuple[type[Exception], ...] = ()
    """Errors after which the owner's process cannot continue."""

    lock = ForkLock()

    def __init__(self, buffer: ReplayBuffer, dumps: Callable[[Any], bytes]) -> None:
        self.buffer = buffer
        self._dumps = dumps
        self._published: Address | None = None
        self._engine: Engine | None = None  # engine of the directory in the address
        self._former: list[Storage] = []  # replaced storages that are in directories

    def answer(self, request: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of this class, one at a time."""
        with self.lock:
            return getattr(self, request)(*args)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the buffer and returns its result.

        Returns `Itself` in place of the buffer, and a `Message` in place of a replaced part.
        """
        if name in _EXCHANGE and args:
            args = (_made(args[0]), *args[1:])
        result = getattr(self.buffer, name)(*args, **kwargs)
        if name not in GROUP_OF:
            self.announce()
        if result is self.buffer:
            return Itself
        return self._given_up(result) if name in _EXCHANGE else detached(result)

    def get(self, name: str) -> Any:
        """Returns an attribute of the buffer, or `Itself` if the attribute is a method."""
        value = getattr(self.buffer, name)
        return Itself if inspect.ismethod(value) else value

    def put(self, name: str, value: Any) -> None:
        """Sets an attribute of the buffer."""
        setattr(self.buffer, name, value)
        self.announce()

    def extent(self) -> int:
        """Returns the number of slots up to and including the last written slot."""
        storage = self.buffer.storage
        if not isinstance(storage, RingBacked):
            return len(storage)
        ring = storage.ring()
        return 0 if ring is None else extent(ring)

    def offer(self) -> Address:
        """Returns the buffer's address, with the mark that is in its directory."""
        offer = Address.of(self.buffer, self._dumps)
        if self._published != offer:
            try:
                self._tell(offer)
            except (ShmBufferError, ValueError) as error:  # closed, or no space for a mark
                reason = f"no marker file can be created in its directory ({error})"
                self._published = Address(offer.boot_id, offer.pid, refused={"": reason})
        assert self._published is not None
        return self._published

    def announce(self) -> None:
        """Writes a new mark if the configuration differs from the last published address."""
        if self._published is not None:  # otherwise no handle has an address
            self.offer()

    def leave(self) -> None:
        """Removes the temporary directories of this process and closes the buffer."""
        for storage in (*self._former, self.buffer.storage):
            if storage._location is not None and storage._location.auto_cleanup:
                storage.cleanup()
        self.buffer.close()

    def _tell(self, offer: Address) -> None:
        """Writes a new mark to the directory of the address, and to the previous directory."""
        storage = self.buffer.storage
        before, now = self._engine, None
        if offer.path is not None and isinstance(storage, RingBacked):
            now = storage.engine()
        mark = secrets.token_hex(8)
        for engine in {before, now} - {None}:
            assert engine is not None
            if not engine.closed:
                engine.update_settings(extra={MARK: mark})
        self._engine, self._published = now, replace(offer, mark=mark)

    def _given_up(self, part: Any) -> Message:
        """Pickles a replaced part, or None if the part cannot be pickled, and closes the part."""
        try:
            message = Message(self._dumps(part))
        except Exception:  # pickling runs the code of users' classes
            message = Message(self._dumps(None))
        if isinstance(part, Storage):
            part.close()
            if part.shared:
                self._former.append(part)
        return message


def _made(part: Any) -> Any:
    """Calls a function that creates a part, and returns any other object unchanged."""
    parts = (Storage, Sampler, Writer)
    return part() if callable(part) and not isinstance(part, parts) else part


def detached(data: Any) -> Any:
    """Copies views of private memory maps, such as ``rb[a:b]``, which cannot be pickled."""

    def copied(leaf: Any) -> Any:
        leaves = leaf.values(True, True) if is_collection(leaf) else [leaf]
        is_mapped = any(isinstance(one, MemoryMappedTensor) for one in leaves)
        return leaf.clone() if is_mapped else leaf

    return changed(data, copied)


def changed(data: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to every value in nested tuples, lists and dicts."""
    if type(data) in (tuple, list):
        return type(data)(changed(part, change) for part in data)
    if type(data) is dict:
        return {key: changed(value, change) for key, value in data.items()}
    return change(data)
