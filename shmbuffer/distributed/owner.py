"""The part in the owner's process that serves handles in other processes.

    Handle ──call, get, put, offer──▶ Owner ──▶ buffer
                                        └─ mark ──▶ its directory, read by every `LocalHandle`

A process that opens the owner's directory has the transforms, `collate_fn`, sampler and batch size
of that moment. After a call that may have changed them the owner pickles them again. If the result
differs, it leaves a new mark in the directory, and a process that sees an unknown mark asks for
them again. Calls that move data change no configuration and skip the comparison.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensordict import MemoryMappedTensor

from shmbuffer.buffers import ReplayBuffer
from shmbuffer.distributed.nearby import MARK, READ, SAMPLE, WRITE, Address
from shmbuffer.errors import ShmBufferError
from shmbuffer.memory import Engine
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers import Sampler
from shmbuffer.storages import Storage
from shmbuffer.storages.indexing import extent
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.writers import Writer

METHODS = {
    "__getitem__": READ,
    "__len__": READ,
    "flush": READ,
    "newest": READ,
    "publish": READ,
    "read_all_in_order": READ,
    "stats": READ,
    "__setitem__": WRITE,
    "add": WRITE,
    "extend": WRITE,
    "set_": WRITE,
    "set_at_": WRITE,
    "update_": WRITE,
    "update_if_present": WRITE,
    "write_all": WRITE,
    "can_sample": SAMPLE,
    "mark_update": SAMPLE,
    "next": SAMPLE,
    "sample": SAMPLE,
    "synchronize": SAMPLE,
    "update_priority": SAMPLE,
    "update_tensordict_priority": SAMPLE,
}
"""Methods that move data, by kind. All others are the owner's."""

PROPERTIES = {
    "batch_size": READ,
    "dim_extend": READ,
    "initialized": READ,
    "priority_key": READ,
    "shared": READ,
    "storage": READ,
    "transform": READ,
    "write_count": READ,
    "writer": READ,
    "sampler": SAMPLE,
}
"""Properties of the configuration or the directory, by kind. All others are the owner's."""

_EXCHANGE = ("set_sampler", "set_storage", "set_writer")


class Itself:
    """Stands for the owner's buffer in a result; the caller gets its handle instead."""


@dataclass(frozen=True)
class Message:
    """A part of the buffer, pickled before it was closed; the handle unpickles it."""

    data: bytes


class Owner:
    """Serves the handles of a buffer, one call at a time. ``dumps`` pickles its configuration."""

    lock = ForkLock()

    def __init__(self, buffer: ReplayBuffer, dumps: Callable[[Any], bytes]) -> None:
        self.buffer = buffer
        self.node = ""  # see `Address`
        self._dumps = dumps
        self._published: Address | None = None
        self._engine: Engine | None = None  # of the directory that the offer names
        self._former: list[Storage] = []  # in directories

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method; returns its result, with `Itself` or a `Message` for what stays here."""
        with self.lock:
            if name in _EXCHANGE and args:
                args = (_made(args[0]), *args[1:])
            result = getattr(self.buffer, name)(*args, **kwargs)
            if name not in METHODS:
                self.announce()
            if result is self.buffer:
                return Itself
            return self._given_up(result) if name in _EXCHANGE else detached(result)

    def get(self, name: str) -> Any:
        """Returns an attribute of the buffer."""
        with self.lock:
            return getattr(self.buffer, name)

    def put(self, name: str, value: Any) -> None:
        """Sets an attribute of the buffer."""
        with self.lock:
            setattr(self.buffer, name, value)
            self.announce()

    def is_method(self, name: str) -> bool:
        """True if an attribute can be called."""
        return callable(getattr(self.buffer, name))

    def extent(self) -> int:
        """Slots up to the last one that was written, for iteration in order."""
        storage = self.buffer.storage
        if not isinstance(storage, RingBacked):
            return len(storage)
        ring = storage.ring()
        return 0 if ring is None else extent(ring)

    def offer(self) -> Address:
        """The buffer's address, with a mark that is in its directory."""
        with self.lock:
            offer = replace(Address.of(self.buffer, self._dumps), node=self.node)
            if self._published is None or replace(self._published, mark="") != offer:
                try:
                    self._tell(offer)
                except (ShmBufferError, ValueError) as error:  # closed; no room for a mark
                    reason = f"its directory takes no mark ({error})"
                    self._published = Address(offer.boot_id, offer.pid, refused={"": reason})
            assert self._published is not None
            return self._published

    def announce(self) -> None:
        """Leaves a new mark if the configuration differs from the last offer."""
        if self._published is not None:  # else no handle has one
            self.offer()

    def leave(self) -> None:
        """Removes the temporary directories of this process and closes the buffer."""
        with self.lock:
            for storage in (*self._former, self.buffer.storage):
                if storage._location is not None and storage._location.auto_cleanup:
                    storage.cleanup()
            self.buffer.close()

    def _tell(self, offer: Address) -> None:
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
        """Packs a part that was replaced, for the caller; None if it does not pickle. Closes it."""
        try:
            parcel = Message(self._dumps(part))
        except Exception:  # pickling runs the code of users' classes
            parcel = Message(self._dumps(None))
        if isinstance(part, Storage):
            part.close()
            if part.shared:
                self._former.append(part)
        return parcel


def _made(part: Any) -> Any:
    parts = (Storage, Sampler, Writer)
    return part() if callable(part) and not isinstance(part, parts) else part


def detached(data: Any) -> Any:
    """Data that can be pickled: views of memory maps (``rb[a:b]``, not shared) are copied."""

    def copied(leaf: Any) -> Any:
        leaves = leaf.values(True, True) if is_collection(leaf) else [leaf]
        is_mapped = any(isinstance(one, MemoryMappedTensor) for one in leaves)
        return leaf.clone() if is_mapped else leaf

    return changed(data, copied)


def changed(data: Any, change: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists and dicts with everything else in them changed."""
    if type(data) in (tuple, list):
        return type(data)(changed(part, change) for part in data)
    if type(data) is dict:
        return {key: changed(value, change) for key, value in data.items()}
    return change(data)
