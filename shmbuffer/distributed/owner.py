"""Answers requests from handles in other processes, in the process that owns the buffer.

    Handle ──answer: call, get, put, offer──▶ Owner ──▶ buffer
                                                └─ mark ──▶ its directory, read by `LocalHandle`

A process that opens the owner's directory receives a copy of the owner's configuration: transforms,
`collate_fn`, sampler and batch size. After each call that may have changed the configuration, the
owner pickles the configuration again. If the pickle differs, the owner writes a new mark to the
directory. A process that reads an unknown mark requests the configuration again. Calls that move
data cannot change the configuration, so the owner skips the comparison after them.
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
"""Group in `GROUPS` of each method that moves data, and of each property that processes can read.

A process that has opened the directory handles these names itself. The owner handles all other
names, because the methods may change the configuration.
"""

_EXCHANGE = ("set_sampler", "set_storage", "set_writer")


class Itself:
    """Placeholder in an answer for the buffer or one of its methods.

    The handle replaces it with itself or with its own method.
    """


@dataclass(frozen=True)
class Message:
    """A storage, sampler or writer that was replaced and closed, pickled for the handle."""

    data: bytes


class Owner:
    """Answers the requests of a buffer's handles.

    Args:
        buffer: the buffer.
        dumps: function that pickles the buffer's configuration.
    """

    fatal: tuple[type[Exception], ...] = ()
    """Exceptions after which the owner's process cannot continue."""

    lock = ForkLock()

    def __init__(self, buffer: ReplayBuffer, dumps: Callable[[Any], bytes]) -> None:
        self.buffer = buffer
        self._dumps = dumps
        self._published: Address | None = None
        self._engine: Engine | None = None  # engine of the directory in the published address
        self._former: list[Storage] = []  # replaced storages that have a directory

    def answer(self, request: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of this class. Calls from several threads run one after another."""
        with self.lock:
            return getattr(self, request)(*args)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the buffer and returns its result.

        If the result is the buffer, `Itself` is returned instead. If the result is a storage,
        sampler or writer that the call has replaced, a `Message` is returned instead.
        """
        if name in _EXCHANGE and args:
            args = (_create_part(args[0]), *args[1:])
        result = getattr(self.buffer, name)(*args, **kwargs)
        if name not in GROUP_OF:
            self.announce()
        if result is self.buffer:
            return Itself
        return self._close_and_pickle(result) if name in _EXCHANGE else copy_mapped(result)

    def get(self, name: str) -> Any:
        """Returns an attribute of the buffer, or `Itself` if the attribute is a method."""
        value = getattr(self.buffer, name)
        return Itself if inspect.ismethod(value) else value

    def put(self, name: str, value: Any) -> None:
        """Sets an attribute of the buffer, and announces a changed configuration."""
        setattr(self.buffer, name, value)
        self.announce()

    def extent(self) -> int:
        """Returns the number of slots from the first slot to the last one that was written."""
        storage = self.buffer.storage
        if not isinstance(storage, RingBacked):
            return len(storage)
        ring = storage.ring()
        return 0 if ring is None else extent(ring)

    def offer(self) -> Address:
        """Returns the buffer's address. If it has changed, writes a new mark to the directory."""
        offer = Address.of(self.buffer, self._dumps)
        if self._published != offer:
            try:
                self._publish(offer)
            except (ShmBufferError, ValueError) as error:  # closed, or no space for a mark
                reason = f"its owner cannot record changes in its directory ({error})"
                self._published = Address(offer.boot_id, offer.pid, refused={"": reason})
        assert self._published is not None
        return self._published

    def announce(self) -> None:
        """Writes a new mark if the configuration differs from the last published address."""
        if self._published is not None:  # otherwise no handle has requested the address
            self.offer()

    def leave(self) -> None:
        """Removes the buffer's temporary directories and closes the buffer."""
        for storage in (*self._former, self.buffer.storage):
            if storage._location is not None and storage._location.auto_cleanup:
                storage.cleanup()
        self.buffer.close()

    def _publish(self, offer: Address) -> None:
        """Publishes an address by writing a new mark to its directory and to the previous one."""
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

    def _close_and_pickle(self, part: Any) -> Message:
        """Closes a replaced storage, sampler or writer, and returns it pickled.

        If it cannot be pickled, None is pickled instead.
        """
        try:
            message = Message(self._dumps(part))
        except Exception:  # pickling runs the code of users' classes
            message = Message(self._dumps(None))
        if isinstance(part, Storage):
            part.close()
            if part.shared:
                self._former.append(part)
        return message


def _create_part(part: Any) -> Any:
    """Returns a storage, sampler or writer, which a function may have to create.

    Args:
        part: a function without arguments, which is called, or an object, which is returned.
    """
    parts = (Storage, Sampler, Writer)
    return part() if callable(part) and not isinstance(part, parts) else part


def copy_mapped(data: Any) -> Any:
    """Copies tensors that are views of memory maps, such as ``rb[a:b]``.

    A view of a private memory map cannot be pickled. All other values are returned unchanged.
    """

    def copied(leaf: Any) -> Any:
        leaves = leaf.values(True, True) if is_collection(leaf) else [leaf]
        is_mapped = any(isinstance(one, MemoryMappedTensor) for one in leaves)
        return leaf.clone() if is_mapped else leaf

    return map_values(data, copied)


def map_values(data: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to every value in nested tuples, lists and dicts."""
    if type(data) in (tuple, list):
        return type(data)(map_values(part, change) for part in data)
    if type(data) is dict:
        return {key: map_values(value, change) for key, value in data.items()}
    return change(data)
