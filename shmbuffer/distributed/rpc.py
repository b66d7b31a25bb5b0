"""A buffer served by torch RPC, with handles that bypass RPC on the buffer's machine."""

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

# The type of the result of rpc.remote(). A build of torch without RPC does not have the type.
_RREF: tuple[type, ...] = (rpc.PyRRef,) if rpc.is_available() else ()  # type: ignore[attr-defined]

_clients: MutableMapping[Any, RemoteClient] = weakref.WeakKeyDictionary()


class RemoteClient(Handle):
    """A handle on another process's `RemoteTensorDictReplayBuffer`, which can be sent by RPC."""

    owner_is_gone = (RuntimeError,)  # torch raises RuntimeError if the owner does not answer

    def __init__(self, rref: Any, offer: Address | None = None, *, weak: bool = False) -> None:
        super().__init__(offer)
        self._rref: Callable[[], Any] = weakref.ref(rref) if weak else lambda: rref

    def _ask(self, request: str, *args: Any) -> Any:
        rref = self._rref()
        # Pickle the RRef last, because torch counts it as sent even if pickling fails afterwards.
        done, result = rpc.rpc_sync(rref.owner(), _answer, (request, args, rref))
        if done:
            return result
        try:
            raise result
        finally:
            del result  # otherwise this frame and the error keep each other and the RRef alive

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteClient, (self._rref(), self._carried())

    def __repr__(self) -> str:
        near = self._near
        how = f"RPC to {self._rref().owner().name}" if near is None else near.offer.path
        return f"{type(self).__name__}({how})"


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose methods also accept an RRef in place of the buffer.

    One process of the RPC group creates the buffer with ``rpc.remote``, and all processes hold the
    RRef. A process can call a method in three ways:

    - ``rpc.rpc_sync(rref.owner(), RemoteTensorDictReplayBuffer.sample, (rref, 32))`` and
      ``rref.rpc_sync().sample(32)`` run in the buffer's process, and send the batch.
    - ``RemoteTensorDictReplayBuffer.sample(rref, 32)`` does the same if the caller is on another
      machine. **On the buffer's machine, this call reads the buffer's memory directly.**
    - ``RemoteTensorDictReplayBuffer.client(rref)`` returns a handle that has all methods. The
      handle's ``direct`` and ``paths`` show which methods use shared memory.

    Shared memory is used if the buffer's storage is a `LazyMemmapStorage` in a directory
    (``scratch_dir`` or ``shared_init=True``), under the same conditions as for the handles of a
    `RayReplayBuffer`. Transforms, ``collate_fn`` and storages are pickled by name. If one of them
    cannot be pickled by name, such as a lambda, all calls go through RPC.

    Calls through an RRef run one at a time.

    Args:
        **kwargs: see `TensorDictReplayBuffer`. Instead of a storage, a sampler or a writer, a
            function can be passed, which the owner calls to create it.

    Example::

        rref = rpc.remote(
            "buffer", RemoteTensorDictReplayBuffer,
            kwargs={"storage": partial(LazyTensorStorage, 1000), "batch_size": 32},
        )
        rref.rpc_sync().extend(data)
        batch = rref.rpc_sync().sample()

    Source: ``torchrl.data.RemoteTensorDictReplayBuffer``. Its `sample` has the parameter
    ``include_info`` before ``return_info``. This class uses the order of its base class.
    """

    def client(self) -> Any:
        """Returns a handle to the buffer: the buffer itself, or a `RemoteClient` of an RRef."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_answering", None)
        return state


def _answer(request: str, args: tuple[Any, ...], rref: Any) -> tuple[bool, Any]:
    """Runs a request in the buffer's process. Returns ``(True, result)`` or ``(False, error)``."""
    try:
        return True, _owner_of(rref.local_value()).answer(request, args)
    except Exception as error:  # the process that sent the request raises it
        return False, error


def _owner_of(buffer: Any) -> Owner:
    """Returns the `Owner` that answers requests for a buffer in this process."""
    owner: Owner | None = buffer.__dict__.get("_answering")
    if owner is None:
        owner = buffer.__dict__.setdefault("_answering", Owner(buffer, pickle.dumps))
    return owner


def _client_of(rref: Any) -> RemoteClient:
    """Returns this process's handle for calls with ``rref``, which is kept as long as ``rref``."""
    client = _clients.get(rref)
    if client is None:  # if two threads create a handle, both return the first one
        client = _clients.setdefault(rref, RemoteClient(rref, weak=True))
    return client


def _accept_rref(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `RemoteTensorDictReplayBuffer` that also accepts an RRef as ``self``."""

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

    # torch RPC pickles a function by its module and qualified name.
    accepting.__module__ = RemoteTensorDictReplayBuffer.__module__
    accepting.__qualname__ = f"{RemoteTensorDictReplayBuffer.__qualname__}.{name}"
    return accepting


def _accept_rrefs() -> None:
    """Replaces the public methods of `RemoteTensorDictReplayBuffer` by ones that accept an RRef."""
    cls = RemoteTensorDictReplayBuffer
    for name in dir(cls):
        method = getattr(cls, name)
        # Classes and class methods do not take a buffer as their first argument.
        if not name.startswith("_") and inspect.isroutine(method) and not inspect.ismethod(method):
            setattr(cls, name, _accept_rref(name, method))


_accept_rrefs()
