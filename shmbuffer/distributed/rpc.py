"""A buffer behind torch RPC, and a handle on it that skips RPC on the buffer's own machine."""

from __future__ import annotations

import functools
import inspect
import pickle
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch.distributed import rpc

from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.distributed.far_handle import Handle
from shmbuffer.distributed.nearby import Address
from shmbuffer.distributed.owner import GROUP_OF, Owner

# What rpc.remote() returns; torch may be built without RPC.
_RREF: tuple[type, ...] = (rpc.PyRRef,) if rpc.is_available() else ()  # type: ignore[attr-defined]

_clients: MutableMapping[Any, RemoteClient] = weakref.WeakKeyDictionary()


class RemoteClient(Handle):
    """A handle on the `RemoteTensorDictReplayBuffer` of another process; it can be sent by RPC."""

    owner_is_gone = (RuntimeError,)  # torch raises it if there is no answer

    def __init__(self, rref: Any, offer: Address | None = None, *, weak: bool = False) -> None:
        super().__init__(offer)
        self._rref: Callable[[], Any] = weakref.ref(rref) if weak else lambda: rref

    def _ask(self, request: str, *args: Any) -> Any:
        rref = self._rref()
        # The RRef last: torch counts it as sent once it is pickled, even if the rest fails to.
        done, result = rpc.rpc_sync(rref.owner(), _answer, (request, args, rref))
        if done:
            return result
        try:
            raise result
        finally:
            del result  # else this frame and the error keep each other, and the RRef, alive

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteClient, (self._rref(), self._carried())

    def __repr__(self) -> str:
        near = self._near
        how = f"RPC to {self._rref().owner().name}" if near is None else near.offer.path
        return f"{type(self).__name__}({how})"


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose methods also take an RRef in place of the buffer.

    One process of the RPC group makes it with ``rpc.remote``, and all processes hold the RRef. They
    have three ways to call a method:

    - ``rpc.rpc_sync(rref.owner(), RemoteTensorDictReplayBuffer.sample, (rref, 32))`` and
      ``rref.rpc_sync().sample(32)`` run in the buffer's process, and send the batch;
    - ``RemoteTensorDictReplayBuffer.sample(rref, 32)`` does the same for a caller on another
      machine, and **reads the buffer's memory itself on the buffer's machine**;
    - ``RemoteTensorDictReplayBuffer.client(rref)`` returns a handle that has all methods, and tells
      with ``direct`` and ``paths`` which of them work in memory.

    Memory can be read if the buffer's storage is a `LazyMemmapStorage` in a directory
    (``scratch_dir`` or ``shared_init=True``).

    A handle works in memory in the same cases as that of a `RayReplayBuffer`. Here transforms,
    ``collate_fn`` and storages are pickled by name. A lambda cannot be, and its buffer is served by
    RPC.

    Calls by RRef run one at a time.

    Args:
        **kwargs: see `TensorDictReplayBuffer`. A function may be given in place of a storage, a
            sampler or a writer. The owner calls it to make that part.

    Example::

        rref = rpc.remote(
            "buffer", RemoteTensorDictReplayBuffer,
            kwargs={"storage": partial(LazyTensorStorage, 1000), "batch_size": 32},
        )
        rref.rpc_sync().extend(data)
        batch = rref.rpc_sync().sample()

    Source: ``torchrl.data.RemoteTensorDictReplayBuffer``; its `sample` takes ``include_info``
    before ``return_info``, this one has the order of its base class.
    """

    def client(self) -> Any:
        """Returns a handle on the buffer: the buffer itself, or a `RemoteClient` for an RRef."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_answering", None)
        return state


def _answer(request: str, args: tuple[Any, ...], rref: Any) -> tuple[bool, Any]:
    try:
        return True, _owner_of(rref.local_value()).answer(request, args)
    except Exception as error:  # raised again by the process that asked
        return False, error


def _owner_of(buffer: Any) -> Owner:
    owner: Owner | None = buffer.__dict__.get("_answering")
    if owner is None:
        owner = buffer.__dict__.setdefault("_answering", Owner(buffer, pickle.dumps))
    return owner


def _client_of(rref: Any) -> RemoteClient:
    """Returns the handle for calls with ``rref`` in this process, which lives as long as it."""
    client = _clients.get(rref)
    if client is None:  # if two threads make one, both get the first
        client = _clients.setdefault(rref, RemoteClient(rref, weak=True))
    return client


def _accepting_an_rref(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _RREF):
            if not self.is_owner():  # type: ignore[attr-defined]
                if name == "client":
                    return RemoteClient(self)
                return getattr(_client_of(self), name)(*args, **kwargs)
            self = self.local_value()  # type: ignore[attr-defined]
            _owner_of(self)
        owner: Owner | None = self.__dict__.get("_answering")
        if owner is None:
            return method(self, *args, **kwargs)
        with owner.lock:
            result = method(self, *args, **kwargs)
            if name not in GROUP_OF:
                owner.announce()
            return result

    # RPC sends a function by this name.
    accepting.__module__ = RemoteTensorDictReplayBuffer.__module__
    accepting.__qualname__ = f"{RemoteTensorDictReplayBuffer.__qualname__}.{name}"
    return accepting


def _accept_rrefs() -> None:
    cls = RemoteTensorDictReplayBuffer
    for name in dir(cls):
        method = getattr(cls, name)
        # Classes and bound methods take no buffer, so that no RRef replaces one.
        if not name.startswith("_") and inspect.isroutine(method) and not inspect.ismethod(method):
            setattr(cls, name, _accepting_an_rref(name, method))


_accept_rrefs()
