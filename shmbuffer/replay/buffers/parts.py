"""What a buffer is made of, how the parts are exchanged, and which way the data take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from shmbuffer.errors import ShmBufferError
from shmbuffer.replay.buffers.prefetch import Prefetcher
from shmbuffer.replay.buffers.record import record
from shmbuffer.replay.samplers import PrioritizedSampler, RandomSampler, Sampler
from shmbuffer.replay.storages import Storage
from shmbuffer.replay.storages.direct import Direct
from shmbuffer.replay.storages.ring_backed import RingBacked
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.tensor import TensorStorage
from shmbuffer.replay.transforms import Compose, Transform
from shmbuffer.replay.writers import RoundRobinWriter, Writer

if TYPE_CHECKING:
    from shmbuffer.memory import Engine, RateLimiter, Ring


def shareable(storage: RingBacked) -> Engine:
    """The engine of a storage, which keeps both sides in step.

    Raises:
        RuntimeError: the items are objects of this process.
    """
    try:
        return storage.engine
    except RuntimeError as error:
        if isinstance(error, ShmBufferError):
            raise
        raise RuntimeError(f"there is no flow control here: {error}") from error


class Parts:
    """A storage, a sampler, a writer, a chain of transforms, and what they share.

    Where all three parts are of this package a batch is one native call; something of somebody
    else's in between is asked instead, through the protocols of `Storage`, `Sampler` and `Writer`.
    """

    _storage: Storage
    _sampler: Sampler
    _writer: Writer
    _transform: Compose
    _collate_fn: Callable[[Any], Any] | None
    _batch_size: int | None
    _dim_extend: int | None
    _generator: torch.Generator | None
    _prefetcher: Prefetcher | None
    _shared: bool
    _pin_memory: bool
    _weight_keys: tuple[str, ...]  # names of the importance weights in a sample
    _mapping: str  # what a plain dict is in the data
    _by_priority: PrioritizedSampler | None  # the sampler, where it is one
    _direct: Direct | None = None  # the shortest way in, once there is a ring
    _limited_ring: Ring | None = None  # whose flow control counts, once it is there
    _limiter_version: Sequence[int] = (1,)  # [0] is 0 where nothing was ever limited

    @property
    def storage(self) -> Storage:
        """Where the items are."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """Who draws."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """Who decides where the next item goes."""
        return self._writer

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use another storage from now on; the one before is returned.

        Args:
            storage: the new one, with what is in it.
            collate_fn: the new one; None is the default one.
        """
        self._drop_prefetched()
        before = self._storage
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.release(before)
        before.detach(self)
        self._storage, self._collate_fn = storage, collate_fn
        self._join()
        return before

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use another sampler from now on; the one before is returned.

        A `PrioritizedSampler` that takes over from another finds the priorities that are there;
        where there were none, every item gets the default priority.

        Raises:
            ValueError: the storage is shared, and its priorities are kept with another alpha or
                eps.
        """
        self._drop_prefetched()
        before = self._sampler
        if isinstance(before, PrioritizedSampler):
            before.release(self._storage)
        self._sampler = sampler
        try:
            self._join()
        except BaseException:
            self._sampler = before
            self._join()
            raise
        return before

    def set_writer(self, writer: Writer) -> Writer:
        """Use another writer from now on; the one before is returned.

        Raises:
            RuntimeError: the storage is shared, and this writer cannot be.
        """
        self._drop_prefetched()
        before, self._writer = self._writer, writer
        try:
            self._join()
        except BaseException:
            self._writer = before
            self._join()
            raise
        return before

    @property
    def batch_size(self) -> int | None:
        """Of ``sample()`` and of iteration."""
        return self._batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """Of the draws; None is torch's default one."""
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        for part in (self._storage, self._sampler, self._writer):
            part._rng = generator  # TorchRL's name: parts of others read it

    def set_rng(self, generator: torch.Generator | None) -> None:
        """The same as setting `generator`."""
        self.generator = generator

    @property
    def shared(self) -> bool:
        """Whether reads are validated, and samples say their generation."""
        return self._shared or self._storage.shared

    def share(self, shared: bool = True) -> Self:
        """Treat the buffer as shared, or not; a storage in a directory always is."""
        self._shared = shared
        return self

    @property
    def transform(self) -> Any:
        """The chain of transforms."""
        return self._transform

    @property
    def initialized(self) -> bool:
        """Whether the parts are made."""
        raise NotImplementedError

    @property
    def _planned_capacity(self) -> int:
        """Of a buffer whose parts are not made yet: the storage's, where it is there already."""
        raise NotImplementedError

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which ``extend`` appends."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        if self._dim_extend is not None and dim != self._dim_extend:
            raise RuntimeError(
                f"dim_extend is {self._dim_extend} and what is stored was appended along it; make "
                f"a new buffer for dim_extend={dim}"
            )
        self._dim_extend = dim

    @property
    def write_count(self) -> int:
        """Elements written so far through ``add`` and ``extend``, by everybody."""
        return int(getattr(self._writer, "write_count", getattr(self._writer, "_write_count", 0)))

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """What keeps writers and samplers in step, for all processes; None: nothing.

        It can be set while everything runs; a ratio counts from then on.

        Raises:
            TypeError: set, and the storage is not one of this package.
            RuntimeError: set, and the items are objects of this process (`ListStorage`).
            ValueError: set, and ``min_size`` is larger than the buffer, or a queue was asked for
                where there are priorities.
        """
        engine = getattr(self._storage, "open_engine", None)
        return None if engine is None else engine.limiter

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        storage = self._storage
        if not isinstance(storage, RingBacked):
            raise TypeError(
                f"a rate_limiter needs a storage of this package; {type(storage).__name__} is not "
                "one"
            )
        shareable(storage).set_limiter(limiter)

    def append_transform(self, transform: Transform, *, invert: bool = False) -> Self:
        """Add a transform at the end.

        Args:
            transform: called with every sample and every ``rb[i]``; its ``inv``, if it has one,
                with what is written.
            invert: turn it round: it is called with what is written.

        Returns:
            The buffer.
        """
        self._transform.append(transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Add a transform before the one at ``index``; see `append_transform`."""
        self._transform.insert(index, transform, invert=invert)
        return self

    def _drop_prefetched(self) -> None:
        """Forget the batches that were made ahead."""
        raise NotImplementedError

    def _join(self) -> None:
        """Make the parts know each other, and choose the paths."""
        storage = self._storage
        self.generator = self._generator
        self._writer.register_storage(storage)
        self._choose_path()
        if isinstance(storage, TensorStorage):
            storage.mapping = self._mapping
        self._record()
        storage.add_reader(self)
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.bind(storage)

    def _choose_path(self) -> None:
        """The native calls do the work where nobody has put something else in between."""
        storage, sampler, writer = self._storage, self._sampler, self._writer
        self._native_write = (
            storage.writes_natively
            and type(writer).add is RoundRobinWriter.add
            and type(writer).extend is RoundRobinWriter.extend
        )
        self._by_priority = sampler if isinstance(sampler, PrioritizedSampler) else None
        ring = getattr(storage, "ring", None)
        self._limited_ring = ring if isinstance(storage, RingBacked) else None
        if self._limited_ring is not None:
            self._limiter_version = self._limited_ring.flow.version
        else:  # before the first write each sample asks
            self._limiter_version = (int(isinstance(storage, RingBacked)),)
        self._ring_priorities = (
            storage.writes_natively
            and isinstance(sampler, PrioritizedSampler)
            and sampler.ring is ring
        )
        self._native_sample = storage.draws_natively and (
            type(sampler).sample is RandomSampler.sample
            or (
                isinstance(sampler, PrioritizedSampler)
                and type(sampler).sample is PrioritizedSampler.sample
                and sampler.ring is ring
            )
        )
        # Ours know from the ring what was written; somebody else's is told.
        self._tell_sampler = type(sampler).add is not Sampler.add or (
            type(sampler).extend is not Sampler.extend
        )
        if isinstance(sampler, PrioritizedSampler):
            self._tell_sampler = (
                type(sampler).add is not PrioritizedSampler.add
                or type(sampler).extend is not PrioritizedSampler.extend
            )
        self._direct = self._way_in()
        track = isinstance(writer, RoundRobinWriter) and writer.track_generations
        self._track_generations = storage.tracks_generations and track

    def _way_in(self) -> Direct | None:
        """The shortest way in, where nobody has put anything in between."""
        storage, sampler = self._storage, self._sampler
        prioritized = isinstance(sampler, PrioritizedSampler)
        if (
            not isinstance(storage, TensorStorage)
            or not self._native_write
            or not storage.appends_natively
            or self._tell_sampler
            or (prioritized and not self._ring_priorities)
        ):
            return None
        return Direct.into(storage, storage.rows, self._priority_entry if prioritized else None)

    @property
    def _priority_entry(self) -> str | tuple[str, ...] | None:
        """Entry of what is written that says its priority; None where no entry does."""
        return None

    def _record(self) -> None:
        """Say in the directory what kind of buffer this is."""
        record(self)

    def ring_is_there(self) -> None:
        """Called by the storage once the first write has defined the ring."""
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.bind(self._storage)
        self._choose_path()
        self._record()

    def _rows(self) -> Rows | None:
        storage = self._storage
        return storage.rows if isinstance(storage, TensorStorage) else None

    def _collate(self, data: Any) -> Any:
        """A batch from what the storage gave."""
        if self._collate_fn is None:
            return self._storage.collate(data)
        return self._collate_fn(self._storage.uncollated(data))
