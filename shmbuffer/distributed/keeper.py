"""The Ray actor that owns a buffer and serves the handles of other processes.

    made_of(class, arguments) ──▶ Keeper ──▶ Owner, or Shard ──▶ buffer
    asked(keeper, name, ...)  ──▶ answer ──▶ opened: the result, or the error that was raised

A request is a pickle in a bytes object, because Ray copies bytes. Arrays arrive as read-only views
of Ray's object store, and a buffer that kept such a view would keep the store's memory in use. An
answer is a message (see message.py). The receiver copies the message if necessary.
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

from shmbuffer.distributed.message import packed, unpacked
from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.runtime import STARTS_SOONER, require_ray
from shmbuffer.memory.format.array_types import Bytes

START_S = 10.0
"""Seconds after which a constructor logs that Ray has not started an actor yet."""

SLOW_START_S = 120.0
"""Seconds after which a constructor logs that Ray may be killing workers that start slowly."""

LEAVE_S = 5.0
"""Seconds that a keeper has to close its buffer before it is killed."""

_ASK_FOR_LESS = "pass remote_config={'num_cpus': 0} to request fewer resources"
_SLOW = (
    "On a busy machine Ray's workers may be too slow to start, because their niceness is 15 and "
    f"Ray kills workers that have not registered after 60 seconds; {STARTS_SOONER}"
)

_log = logging.getLogger(__name__)


class Keeper:
    """Ray actor that owns a buffer and answers requests.

    Args:
        made_of: class and arguments of the buffer, pickled by `made_of`.
        serve: class of the owner, whose methods the requests call.
        about: further arguments of the owner's class.
    """

    def __init__(self, made_of: bytes, serve: type[Owner] = Owner, *about: str) -> None:
        self._fatal = serve.fatal
        self._owner: Owner | None = None
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
        try:
            cls, args, kwargs = pickle.loads(made_of)
            self._owner = serve(cls(*args, **kwargs), require_ray().cloudpickle.dumps, *about)
        except Exception as error:  # raised at each request, because a dead actor gives no reason
            self._failure = self._error(error)

    def answer(self, request: bytes) -> Bytes:
        """Calls a method of the owner, and returns the result or the error as a message."""
        if self._owner is None:
            return self._failure
        try:
            name, args = pickle.loads(request)
            result = self._owner.answer(name, args) if name else None
        except Exception as error:
            return self._error(error)
        try:
            return packed((True, result))
        except Exception as error:  # pickling runs the code of users' classes
            return self._error(
                TypeError(
                    f"the result of {args[0] if args else name}, a {type(result).__name__}, cannot "
                    f"be sent from the actor ({type(error).__name__}: {error})"
                )
            )

    def _error(self, error: Exception) -> Bytes:
        if isinstance(error, self._fatal):
            _log.error("this keeper is exiting, so that Ray restarts it: %s", error)
            os._exit(1)
        where = "".join(traceback.format_exception(error))
        try:
            message = packed((False, error, where))
            unpacked(message)  # some exceptions pickle, but do not unpickle
            return message
        except Exception:
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return packed((False, plain, where))


def _end_after(raylet: int) -> None:
    """Exits when the parent raylet has died, because Ray may restart the actor elsewhere."""
    while os.getppid() == raylet:
        time.sleep(1.0)
    os._exit(1)


def made_of(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, front: str) -> bytes:
    """Pickles a buffer's class and arguments, or raises TypeError for one that cannot be pickled.

    ``front`` is the public function that the error message names.
    """
    dumps: Callable[[Any], bytes] = require_ray().cloudpickle.dumps
    named = {"replay_buffer_cls": cls, **{f"args[{at}]": arg for at, arg in enumerate(args)}}
    for name, value in {**named, **kwargs}.items():
        try:
            dumps(value)
        except Exception as error:  # pickling runs the code of users' classes
            raise TypeError(
                f"{front}({name}=...): this {type(value).__name__} cannot be sent to the actor "
                f"({type(error).__name__}: {error}); pass a function that creates it there, such "
                "as storage=partial(LazyTensorStorage, 100), or transform_factory=... for a "
                "transform"
            ) from error
    return dumps((cls, args, kwargs))


def asked(keeper: Any, name: str, *args: Any) -> Any:
    """Asks a keeper to call a method of its owner, and returns Ray's reference to the answer."""
    return keeper.answer.remote(require_ray().cloudpickle.dumps((name, args)))


def opened(message: Bytes) -> Any:
    """Returns the result in an answer, or raises its error. Tensors are views of the answer."""
    done, result, *where = unpacked(message)
    if done:
        return result
    result.add_note(f"in the actor:\n{where[0]}")
    try:
        raise result
    finally:
        del result  # else this frame and the error keep each other alive


def started(where: str, answers: Mapping[str, Any], limit_s: float = math.inf) -> list[Any]:
    """Waits for actors that Ray is starting, and returns their first answers.

    Args:
        where: description of the buffer for messages.
        answers: Ray's references to the first answers, by a description of each actor.
        limit_s: seconds after which TimeoutError is raised.
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
                f"{text}. They were stopped, and nothing was written: try again when the nodes are "
                f"less busy, request less with remote_config, or {STARTS_SOONER}"
            )
        _log.warning("%s. %s", text, hint)
    return list(ray.get(refs))


def ended(keepers: Collection[Any]) -> list[Bytes]:
    """Asks keepers to close their buffers, kills them, and returns the answers that arrived."""
    ray = require_ray()
    if not keepers or not ray.is_initialized():
        return []
    answers = []
    try:
        leaving = [asked(keeper, "leave") for keeper in keepers]
        for ref in ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)[0]:
            with suppress(ray.exceptions.RayError):  # the keeper has already died
                answers.append(ray.get(ref))
    finally:
        for keeper in keepers:
            ray.kill(keeper, no_restart=True)
    return answers
