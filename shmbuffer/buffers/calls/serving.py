"""The interface of TorchRL's services for a local buffer, and changes in the background.

    sample() ◀── batches ordered before ──▶ the change ──▶ batches ordered after

A submitted change waits for the batches that were ordered before it, and later ones wait for the
change. Without ``prefetch`` there is no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from shmbuffer.buffers.calls.access import ConditionalUpdateResult
from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.errors import BufferClosedError
from shmbuffer.extras import missing
from shmbuffer.items.indices import as_int


class Serving(Parts):
    """Waits for background work, and tells whether a sample would wait."""

    def start(self) -> Self:
        """The buffer, which its constructor has started; BufferClosedError: it was closed."""
        self._require_alive("started")
        return self

    @property
    def is_alive(self) -> bool:
        """True if it is open; `shutdown` and `close` end it."""
        return not self._closed

    @property
    def service_backend(self) -> str:
        """``"direct"``: a handle of this process; a `RayReplayBuffer` is served by an actor."""
        return "direct"

    def client(self) -> Any:
        """The buffer; another process uses `attach`, or a pickled one."""
        return self

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """The class as a Ray actor; a `RayReplayBuffer` shares memory with it.

        Args:
            remote_config: arguments of ``ray.remote``; None is one CPU.

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
        """Wait for prefetched batches, which stay, and submitted changes; raises their errors."""
        if self._prefetcher is not None:
            self._prefetcher.settle()

    def shutdown(self, timeout: float | None = None) -> None:
        """`synchronize`, then `close`, also after an error. Idempotent; ``timeout`` is accepted."""
        try:
            self.synchronize()
        finally:
            self.close()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """True if ``sample(batch_size)`` would give a batch now, without waiting.

        That depends on the sampler (slices long enough, whole batches) and on a `RateLimiter`.
        Others may write and draw before the sample is made.

        Args:
            batch_size: how many items; None is the constructor's.

        Raises:
            RuntimeError: no batch size; or the sampler can never make such a batch of these items.

        Cost: a microsecond; for slices see `SliceSampler`; a consumer also looks through the items
            that were given back.
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
        """`update_if_present` after the batches ordered so far; later batches see the change.

        Do not write to the arguments before it is done; those on a GPU are read in stream order.

        Returns:
            A future of what `update_if_present` returns; without ``prefetch`` it is done.

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
        """True if the rate limiter admits a sample of so many items now."""
        return self._planned().limits.admits(count)

    @property
    def _is_queue(self) -> bool:
        """True if samples come out of a queue, without a sampler."""
        ring = self._plan.limits.ring
        return ring is not None and ring.admission.is_queue

    def _draws_now(self, count: int) -> bool:
        return bool(self._sampler.can_sample(self._storage, count))

    def _require_alive(self, what: str) -> None:
        if self._closed:
            raise BufferClosedError(
                f"this {type(self).__name__} was closed and cannot be {what} any more; make a new "
                "one, with the same scratch_dir if it had one"
            )


def done(call: Callable[[], Any]) -> Future[Any]:
    """A finished future with the result or the error of a call."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _staged(update: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Arguments, copied from a GPU in stream order, and the event of the copy."""
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
