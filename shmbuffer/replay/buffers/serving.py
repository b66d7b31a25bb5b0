"""What TorchRL's services offer, of a buffer in this process; and changes made in the background.

    sample() ◀── batches ordered before ──▶ the change ──▶ batches ordered after

A change that is submitted waits for the batches that were ordered before it, and those that are
ordered after it wait for the change. Without ``prefetch`` there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from shmbuffer.errors import BufferClosedError
from shmbuffer.extras import missing
from shmbuffer.memory.layout import Side
from shmbuffer.numpy.indices import as_int
from shmbuffer.replay.buffers.access import ConditionalUpdateResult
from shmbuffer.replay.buffers.parts import Parts


class Serving(Parts):
    """The part of a buffer that waits, and says whether it would have to."""

    def start(self) -> Self:
        """The buffer, which was started by its constructor.

        Raises:
            BufferClosedError: it was closed.
        """
        self._require_alive("started")
        return self

    @property
    def is_alive(self) -> bool:
        """Whether it was not closed, by `shutdown` or `close`."""
        return not self._closed

    @property
    def service_backend(self) -> str:
        """``"direct"``: a handle of this process. `RayReplayBuffer` is served by an actor."""
        return "direct"

    def client(self) -> Any:
        """The buffer. Another process opens its directory with `attach`, or gets it by pickle."""
        return self

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """The class as one of Ray's actors; `RayReplayBuffer` is the way to share memory with it.

        Args:
            remote_config: arguments of ``ray.remote``; None asks for one CPU.

        Raises:
            ImportError: Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise missing(f"{cls.__name__}.as_remote needs Ray", "ray", name="ray") from error
        remote = ray.remote(**({"num_cpus": 1} if remote_config is None else remote_config))(cls)
        remote.is_remote = True  # type: ignore[attr-defined]
        return remote

    def synchronize(self) -> None:
        """Wait for the batches that are made ahead, and for the changes that were submitted.

        The batches stay, and are delivered next.

        Raises:
            Exception: what one of them has raised.
        """
        if self._prefetcher is not None:
            self._prefetcher.settle()

    def shutdown(self, timeout: float | None = None) -> None:
        """`synchronize`, then `close`. Idempotent.

        Args:
            timeout: accepted, as in TorchRL.

        Raises:
            Exception: what `synchronize` raises; the buffer is closed then too.
        """
        try:
            self.synchronize()
        finally:
            self.close()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample(batch_size)`` would give a batch now, without waiting for anybody.

        It looks at what the sampler draws from (slices that are long enough, batches that are
        whole) and at a `RateLimiter`. Others may write and draw before the sample is made.

        Args:
            batch_size: how many items; None is the constructor's.

        Raises:
            RuntimeError: no batch size anywhere; or a sampler cannot make batches of this size, or
                of these items, at any time.

        Cost: a microsecond; for slices as much as to look for them, see `SliceSampler`; with a
        consumer what was given back is looked through, too.
        """
        if batch_size is None:
            batch_size = self._batch_size
        if batch_size is None:
            raise RuntimeError(
                "batch_size not specified: give it to can_sample, or to the constructor of the "
                "buffer"
            )
        count = as_int("batch_size", batch_size)
        return self._admits(count) and (self._is_queue or self._draws_now(count))

    def submit_update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> Future[ConditionalUpdateResult]:
        """`update_if_present`, behind the batches that are made ahead already.

        Those that are ordered later see the change. What was submitted is not to be written to
        before it is done; what is on a GPU is read behind what that was given to do so far.

        Args:
            index: see `update_if_present`; so are the others.
            generation: see there.
            patch: see there.
            version_key: see there.
            version: see there.
            require_newer: see there.

        Returns:
            What `update_if_present` returns, or raises, is the future's. Without ``prefetch`` it is
            done.

        Raises:
            BufferClosedError: the buffer was closed.
        """
        self._require_alive("changed")
        update = {
            "index": index,
            "generation": generation,
            "patch": patch,
            "version_key": version_key,
            "version": version,
            "require_newer": require_newer,
        }
        change = partial(_change, self.update_if_present, *_staged(update))  # type: ignore[attr-defined]
        if self._prefetcher is not None:
            return self._prefetcher.submit(change)
        return done(change)

    # -- inside --------------------------------------------------------------------------------

    def _admits(self, count: int) -> bool:
        """Whether a sample of so many items would not wait for a limiter."""
        limits = self._planned().limits
        if not limits.hold:
            return True
        ring = limits.ring
        return ring is not None and ring.flow.rate_status().why(Side.INSERTS, count) is None

    @property
    def _is_queue(self) -> bool:
        """Whether samples come out of a queue, which no sampler is asked for."""
        ring = self._plan.limits.ring
        return ring is not None and ring.flow.is_queue

    def _draws_now(self, count: int) -> bool:
        return bool(self._sampler.can_sample(self._storage, count))

    def _require_alive(self, what: str) -> None:
        if self._closed:
            raise BufferClosedError(
                f"this {type(self).__name__} was closed and cannot be {what} any more; make a new "
                "one, with the same scratch_dir if it had one"
            )


def done(call: Callable[[], Any]) -> Future[Any]:
    """What a call returns or raises, as a future that is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _staged(update: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What to change with, copied from a GPU behind what its stream has to do; and when that is."""
    found: list[torch.Tensor] = []

    def copied(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return value
        found.append(value)
        return value.to("cpu", non_blocking=True)

    staged = tree_map(copied, update)
    if not found:
        return update, None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(found[0].device))
    return staged, event


def _change(call: Callable[..., Any], update: dict[str, Any], copied: Any) -> Any:
    if copied is not None:
        copied.synchronize()
    return call(**update)
