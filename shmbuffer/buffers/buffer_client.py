"""The parts of a buffer, and its calls for processes that work together."""

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
    """A client of a buffer: its parts, what it agrees on with other clients, and when it leaves."""

    _parts: Parts

    # -- the parts -----------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """Where the items are."""
        return self._parts.storage

    @property
    def sampler(self) -> Sampler:
        """Draws items."""
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        """Places new items."""
        return self._parts.writer

    @property
    def transform(self) -> Any:
        """The chain of transforms."""
        return self._parts.transform

    # TorchRL's collectors and trainers read the parts by these names.
    _storage, _sampler, _writer, _transform = storage, sampler, writer, transform

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Uses another storage, with its items, and another ``collate_fn``; returns the old one."""
        return self._parts.set_storage(storage, collate_fn)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Uses another sampler; returns the old one.

        A `PrioritizedSampler` takes over existing priorities; without any, all items get the
        default one.

        Raises:
            ValueError: the storage is shared, with priorities of another alpha or eps.
        """
        return self._parts.replace("sampler", sampler)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Uses another writer; returns the old one. RuntimeError: it cannot share the storage."""
        return self._parts.replace("writer", writer)  # type: ignore[no-any-return]

    def append_transform(self, transform: Transform, *, invert: bool = False) -> Self:
        """Adds a transform at the end.

        Args:
            transform: called with every sample and every ``rb[i]``; its ``inv``, if any, with
                new data.
            invert: call the transform with new data instead.

        Returns:
            The buffer.
        """
        self._parts.transform.append(transform, invert=invert)
        self._parts.measure_hand_over()
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Adds a transform before the one at ``index``; see `append_transform`."""
        self._parts.transform.insert(index, transform, invert=invert)
        self._parts.measure_hand_over()
        return self

    @property
    def batch_size(self) -> int | None:
        """The batch size of ``sample()`` and of iteration."""
        return self._parts.batch_size

    _batch_size = batch_size  # TorchRL's name, as above

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the draws; None is torch's default one."""
        return self._parts.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._parts.set_generator(generator)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Sets `generator`."""
        self.generator = generator

    @property
    def shared(self) -> bool:
        """True if reads are validated, and samples have ``index_generation``."""
        return self._parts.shared

    def share(self, shared: bool = True) -> Self:
        """Treat the buffer as shared, or not; a storage in a directory always is."""
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
        """The ways that data take now, and why no shorter ones; to be printed."""
        return self._parts.planned()

    # -- flow control --------------------------------------------------------------------------

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """Keeps writers and samplers in step, for all processes; can be set at any time.

        Raises:
            TypeError: set, and the storage is not one of this package.
            RuntimeError: set, and the items are objects of this process (`ListStorage`).
            ValueError: set, and ``min_size`` is larger than the buffer, or a prioritized buffer
                would be a queue.
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
        """Reserves room for ``n`` items that a rollout is about to make.

        It waits as a write of them would: for a full queue, a ratio, ``max_staleness``. Then the
        limiter counts the items as written, and `Reservation.commit` no longer waits for it. A
        reservation has no slot, so a slow rollout does not hold up others. There are 4096
        reservations for all handles.

        Args:
            n: items (steps, of a storage with lanes), at most the capacity.
            bytes: bytes of records, headers included (about 200 an item besides its tensors).
                None reserves no bytes, and `commit` waits for them.
            timeout: seconds to wait; None: without end.
            lease: seconds until it ends, also while the machine sleeps. None: it ends with this
                handle, or its process.
            version: of the policy that makes the items, for `Reservation.commit`.

        Returns:
            The reservation: commit it, or abort it.

        Raises:
            RateLimitTimeout, RateLimitError: as `extend`; nothing is reserved.
            ShmBufferError: all reservations are in use.
            ValueError: more items than there is room for, or an invalid number.
            TypeError, RuntimeError: processes cannot share the storage.

        Cost: some microseconds. Before the first write to a buffer nothing is reserved:
            `Reservation.commit` is then a write.
        """
        return reserving.reserve(self, n, bytes, timeout, lease, version)

    def partials(self) -> list[Partial]:
        """Rollouts whose process died, or closed its handle, before `commit`; see `resume`.

        A file that cannot be one of them is left out, and a warning is logged that names it.

        Cost: each file is read.
        """
        return reserving.unfinished(self._parts.storage)

    def resume(self, partial: Partial | int, timeout: float | None = None) -> Reservation:
        """Continue the rollout of a dead process, as the only one; see `Reservation.pieces`.

        It reserves as much room as the dead process had, in items and in bytes. If bytes were
        reserved, and the appended pieces need more, it reserves room for the pieces.

        Args:
            partial: one of `partials`, or its id.
            timeout: seconds to wait for room; None: without end.

        Raises:
            ReservationLostError: it is committed, gone, or continued by another process.
            CorruptBufferError: the file cannot be of a reservation of this buffer.
            RateLimitTimeout, RateLimitError: as `reserve`; the pieces stay for others.
        """
        return reserving.resume(self, partial, timeout)

    # -- consumers -----------------------------------------------------------------------------

    @eager
    def ack(self, batch: Any) -> Acknowledged:
        """Acknowledges the items of a batch, so that the consumer does not get them again.

        Each item counts separately, and an `ack` may be repeated after an error. An item that was
        delivered again or overwritten since is refused and counted.

        Args:
            batch: a sample with ``lease=``, its ``info``, or part of either; or what `leased`
                gave; also pickled or saved meanwhile. Only the entries ``"index"``,
                ``"index_generation"`` and ``"index_lease"`` are read.

        Returns:
            `Acknowledged`: how many were acknowledged under their lease, and how many too late.

        Raises:
            KeyError: ``batch`` lacks these entries.
            ConsumerError: the consumer was removed.
            TypeError: the sampler has no consumer.

        Cost: one native call. For a part of a lazy stack whose items were read, 0.1 to 0.5 µs an
            item more; 2 µs if it lost items, or was put together of several.
        """
        return consuming.acknowledge(self._parts.sampler, self._parts.storage, batch)

    def leased(self) -> dict[str, torch.Tensor]:
        """Every item that this handle holds under a lease, for `ack`.

        Saved with ``dumps(path, extra={"leased": rb.leased()})``, it lets a restarted learner
        acknowledge what its save had trained on, unless others got it meanwhile.

        Returns:
            ``"index"``, ``"index_generation"`` and ``"index_lease"``, int64 ``[n]``.

        Cost: O(capacity), some milliseconds a million.
        """
        return consuming.held_items(self._parts.sampler, self._parts.storage)

    def consumers(self) -> list[ConsumerStatus]:
        """The state of each consumer: position, counts, and the items that clients hold."""
        ring = ring_of(self._parts.storage)
        return [] if ring is None else ring.consumers.status()

    def remove_consumer(self, name: str) -> bool:
        """Removes a consumer, so that writers do not wait for it; returns whether it existed.

        The next call of a learner that uses it is a `ConsumerError`.
        """
        ring = ring_of(self._parts.storage)
        return ring is not None and ring.consumers.remove(name)

    # -- weights -------------------------------------------------------------------------------

    @eager
    def publish(
        self, state_dict: Mapping[str, Any], step: int, *, timeout: float = TIMEOUT_S
    ) -> int:
        """Makes these weights the newest, for all processes that have the buffer.

        They appear as a whole or not at all, even if this process is killed, and stay in the
        directory until the next publish. Publisher and readers never wait for each other.

        Args:
            state_dict: tensors by name, as of ``Module.state_dict()``; nested mappings (a
                TensorDict) stay nested. Those on a GPU are copied. No other thread may change them
                meanwhile.
            step: the learner's step, returned by `newest`; any number.
            timeout: seconds to wait for another process that is publishing.

        Returns:
            The version: 1, 2, ..., growing across restarts. The consumer's version, for a
            `StalenessAwareSampler`, becomes this one if it was smaller.

        Raises:
            SchemaMismatchError: other names, dtypes or shapes than in the first publish; the error
                names the first difference, and nothing was changed.
            AttachTimeout: another process has stopped in the middle of publishing; ``pids``.
            SpaceError: no room for two copies, in the first publish.
            TypeError: a value is no tensor, or the storage is not one of this package.
            ShmBufferError: the buffer has no directory.

        Cost: 0.1 ms, and a copy and a checksum of the tensors.
        """
        return publishing.publish(self._parts.storage, state_dict, step, timeout)

    @eager
    def newest(self, than: int | None = None) -> Weights | None:
        """The newest published weights, if they are newer than version ``than``.

        Returns:
            `Weights`: ``version``, ``step`` and ``state_dict`` with tensors of the caller's own,
            for ``Module.load_state_dict``; None if there is no newer version.

        Raises:
            CorruptBufferError: another program has overwritten the weights, or their file.
            BufferUnlinkedError: the directory was removed; noticed within a second.
            TypeError, ShmBufferError: as `publish`.

        Cost: a microsecond if there is no newer version (ten before the first write to the
            buffer), else a copy and a checksum.
        """
        return publishing.newest(self._parts.storage, than)

    # -- state ---------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True if the parts are made: always, unless ``delayed_init`` was asked for."""
        return self._parts.makers is None

    @property
    def write_count(self) -> int:
        """Elements written so far through ``add`` and ``extend``, by all processes."""
        return write_count_of(self._parts.writer)

    def stats(self) -> dict[str, Any]:
        """Returns a flat dict of TorchRL's keys and the counters of the engine."""
        parts = self._parts
        if parts.makers is not None:  # stats do not make the parts
            maker = parts.makers["storage"]
            empty = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "utilization": 0.0}
            capacity = maker.max_size if isinstance(maker, Storage) else 0
            return {**empty, "capacity": capacity, "initialized": False}
        storage, prefetcher = parts.storage, parts.prefetcher
        engine = storage.open_engine
        counted = {} if engine is None else engine.stats()
        one_moment = engine is not None and engine.shared  # size and counters of one snapshot
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
        """Writes all committed items to disk, so that they survive a power cut.

        Raises:
            DurabilityError: the disk has failed.
        """
        engine = self._parts.storage.open_engine
        if engine is not None:
            engine.flush()

    # -- the interface of TorchRL's services ---------------------------------------------------

    def start(self) -> Self:
        """The buffer, which its constructor has started; BufferClosedError: it was closed."""
        self._require_alive("started")
        return self

    @property
    def is_alive(self) -> bool:
        """True if it is open; `shutdown` and `close` end it."""
        return not self._parts.is_closed

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
        """Waits for prefetched batches, which stay, and submitted changes; raises their errors."""
        if self._parts.prefetcher is not None:
            self._parts.prefetcher.settle()

    def shutdown(self, timeout: float | None = None) -> None:
        """`synchronize`, then `close`, also after an error. Idempotent; ``timeout`` is accepted."""
        try:
            self.synchronize()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves the buffer; committed items stay in its directory. Idempotent."""
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
                "new one, with the same scratch_dir if it had one"
            )
