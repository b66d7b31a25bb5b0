"""The Ray actor that owns a buffer and answers requests from handles in other processes.

    pickle_constructor(class, ...)  ──▶ Keeper ──▶ Owner, or Shard ──▶ buffer
    send_request(keeper, name, ...) ──▶ answer ──▶ open_answer: the result, or the raised exception

A request is sent as a pickled bytes object, because Ray copies bytes objects. It delivers arrays as
read-only views of its object store, and a buffer that kept a view would occupy the store's memory.
An answer is a message (see message.py), which the receiver copies if necessary.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from shmbuffer.distributed.message import pack, unpack
from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.runtime import STARTS_SOONER, require_ray
from shmbuffer.memory.format.array_types import Bytes

START_S = 10.0
"""Seconds after which a constructor logs that Ray has not started an actor."""

SLOW_START_S = 120.0
"""Seconds after which a constructor logs that Ray may be killing workers that start slowly."""

LEAVE_S = 5.0
"""Maximum time in seconds for keepers to close their buffers before they are killed."""

_ASK_FOR_LESS = "pass remote_config={'num_cpus': 0} to request fewer resources"
_SLOW = (
    "On a busy machine Ray's workers may be too slow to start, because their niceness is 15 and "
    f"Ray kills workers that have not registered after 60 seconds; {STARTS_SOONER}"
)

_log = logging.getLogger(__name__)


class Keeper:
    """Ray actor that owns a buffer and answers requests.

    Args:
        constructor: class and arguments of the buffer, pickled by `pickle_constructor`.
        serve: class of the owner, whose methods are called by requests.
        about: further arguments of that class.
    """

    def __init__(self, constructor: bytes, serve: type[Owner] = Owner, *about: str) -> None:
        self._fatal = serve.fatal
        self._owner: Owner | None = None
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
        try:
            cls, args, kwargs = pickle.loads(constructor)
            self._owner = serve(cls(*args, **kwargs), require_ray().cloudpickle.dumps, *about)
        except Exception as error:  # kept as the answer to each request, so that callers see it
            self._failure = self._error(error)

    def answer(self, request: bytes) -> Bytes:
        """Calls a method of the owner, and returns its result or its exception as a message.

        Args:
            request: pickled name and arguments of the method. An empty name only checks that the
                buffer could be created.
        """
        if self._owner is None:
            return self._failure
        try:
            name, args = pickle.loads(request)
            result = self._owner.answer(name, args) if name else None
        except Exception as error:
            return self._error(error)
        try:
            return pack((True, result))
        except Exception as error:  # pickling runs the code of users' classes
            return self._error(
                TypeError(
                    f"the result of {args[0] if args else name}, a {type(result).__name__}, cannot "
                    f"be sent from the actor ({type(error).__name__}: {error})"
                )
            )

    def _error(self, error: Exception) -> Bytes:
        """Returns an exception as a message. Exits the process if the exception is fatal."""
        if isinstance(error, self._fatal):
            _log.error("this keeper is exiting, so that Ray restarts it: %s", error)
            os._exit(1)
        where = "".join(traceback.format_exception(error))
        try:
            message = pack((False, error, where))
            unpack(message)  # some exceptions can be pickled, but not unpickled
            return message
        except Exception:
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return pack((False, plain, where))


def _end_after(raylet: int) -> None:
    """Exits this process once its raylet has died, because Ray may restart the actor elsewhere.

    Args:
        raylet: pid of the raylet, which is the parent of this process.
    """
    while os.getppid() == raylet:
        time.sleep(1.0)
    os._exit(1)


def pickle_constructor(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, public_name: str
) -> bytes:
    """Pickles a buffer's class and arguments for its `Keeper`.

    Args:
        cls: class of the buffer.
        args: positional arguments of the class.
        kwargs: keyword arguments of the class.
        public_name: name of the public class, for the error message.

    Raises:
        TypeError: the class or an argument cannot be pickled.
    """
    dumps: Callable[[Any], bytes] = require_ray().cloudpickle.dumps
    named = {"replay_buffer_cls": cls, **{f"args[{at}]": arg for at, arg in enumerate(args)}}
    for name, value in {**named, **kwargs}.items():
        try:
            dumps(value)
        except Exception as error:  # pickling runs the code of users' classes
            raise TypeError(
                f"{public_name}({name}=...): this {type(value).__name__} cannot be sent to the "
                f"actor ({type(error).__name__}: {error}); pass a function that creates it there, "
                "such as storage=partial(LazyTensorStorage, 100), or transform_factory=... for a "
                "transform"
            ) from error
    return dumps((cls, args, kwargs))


def send_request(keeper: Any, name: str, *args: Any) -> Any:
    """Sends a keeper a request to call a method of its owner.

    Returns Ray's reference to the answer, without waiting for the answer.
    """
    return keeper.answer.remote(require_ray().cloudpickle.dumps((name, args)))


def open_answer(message: Bytes) -> Any:
    """Returns the result in a keeper's answer, or raises the exception in it.

    Tensors in the result are views of the answer.
    """
    done, result, *where = unpack(message)
    if done:
        return result
    result.add_note(f"in the actor:\n{where[0]}")
    try:
        raise result
    finally:
        del result  # otherwise this frame and the exception keep each other alive


def wait_for_start(where: str, answers: Mapping[str, Any], limit_s: float = math.inf) -> list[Any]:
    """Waits until actors that Ray is starting have answered, and returns their first answers.

    Args:
        where: description of the buffer, for messages.
        answers: mapping from a description of each actor to Ray's reference to its first answer.
        limit_s: maximum time to wait, in seconds.

    Raises:
        TimeoutError: an actor has not answered within ``limit_s``.
    """
    ray, refs, began = require_ray(), list(answers.values()), time.monotonic()
    for wait_s, hint in ((START_S, _ASK_FOR_LESS), (SLOW_START_S, _SLOW), (limit_s, "")):
        end = began + min(wait_s, limit_s)
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        _, late = ray.wait(refs, num_returns=len(refs), timeout=left)
        if not late:
            break
        missing = ", ".join(words for words, ref in answers.items() if ref in late)
        text = (
            f"{where}: Ray has not started its {missing} within {min(wait_s, limit_s):g} s; "
            f"{ray.available_resources()} are free"
        )
        if wait_s >= limit_s:
            raise TimeoutError(
                f"{text}. The actors were stopped, and nothing was written. Try again when the "
                f"nodes are less busy, request fewer resources with remote_config, or "
                f"{STARTS_SOONER}"
            )
        _log.warning("%s. %s", text, hint)
    return list(ray.get(refs))


def end_keepers(keepers: Collection[Any]) -> list[Bytes]:
    """Makes keepers close their buffers, kills the keepers, and returns the answers received."""
    ray = require_ray()
    if not keepers or not ray.is_initialized():
        return []
    answers = []
    try:
        leaving = [send_request(keeper, "leave") for keeper in keepers]
        for ref in ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)[0]:
            with suppress(ray.exceptions.RayError):  # the keeper has already died
                answers.append(ray.get(ref))
    finally:
        for keeper in keepers:
            ray.kill(keeper, no_restart=True)
    return answers
