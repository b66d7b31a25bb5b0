"""A handle to a buffer that another process, its owner, has created.

    handle.sample() ──▶ LocalHandle ──▶ the owner's directory, opened in this process (direct path)
                   └──▶ Owner, by a request                    (everything else)

A handle has every public method and property of the buffer's class. Calls that move data use the
direct path if this process can open the owner's directory. Calls that change the buffer itself
(`set_sampler`, `empty`, `dumps`, ...) run in the owner's process. The handle requests the owner's
address once, when it is first used. Afterwards the direct path works even if the owner is busy,
stopped or dead.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from shmbuffer.buffers.calls.stored_items import done
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.distributed.nearby import (
    GROUPS,
    READ,
    SAMPLE,
    WRITE,
    Address,
    LocalHandle,
    Unreachable,
    approach,
)
from shmbuffer.distributed.owner import GROUP_OF, Itself, Message
from shmbuffer.errors import BufferInUseError
from shmbuffer.memory.system.fork_lock import ForkLock

LIFECYCLE = frozenset(
    {"as_remote", "client", "clients", "close", "is_alive", "service_backend", "shutdown", "start"}
)
"""Names of the methods that only the buffer's creator can call."""


class Handle:
    """Base class for handles. A subclass defines how requests are sent to the owner."""

    owner_is_gone: tuple[type[Exception], ...] = ()
    """Exceptions that `_ask` raises if the owner is dead."""

    _path_lock = ForkLock()

    def __init__(self, offer: Address | None = None, remote_only: str = "") -> None:
        self._offer = offer  # owner's address, taken over from the handle that was copied
        self._remote_only = remote_only  # reason not to use the direct path; "" allows it
        self._near: LocalHandle | None = None
        self._reason = remote_only  # reason why the direct path is not available
        self._settled = bool(remote_only)  # True: do not try again until the buffer changes

    def _ask(self, request: str, *args: Any) -> Any:
        """Calls a method of the remote `Owner`, and returns its result or raises its exception."""
        raise NotImplementedError

    # -- choice of the path --------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """True if this handle reads, writes and samples through shared memory; see `paths`."""
        return all(way == "direct" for way in self.paths.values())

    @property
    def paths(self) -> dict[str, str]:
        """How each kind of call is made: a mapping from "read", "write" and "sample".

        The value is "direct" if the call uses shared memory. Otherwise the value is the reason why
        the owner makes the call.
        """
        near = self._reach()
        if near is None:
            return dict.fromkeys(GROUPS, self._reason)
        return {group: near.offer.refused.get(group, "direct") for group in GROUPS}

    def detach(self) -> None:
        """Detaches from the owner's directory. The next direct call opens it again."""
        with self._path_lock:
            self._offer = self._carried()
            near, self._near = self._near, None
            if near is not None:
                near.close()

    def _carried(self) -> Address | None:
        """Returns the last known address of the owner, for a copy of this handle."""
        return self._offer if self._near is None else self._near.offer

    def _reach(self, group: str | None = None) -> LocalHandle | None:
        """Returns the direct path to the buffer, or None if the owner has to make the call.

        Args:
            group: a group of calls in `GROUPS`. If None, asks whether any direct path exists.
        """
        near = self._near
        if near is None or not near.is_current():
            near = self._update_path()
        return near if near is None or group is None or group in near.direct else None

    def _update_path(self) -> LocalHandle | None:
        """Updates or opens the direct path, unless an earlier attempt has ruled it out."""
        if self._near is None and self._settled:
            return None
        with self._path_lock:
            if self._near is not None:
                self._catch_up(self._near)
            elif not self._settled:
                carried, self._offer = self._offer, None
                if carried is not None:
                    self._follow(carried)
                if self._near is None:  # this is another machine, or the address is outdated
                    self._settled = False
                    self._follow(self._ask("offer"))
            return self._near

    def _follow(self, offer: Address) -> None:
        """Opens the buffer at the given address, and uses it as the direct path from now on."""
        before, self._near = self._near, None
        try:
            self._near = approach(offer, before)
        except Unreachable as reason:
            self._reason, self._settled = str(reason), not offer.later

    def _catch_up(self, near: LocalHandle) -> None:
        """Requests the owner's configuration again if the mark in its directory has changed."""
        mark = near.news()
        if mark is None:
            return  # another thread has already updated the configuration
        try:
            offer = self._ask("offer")
        except self.owner_is_gone:
            offer = near.offer  # the owner is dead, so another process has written the mark
        if offer != near.offer:
            self._follow(offer)
        now = self._near
        if now is not None and now.offer.path == near.offer.path:
            now.offer = replace(now.offer, mark=mark)

    # -- the methods of a buffer ---------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yields samples until the sampler runs out. All handles share one pass over the items."""
        while (near := self._reach(SAMPLE)) is not None:  # the direct path never runs out of items
            yield near.buffer.sample()
        while (batch := self._call("next")) is not None:
            yield batch

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields the items in storage order, ``chunk`` slots at a time.

        See `ReplayBuffer.iter_in_order`.
        """
        near = self._reach(READ)
        if near is not None:
            yield from near.buffer.iter_in_order(chunk)
            return
        for start in range(0, self._ask("extent"), chunk):
            yield self._call("__getitem__", slice(start, start + chunk))

    @functools.wraps(TensorDictReplayBuffer.submit_update_if_present)
    def _submit(self, **update: Any) -> Future[Any]:
        near = self._reach(WRITE)
        if near is not None:
            return near.buffer.submit_update_if_present(**update)
        return done(functools.partial(self._call, "update_if_present", **update))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Asks the owner to call a method of the buffer, and returns the method's result."""
        try:
            result = self._ask("call", name, args, kwargs)
        except BufferInUseError:  # nothing was changed, so the call can be repeated
            if self._near is None:
                raise
            self.detach()  # this handle may be the client for which the owner refused the call
            result = self._ask("call", name, args, kwargs)
        if name not in GROUP_OF:
            self._allow_retry()
        if isinstance(result, Message):
            return pickle.loads(result.data)
        return self if result is Itself else result

    def _allow_retry(self) -> None:
        """Allows the next call to try the direct path again, because the buffer has changed."""
        if self._near is None and not self._remote_only:
            self._settled = False

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that only the class of the owner's buffer has."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in LIFECYCLE:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}, because it is a handle and the buffer "
                "belongs to its creator; call detach() to stop using it"
            )
        value = self._ask("get", name)
        return functools.partial(self._call, name) if value is Itself else value


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handle method that calls the buffer's method directly or through the owner."""
    group = GROUP_OF.get(name)

    @functools.wraps(original)
    def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
        near = None if group is None else self._reach(group)
        if near is None:
            return self._call(name, *args, **kwargs)
        result = getattr(near.buffer, name)(*args, **kwargs)
        return self if result is near.buffer else result

    return method


def _property(name: str, original: property) -> property:
    """Returns a handle property that reads the buffer's property directly or through the owner.

    Assignments always go to the owner.
    """
    group = GROUP_OF.get(name)

    def get(self: Handle) -> Any:
        near = None if group is None else self._reach(group)
        return self._ask("get", name) if near is None else getattr(near.buffer, name)

    def put(self: Handle, value: Any) -> None:
        self._ask("put", name, value)
        self._allow_retry()

    return property(get, None if original.fset is None else put, doc=original.__doc__)


def _forward(cls: type[Handle]) -> None:
    """Adds each public method and property of `TensorDictReplayBuffer` to a handle class.

    Names in `LIFECYCLE`, and names that the class itself defines, are left out.
    """
    for name in dir(TensorDictReplayBuffer):
        if name in LIFECYCLE or name in vars(cls):
            continue
        if name.startswith("_") and name not in GROUP_OF:
            continue
        original = getattr(TensorDictReplayBuffer, name)
        if isinstance(original, property):
            setattr(cls, name, _property(name, original))
        elif callable(original) and not isinstance(original, type):
            setattr(cls, name, _method(name, original))


_forward(Handle)
Handle.submit_update_if_present = Handle._submit  # type: ignore[attr-defined]
