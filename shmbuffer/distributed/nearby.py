"""Opens the buffer of another process through shared memory, if this process can reach it.

    owner's process                                  this process
    buffer ──Address.of──▶ Address ── by RPC ──▶ approach ──▶ LocalHandle: the same directory
                         machine, directory, and the buffer's configuration, pickled

Host names do not identify a machine, because containers can share a name or have several names, and
networks reuse names. Two processes are taken to be on one machine if they see the same kernel boot
id, and the same file under the buffer's path.

A buffer is pickled as its path and configuration, without its contents. The copy has the owner's
class, arguments, transforms and `collate_fn`, and reads and writes the owner's memory. Some state
exists only in the owner's process. The owner therefore makes these calls:

- sampling, if the sampler keeps track of its draws or is not part of shmbuffer, or if the buffer
  was created with a generator;
- writing, if a sampler, writer or other object in the owner's process must see every write.

When its configuration changes, the owner writes a new mark to the directory (see owner.py).
Before each call, `LocalHandle` compares two numbers to detect a new mark.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.memory import Engine
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.region import Directory
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.random import RandomSampler
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.writers.round_robin import RoundRobinWriter

READ, WRITE, SAMPLE = GROUPS = ("read", "write", "sample")
"""Groups of calls that another process can make through shared memory."""

MARK = "config_version"
"""Key in the directory's settings. Its value changes whenever the owner's configuration changes."""

_OPERATIONS = {
    READ: ("__getitem__", "__len__"),
    WRITE: ("add", "extend", "__setitem__"),
    SAMPLE: ("sample", "__iter__", "update_priority"),
}


class Unreachable(Exception):  # noqa: N818 - a state, not a failure
    """Raised if this process cannot open the owner's memory. The message gives the reason."""


@dataclass(frozen=True)
class Address:
    """Location and configuration of a buffer, as sent to other processes."""

    boot_id: bytes  # boot id of the owner's kernel
    pid: int  # pid of the owner, for messages
    path: str | None = None  # directory of the buffer; None if it is in anonymous memory
    uuid: bytes = b""  # UUID of the buffer in the directory
    file: tuple[int, int] = (0, 0)  # device and inode of its control file
    payload: bytes = b""  # class and configuration of the buffer, pickled
    storage: bytes = b""  # the storage, pickled as its path
    # for each group of `GROUPS` that needs the owner, the reason; the key "" means all groups
    refused: dict[str, str] = field(default_factory=dict)
    later: bool = False  # True if the directory does not exist until the first write
    # the mark that the directory contains while this address is valid
    mark: str = field(default="", compare=False)

    @property
    def place(self) -> tuple[Any, ...]:
        """Values that together identify the memory of the buffer."""
        return (self.boot_id, self.path, self.uuid, self.file, self.storage)

    @classmethod
    def of(cls, buffer: ReplayBuffer, dumps: Callable[[Any], bytes]) -> Address:
        """Returns the address of a buffer that this process owns, without a mark.

        Args:
            buffer: the buffer.
            dumps: function that pickles the buffer's class, configuration and storage.
        """
        storage = buffer.storage
        me = identity.current()
        here = (me.boot_id, me.pid)
        if not isinstance(storage, RingBacked) or not storage.shared:
            kind = type(storage).__name__
            return cls(*here, refused={"": f"its {kind} is in the private memory of its owner"})
        engine = storage.open_engine
        if engine is None:
            reason = "its directory is created by the first write"
            return cls(*here, refused={"": reason}, later=True)
        superblock, refused = engine.superblock, _reasons_for_owner(buffer)
        try:
            payload = dumps((type(buffer), _configuration(buffer, refused)))
            pickled = dumps(storage)
        except Exception as error:  # pickling runs the code of users' classes
            reason = f"its configuration cannot be pickled ({type(error).__name__}: {error})"
            return cls(*here, path=str(engine.path), refused={"": reason})
        return cls(
            *here,
            path=str(engine.path),
            uuid=superblock.uuid,
            file=(superblock.device, superblock.inode),
            payload=payload,
            storage=pickled,
            refused=refused,
        )


class LocalHandle:
    """The owner's buffer, opened in this process. It is closed when the handle is collected."""

    def __init__(self, buffer: ReplayBuffer, offer: Address) -> None:
        self.buffer = buffer
        self.offer = offer
        # groups of calls that this process makes without the owner
        self.direct = frozenset(GROUPS) - offer.refused.keys()
        self._control = engine_of(buffer).seat.control
        self._sequences: tuple[int, int] | None = None
        # A replaced handle is closed when it is collected, because another thread may still use it.
        self._end = weakref.finalize(self, buffer.close)
        self._end.atexit = False  # at exit the engine closes itself

    def is_current(self) -> bool:
        """True if the owner's configuration has not changed. Takes 0.4 µs if nothing changed."""
        return self._control.sequences == self._sequences or self.news() is None

    def news(self) -> str | None:
        """Returns the mark in the directory if it has changed, otherwise None."""
        sequences = self._control.sequences
        mark = str(self._control.superblock().settings["extra"].get(MARK, ""))
        if mark != self.offer.mark:
            return mark
        self._sequences = sequences
        return None

    def release_storage(self) -> RingBacked:
        """Transfers the open storage to the caller, whose new `LocalHandle` has to close it."""
        self._end.detach()
        storage = self.buffer.storage
        assert isinstance(storage, RingBacked)
        return storage

    def close(self) -> None:
        """Closes the buffer and detaches from its directory."""
        self._end()


def approach(offer: Address, near: LocalHandle | None = None) -> LocalHandle:
    """Opens the owner's buffer in this process.

    Args:
        offer: address of the buffer.
        near: the current handle, if any. Its storage is reused if the address has the same memory.

    Raises:
        Unreachable: this process cannot open the buffer.
    """
    if "" in offer.refused:
        raise Unreachable(offer.refused[""])
    if offer.boot_id == identity.UNKNOWN_BOOT or offer.boot_id != identity.boot_id():
        raise Unreachable("its owner is on another machine")
    storage: Any = None
    try:
        cls, state = pickle.loads(offer.payload)  # first, because unpickling can fail
        if near is not None and near.offer.place == offer.place:
            return LocalHandle(_rebuild(cls, state, near.release_storage()), offer)
        _require_same(offer)
        storage = pickle.loads(offer.storage)
        if storage.engine().superblock.uuid != offer.uuid:
            raise Unreachable(f"the owner's buffer in {offer.path} was replaced by another buffer")
        return LocalHandle(_rebuild(cls, state, storage), offer)
    except Exception as error:  # unpickling runs the code of users' classes
        if storage is not None:
            storage.close()
        if isinstance(error, Unreachable):
            raise
        raise Unreachable(
            f"this process cannot open {offer.path} ({type(error).__name__}: {error})"
        ) from error


def engine_of(buffer: ReplayBuffer) -> Engine:
    """Returns the engine of a buffer whose storage is a `RingBacked`."""
    storage = buffer.storage
    assert isinstance(storage, RingBacked)
    return storage.engine()


def _require_same(offer: Address) -> None:
    """Raises Unreachable unless the address's path leads this process to the owner's files."""
    assert offer.path is not None
    if not Path(offer.path).is_dir():
        raise Unreachable(f"its directory {offer.path} is not visible to this process")
    with Directory.open(offer.path) as directory:
        files = Files(directory)
        if not files.has_control():
            raise Unreachable(f"this process sees no buffer in {offer.path}")
        found = directory.stat(layout.CONTROL)
        superblock = files.open_control(writable=False).superblock()
    if superblock.uuid != offer.uuid or (found.st_dev, found.st_ino) != offer.file:
        raise Unreachable(f"{offer.path} contains a different buffer here than for the owner")


def _reasons_for_owner(buffer: ReplayBuffer) -> dict[str, str]:
    """Returns the groups of calls that the owner must make, each with the reason."""
    storage, sampler, writer = buffer.storage, buffer.sampler, buffer.writer
    refused: dict[str, str] = {}

    def refuse(group: str, reason: str) -> None:
        refused.setdefault(group, reason)

    for group, names in _OPERATIONS.items():
        for name in names:
            if not _is_ours(getattr(type(buffer), name)):
                refuse(group, f"{type(buffer).__name__} overrides {name}()")
    if not all(_is_ours(getattr(type(storage), name)) for name in ("get", "set")):
        for group in GROUPS:
            refuse(group, f"{type(storage).__name__} is not one of shmbuffer's storages")

    drawn = type(sampler).__name__
    if not _is_ours(type(sampler).sample):
        refuse(
            SAMPLE,
            f"{drawn} is not one of shmbuffer's samplers, and may keep track of the items that it "
            "has sampled",
        )
    elif type(sampler).ran_out is not Sampler.ran_out:
        refuse(
            SAMPLE,
            f"{drawn} keeps track of the items that it has sampled, and all clients share its pass",
        )
    elif buffer.generator is not None:
        refuse(SAMPLE, "sampling uses the generator that was passed to the owner")

    must_see_writes = (
        type(sampler).add is not Sampler.add or type(sampler).extend is not Sampler.extend
    )
    if must_see_writes and not (
        isinstance(sampler, PrioritizedSampler) and _is_ours(type(sampler).add)
    ):
        refuse(WRITE, f"{drawn} must be notified of every write")
    if type(writer).add is not RoundRobinWriter.add or (
        type(writer).extend is not RoundRobinWriter.extend
    ):
        refuse(WRITE, f"{type(writer).__name__} decides in one process which items are kept")
    if any(watcher() is not None for watcher in storage._watchers):
        refuse(WRITE, "an object in the owner's process must be notified of every write")
    return refused


def _is_ours(function: Any) -> bool:
    """True if a function is defined in shmbuffer."""
    return str(function.__module__).startswith("shmbuffer.")


def _configuration(buffer: ReplayBuffer, refused: dict[str, str]) -> dict[str, Any]:
    """Returns the buffer's state for another process, without the owner's own objects.

    Args:
        buffer: the buffer.
        refused: result of `_reasons_for_owner`.
    """
    state = buffer.__getstate__()
    parts = {**state.pop("_parts").__getstate__(), "generator": None, "rank_given": None}
    del parts["storage"]
    if SAMPLE in refused and not isinstance(buffer.sampler, PrioritizedSampler):
        parts["sampler"] = RandomSampler()  # a placeholder, because the owner draws the samples
    return {**state, "parts": parts}


def _rebuild(cls: type[ReplayBuffer], state: dict[str, Any], storage: RingBacked) -> ReplayBuffer:
    """Returns a buffer with the state that `_configuration` returned, and the given storage."""
    parts = Parts.__new__(Parts)
    parts.__setstate__({**state.pop("parts"), "storage": storage})
    buffer = cls.__new__(cls)
    buffer.__setstate__({**state, "_parts": parts})
    return buffer
