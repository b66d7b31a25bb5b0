"""Base class for buffers: access to storage, sampler and writer, flow control, and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.flow import consuming, publishing, reserving
from shmbuffer.buffers.flow.reservation import Reservation
from shmbuffer.errors import BufferClosedError
from shmbuffer.extras import missing
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.clients.partials import Partial
from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.format.ledger import Acknowledged
from shmbuffer.memory.weights import TIMEOUT_S, Weights
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.storages.storage import Storage, ring_of
from shmbuffer.tensors.eager import eager
from shmbuffer.torchrl.transforms import Transform
from shmbuffer.writers.writer import Writer, write_count_of


class BufferClient:
    """Base class for buffers, with the methods that do not read or write items.

    It gives access to the storage, the sampler, the writer and the transforms, controls the flow of
    items between processes, publishes weights, and closes the buffer.
    """

    _parts: Parts

    # -- the parts -----------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """The storage, which holds the items."""
        return self._parts.storage

    @property
    def sampler(self) -> Sampler:
        """The sampler, which selects the items of a batch."""
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        """The writer, which selects the slots of new items."""
        return self._parts.writer

    @property
    def transform(self) -> Any:
        """The chain of transforms, a `Compose`."""
        return self._parts.transform

    # TorchRL's collectors and trainers access the parts under these names.
    _storage, _sampler, _writer, _transform = storage, sampler, writer, transform

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Replaces the storage with its items, and the ``collate_fn``. Returns the old storage."""
        return self._parts.set_storage(storage, collate_fn)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler and returns the old one.

        A `PrioritizedSampler` takes over existing priorities. If there are none, all items get the
        default priority.

        Raises:
            ValueError: the storage is shared and has priorities with another alpha or eps.
        """
        return self._parts.replace("sampler", sampler)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer and returns the old one.

        Raises:
            RuntimeError: the new writer cannot share the storage.
        """
        return self._parts.replace("writer", writer)  # type: ignore[no-any-return]

    def append_transform(self, transform: Transform, *, invert: bool = False) -> Self:
        """Appends a transform to the chain.

        Args:
            transform: transform that is called with every sample and every ``rb[i]``. If it has a
                method ``inv``, this method is called with new data.
            invert: if True, the transform is called with new data instead.

        Returns:
            The buffer itself.
        """
        self._parts.transform.append(transform, invert=invert)
        self._parts.measure_hand_over()
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Inserts a transform before the one at ``index``; see `append_transform`."""
        self._parts.transform.insert(index, transform, invert=invert)
        self._parts.measure_hand_over()
        return self

    @property
    def batch_size(self) -> int | None:
        """The batch size of ``sample()`` and of iteration."""
        return self._parts.batch_size

    _batch_size = batch_size  # TorchRL's name for the batch size

    @property
    def generator(self) -> torch.Generator | None:
        """The random generator of the sampler. None means torch's default generator."""
        return self._parts.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._parts.set_generator(generator)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Sets the `generator`."""
        self.generator = generator

    @property
    def shared(self) -> bool:
        """True if reads are validated and samples have an entry ``index_generation``."""
        return self._parts.shared

    def share(self, shared: bool = True) -> Self:
        """Sets whether the buffer is treated as shared. Storages in directories always are."""
        self._parts.share(shared)
        return self

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which ``extend`` appends."""
        return self._parts.dim_extend

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        self._parts.set_dim_extend(dim)

    @property
    def plan(self) -> Plan:
        """The current plan: which path reads and writes take, and why. Print it to read it."""
        return self._parts.planned()

    # -- flow control --------------------------------------------------------------------------

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rate limiter, which keeps the ratio of samples to inserts across processes.

        The limiter can be set at any time. It applies to all users of the directory.

        Raises:
            TypeError: the storage is not from this package.
            RuntimeError: the items are Python objects of this process (`ListStorage`).
            ValueError: ``min_size`` of the limiter is larger than the buffer, or the limiter would
                turn a prioritized buffer into a queue.
        """
        return self._parts.rate_limiter

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        self._parts.set_rate_limiter(limiter)

    def reserve(
        self,
        n: int,
        bytes: int | None = None,
        timeout: float | None = None,
        *,
        lease: float | None = None,
        version: int | None = None,
    ) -> Reservation:
        """Reserves space for ``n`` items of a future rollout.

        The call waits under the same conditions as a write of ``n`` items: for a full queue, for
        the ratio of a rate limiter, or for ``max_staleness``. The limiter then counts the items as
        written, and `Reservation.commit` does not wait for the limiter again. A reservation
        occupies no slot, so a slow rollout does not block other writers. All handles together can
        hold 4096 reservations.

        Args:
            n: number of items (steps, if the storage has lanes), at most the capacity.
            bytes: number of bytes for records, including headers (about 200 bytes per item in
                addition to its tensors). None reserves no bytes; `commit` then waits for free
                bytes.
            timeout: maximum wait in seconds. If None, waits indefinitely.
            lease: seconds until the reservation expires, including the time during which the
                machine is suspended. With None, the reservation ends when this handle is closed or
                its process dies.
            version: version of the policy that generates the items, for `Reservation.commit`.

        Returns:
            The reservation, to be committed or aborted.

        Raises:
            RateLimitTimeout, RateLimitError: as for `extend`. Nothing was reserved.
            ShmBufferError: all 4096 reservations are in use.
            ValueError: ``n`` exceeds the capacity, or a number is invalid.
            TypeError, RuntimeError: the storage cannot be shared between processes.

        Cost: a few microseconds. Before the first write to a buffer, the call reserves nothing, and
            `Reservation.commit` is an ordinary write.
        """
        return reserving.reserve(self, n, bytes, timeout, lease, version)

    def partials(self) -> list[Partial]:
        """Returns the uncommitted rollouts of processes that died or closed their handle.

        Each rollout can be continued with `resume`. Invalid files are skipped, and a warning with
        their names is logged.

        Cost: one read of each rollout's file.
        """
        return reserving.unfinished(self._parts.storage)

    def resume(self, partial: Partial | int, timeout: float | None = None) -> Reservation:
        """Continues the rollout of a process that died or closed its handle.

        Only one process can continue a rollout. The call reserves as many items and bytes as the
        other process had reserved, or more bytes if the appended pieces need them.
        `Reservation.pieces` returns the pieces.

        Args:
            partial: an element of `partials`, or its ID.
            timeout: maximum wait for space in seconds. If None, waits indefinitely.

        Raises:
            ReservationLostError: the rollout was committed or removed, or another process has
                continued it.
            CorruptBufferError: the file cannot belong to a reservation of this buffer.
            RateLimitTimeout, RateLimitError: as for `reserve`. The rollout can still be resumed.
        """
        return reserving.resume(self, partial, timeout)

    # -- consumers -----------------------------------------------------------------------------

    @eager
    def ack(self, batch: Any) -> Acknowledged:
        """Acknowledges the items of a batch, so that the consumer does not receive them again.

        Each item is acknowledged separately, and `ack` can be repeated after an error. Items that
        were overwritten or delivered again in the meantime are rejected and counted.

        Args:
            batch: a sample drawn with ``lease=``, its ``info``, a part of either, or the result of
                `leased`. It may have been pickled or saved in the meantime. Only the entries
                ``"index"``, ``"index_generation"`` and ``"index_lease"`` are read.

        Returns:
            `Acknowledged`, with the number of items that were acknowledged under their lease and
            the number of items that were acknowledged too late.

        Raises:
            KeyError: ``batch`` lacks one of these entries.
            ConsumerError: the consumer was removed.
            TypeError: the sampler has no consumer.

        Cost: one native call. A part of a lazy stack whose items were read takes an additional 0.1
            to 0.5 µs per item. If items were removed or stacks were joined, it takes 2 µs per item.
        """
        return consuming.acknowledge(self._parts.sampler, self._parts.storage, batch)

    def leased(self) -> dict[str, torch.Tensor]:
        """Returns all items that this handle holds under a lease, for `ack`.

        Save the result with ``dumps(path, extra={"leased": rb.leased()})``. A restarted learner can
        then acknowledge the items that it had trained on before the save. Items that another client
        received in the meantime are excluded.

        Returns:
            A dict with ``"index"``, ``"index_generation"`` and ``"index_lease"``, each int64
            ``[n]``.

        Cost: O(capacity), a few milliseconds per million slots.
        """
        return consuming.held_items(self._parts.sampler, self._parts.storage)

    def consumers(self) -> list[ConsumerStatus]:
        """Returns the state of each consumer: its position, its counts, and the leased items."""
        ring = ring_of(self._parts.storage)
        return [] if ring is None else ring.consumers.status()

    def remove_consumer(self, name: str) -> bool:
        """Removes a consumer, so that writers no longer wait for it.

        The next call of a learner that uses the consumer raises `ConsumerError`.

        Returns:
            True if the consumer existed.
        """
        ring = ring_of(self._parts.storage)
        return ring is not None and ring.consumers.remove(name)

    # -- weights -------------------------------------------------------------------------------

    @eager
    def publish(
        self, state_dict: Mapping[str, Any], step: int, *, timeout: float = TIMEOUT_S
    ) -> int:
        """Publishes weights for all processes that have opened the buffer.

        Readers see either all of the new weights or none of them, even if this process is killed.
        The weights stay in the directory until the next call. The publisher and the readers never
        wait for each other.

        Args:
            state_dict: mapping from names to tensors, such as ``Module.state_dict()``. Nested
                mappings, such as a TensorDict, stay nested. GPU tensors are copied to the CPU.
                Other threads must not modify the tensors during the call.
            step: number of the learner's training step, which `newest` returns. Any number is
                allowed.
            timeout: maximum wait in seconds for another process that is publishing.

        Returns:
            The version: 1, 2, ..., which keeps increasing across restarts. The
            ``consumer_version`` of a `StalenessAwareSampler` is raised to this version.

        Raises:
            SchemaMismatchError: names, dtypes or shapes differ from the first call. The message
                names the first difference, and nothing was changed.
            AttachTimeout: another process did not finish publishing within ``timeout`` seconds. The
                attribute ``pids`` of the exception contains its pid.
            SpaceError: there is no space for two copies of the weights (first call only).
            TypeError: a value is not a tensor, or the storage is not from this package.
            ShmBufferError: the buffer has no directory.

        Cost: 0.1 ms, and one copy and one checksum of the tensors.
        """
        return publishing.publish(self._parts.storage, state_dict, step, timeout)

    @eager
    def newest(self, than: int | None = None) -> Weights | None:
        """Returns the most recently published weights, if they are newer than version ``than``.

        Returns:
            `Weights` with ``version``, ``step`` and ``state_dict``, whose tensors belong to the
            caller and can be passed to ``Module.load_state_dict``. None if there is no newer
            version.

        Raises:
            CorruptBufferError: another program has overwritten the weights or their file.
            BufferUnlinkedError: the directory was removed. Removal is detected within a second.
            TypeError, ShmBufferError: as for `publish`.

        Cost: 1 µs if there is no newer version (10 µs before the first write to the buffer),
            otherwise one copy and one checksum.
        """
        return publishing.newest(self._parts.storage, than)

    # -- state ---------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True if storage, sampler and writer exist. ``delayed_init`` postpones their creation."""
        return self._parts.makers is None

    @property
    def write_count(self) -> int:
        """Total number of elements that ``add`` and ``extend`` have written, in all processes."""
        return write_count_of(self._parts.writer)

    def stats(self) -> dict[str, Any]:
        """Returns a flat dict with the keys of TorchRL's ``stats`` and the counters of the ring."""
        parts = self._parts
        if parts.makers is not None:  # stats() does not create the parts
            maker = parts.makers["storage"]
            empty = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "utilization": 0.0}
            capacity = maker.max_size if isinstance(maker, Storage) else 0
            return {**empty, "capacity": capacity, "initialized": False}
        storage, prefetcher = parts.storage, parts.prefetcher
        engine = storage.open_engine
        counted = {} if engine is None else engine.stats()
        # In a shared buffer, size and write count must belong to the same snapshot as the counters.
        one_moment = engine is not None and engine.shared
        size: int | float = counted["length"] if one_moment else len(storage)
        capacity = storage.max_size
        return {
            **counted,
            "size": size,
            "capacity": capacity,
            "utilization": size / capacity,
            "write_count": counted["write_count"] if one_moment else self.write_count,
            "prefetch_queue_size": 0 if prefetcher is None else len(prefetcher),
            "initialized": True,
        }

    def flush(self) -> None:
        """Writes all committed items to disk, so that they survive a power failure.

        Raises:
            DurabilityError: the disk reported an error.
        """
        engine = self._parts.storage.open_engine
        if engine is not None:
            engine.flush()

    # -- the interface of TorchRL's services ---------------------------------------------------

    def start(self) -> Self:
        """Returns the buffer, which its constructor has already started.

        Raises:
            BufferClosedError: the buffer was closed.
        """
        self._require_alive("started")
        return self

    @property
    def is_alive(self) -> bool:
        """True until `shutdown` or `close` is called."""
        return not self._parts.is_closed

    @property
    def service_backend(self) -> str:
        """How the buffer is served: ``"direct"``, because it is a handle in this process.

        A `RayReplayBuffer`, in contrast, is served by an actor.
        """
        return "direct"

    def client(self) -> Any:
        """Returns the buffer itself. Other processes use `attach` or unpickle the buffer."""
        return self

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Returns the class as a Ray actor. A `RayReplayBuffer` shares memory with the actor.

        Args:
            remote_config: arguments of ``ray.remote``. None requests one CPU.

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
        """Waits until prefetched batches and submitted changes are complete.

        Raises the exceptions that occurred in their threads. The prefetched batches are kept.
        """
        if self._parts.prefetcher is not None:
            self._parts.prefetcher.settle()

    def shutdown(self, timeout: float | None = None) -> None:
        """Calls `synchronize` and then `close`, even if `synchronize` raises an exception.

        Repeated calls have no effect. The argument ``timeout`` is accepted and ignored.
        """
        try:
            self.synchronize()
        finally:
            self.close()

    def close(self) -> None:
        """Closes the buffer. Committed items stay in its directory. Repeated calls do nothing."""
        parts = self._parts
        if parts.prefetcher is not None:
            parts.prefetcher.close()
        parts.storage.close()
        parts.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_alive(self, what: str) -> None:
        if self._parts.is_closed:
            raise BufferClosedError(
                f"this {type(self).__name__} was closed, so it cannot be {what} any more. Create a "
                "new buffer, with the same scratch_dir if the closed buffer had one"
            )
