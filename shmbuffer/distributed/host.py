"""The Ray actor, and its messages.

    made_of(class, arguments) ──▶ Host ──▶ Owner ──▶ buffer
    request, pickled ──▶ answer ──▶ opened: a result, or the error that the buffer raised

Each message is one pickle in bytes, which Ray copies. Of arrays it hands out read-only views of its
object store, and a buffer that kept them would pin the store.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.runtime import require_ray


class Host:
    """The actor. ``made_of``: class, positional and keyword arguments of the buffer, pickled."""

    def __init__(self, made_of: bytes) -> None:
        self._dumps: Callable[[Any], bytes] = require_ray().cloudpickle.dumps
        self._owner: Owner | None = None
        self._failure = b""
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
        try:
            cls, args, kwargs = pickle.loads(made_of)
            self._owner = Owner(cls(*args, **kwargs), self._dumps)
        except Exception as error:  # raised at each request: a dead actor says less
            self._failure = self._error(error)

    def answer(self, request: bytes) -> bytes:
        """Calls a method of `Owner`: ``(True, result)`` or ``(False, exception)``, pickled."""
        if self._failure:
            return self._failure
        try:
            name, args = pickle.loads(request)
            result = getattr(self._owner, name)(*args) if name else None
        except Exception as error:
            return self._error(error)
        try:
            return self._dumps((True, result))
        except Exception as error:  # pickling runs the code of users' classes
            return self._error(
                TypeError(
                    f"the result of {args[0] if args else name}, a {type(result).__name__}, cannot "
                    f"be sent from the actor ({type(error).__name__}: {error})"
                )
            )

    def _error(self, error: Exception) -> bytes:
        where = "".join(traceback.format_exception(error))
        try:
            data = self._dumps((False, error, where))
            pickle.loads(data)  # some exceptions pickle, but do not unpickle
            return data
        except Exception:
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return self._dumps((False, plain, where))


def _end_after(raylet: int) -> None:
    """Ends this process after its parent, the raylet: Ray runs the actor again, and may not."""
    while os.getppid() == raylet:
        time.sleep(1.0)
    os._exit(1)


def made_of(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Class and arguments of a buffer, pickled; TypeError names one that cannot be."""
    dumps: Callable[[Any], bytes] = require_ray().cloudpickle.dumps
    named = {"replay_buffer_cls": cls, **{f"args[{at}]": arg for at, arg in enumerate(args)}}
    for name, value in {**named, **kwargs}.items():
        try:
            dumps(value)
        except Exception as error:  # pickling runs the code of users' classes
            raise TypeError(
                f"RayReplayBuffer({name}=...): this {type(value).__name__} cannot be sent to the "
                f"actor ({type(error).__name__}: {error}); give a function that makes it there, "
                "such as storage=partial(LazyTensorStorage, 100), or transform_factory=... for a "
                "transform"
            ) from error
    return dumps((cls, args, kwargs))


def opened(answer: bytes) -> Any:
    """Unpacks an answer of `Host`: returns its result, or raises its error."""
    done, result, *where = pickle.loads(answer)
    if done:
        return result
    result.add_note(f"in the actor:\n{where[0]}")
    try:
        raise result
    finally:
        del result  # else this frame and the error keep each other alive
