"""The parts of a buffer, how they are exchanged, and what is done to all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch

from shmbuffer.buffers.data_path.description import describe
from shmbuffer.buffers.data_path.late import LatePart, in_child
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Draws, Prefetcher
from shmbuffer.errors import ShmBufferError
from shmbuffer.memory import Engine, RateLimiter
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers import PrioritizedSampler, Sampler
from shmbuffer.samplers.rank import UNKNOWN
from shmbuffer.samplers.sampler import between_forks
from shmbuffer.samplers.taking import Consumes
from shmbuffer.storages import Storage
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.eager import eager
from shmbuffer.torchrl.transforms import Compose, Transform
from shmbuffer.units import SampleUnit
from shmbuffer.writers import Writer
from shmbuffer.writers.writer import write_count_of


def ring_backed(storage: Storage, what: str) -> RingBacked:
    """The storage, if it is one of this package; else a TypeError: ``what`` it is needed for."""
    if isinstance(storage, RingBacked):
        return storage
    raise TypeError(f"{what} a storage of this package; {type(storage).__name__} is not one")


def shareable(storage: Storage, what: str) -> Engine:
    """The engine of a storage, which keeps both sides in step."""
    backed = ring_backed(storage, what)
    try:
        return backed.engine()
    except RuntimeError as error:
        if isinstance(error, ShmBufferError):
            raise
        raise RuntimeError(f"there is no flow control here: {error}") from error


class Parts:
    """Storage, sampler, writer and transforms, and the plan made from them."""

    _storage: Storage = cast(Any, LatePart())
    _sampler: Sampler = cast(Any, LatePart())
    _writer: Writer = cast(Any, LatePart())
    _transform: Compose = cast(Any, LatePart())
    _plan: Plan
    _sample_unit: SampleUnit | None
    _collate_fn: Callable[[Any], Any] | None
    _batch_size: int | None
    _dim_extend: int | None
    _generator: torch.Generator | None
    _rank_given: int | None  # of this learner among several, if given
    _prefetcher: Prefetcher | None
    _shared: bool
    _pin_memory: bool
    _weight_keys: tuple[str, ...]  # names of the importance weights in a sample
    _making = ForkLock(in_child)  # while the parts are made
    _makers: dict[str, Any] | None  # of the parts; None once they are made
    _also_chooses = ""  # what chooses items besides the sampler; then samples are made by parts
    _closed = False
    _mapping = "dict"  # what a plain dict is in the data
    _priority_key: str | tuple[str, ...] | None = None  # entry of the data that holds priorities

    @property
    def storage(self) -> Storage:
        """Where the items are."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """Draws items."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """Places new items."""
        return self._writer

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use another storage, with its items, and another ``collate_fn``; returns the old one."""
        self._drop_prefetched()
        before = self._storage
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.release(before)
        before.detach(self)
        self._storage, self._collate_fn = storage, collate_fn
        self._join()
        return before

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use another sampler; returns the old one.

        A `PrioritizedSampler` takes over existing priorities; without any, all items get the
        default one.

        Raises:
            ValueError: the storage is shared, with priorities of another alpha or eps.
        """
        self._drop_prefetched()
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.release(self._storage)
        return self._replace("_sampler", sampler)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Use another writer; returns the old one. RuntimeError: it cannot share the storage."""
        self._drop_prefetched()
        return self._replace("_writer", writer)  # type: ignore[no-any-return]

    def _replace(self, name: str, part: Any) -> Any:
        """Exchange a part, unless the new one does not fit; returns the old one."""
        before = getattr(self, name)
        setattr(self, name, part)
        try:
            self._join()
        except BaseException:
            setattr(self, name, before)
            self._join()
            raise
        return before

    @property
    def batch_size(self) -> int | None:
        """The batch size of ``sample()`` and of iteration."""
        return self._batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the draws; None is torch's default one."""
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        for part in (self._storage, self._sampler, self._writer):
            part._rng = generator  # TorchRL's name, for foreign parts
        self._ask_rank()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set `generator`."""
        self.generator = generator

    @property
    def shared(self) -> bool:
        """True if reads are validated, and samples have ``index_generation``."""
        return self._shared or self._storage.shared

    def share(self, shared: bool = True) -> Self:
        """Treat the buffer as shared, or not; a storage in a directory always is."""
        self._shared = shared
        if self.initialized:
            self._ask_rank()
            self._make_plan()
        return self

    @property
    def transform(self) -> Any:
        """The chain of transforms."""
        return self._transform

    @property
    def initialized(self) -> bool:
        """True if the parts are made: always, unless ``delayed_init`` was asked for."""
        return self._makers is None

    @property
    def plan(self) -> Plan:
        """The ways that data take now, and why no shorter ones; to be printed."""
        return self._planned()

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
        if self.initialized:
            self._make_plan()

    @property
    def write_count(self) -> int:
        """Elements written so far through ``add`` and ``extend``, by all processes."""
        return write_count_of(self._writer)

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """Keeps writers and samplers in step, for all processes; can be set at any time.

        Raises:
            TypeError: set, and the storage is not one of this package.
            RuntimeError: set, and the items are objects of this process (`ListStorage`).
            ValueError: set, and ``min_size`` is larger than the buffer, or a prioritized buffer
                would be a queue.
        """
        engine = getattr(self._storage, "open_engine", None)
        return None if engine is None else engine.limiter

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        if not (limiter is None or isinstance(limiter, RateLimiter)):
            raise TypeError(f"rate_limiter is a RateLimiter, or None; got {limiter!r}")
        shareable(self._storage, "a rate_limiter needs").set_limiter(limiter)

    def append_transform(self, transform: Transform, *, invert: bool = False) -> Self:
        """Add a transform at the end.

        Args:
            transform: called with every sample and every ``rb[i]``; its ``inv``, if any, with
                new data.
            invert: call the transform with new data instead.

        Returns:
            The buffer.
        """
        self._transform.append(transform, invert=invert)
        self._measure_hand_over()
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Add a transform before the one at ``index``; see `append_transform`."""
        self._transform.insert(index, transform, invert=invert)
        self._measure_hand_over()
        return self

    # -- all of them at once -------------------------------------------------------------------

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every item; the cursor goes to 0.

        If no other handle has the buffer, the next write may have another form (keys, dtypes,
        shapes), which it defines.

        Args:
            empty_write_count: set the write count to 0 too.

        Raises:
            RuntimeError: the writer is an `ImmutableDatasetWriter`; nothing was changed.
        """
        self._drop_prefetched()
        storage = self._storage
        self._writer._empty(empty_write_count)  # first: it may refuse
        storage.forget(keep_write_count=not empty_write_count)
        self._sampler._empty()
        storage.notify_emptied()

    @eager
    def __len__(self) -> int:
        """Number of elements."""
        return len(self._storage)

    def stats(self) -> dict[str, Any]:
        """One flat dict: TorchRL's keys, and what the engine counts."""
        if self._makers is not None:  # stats do not make the parts
            storage = self._makers["storage"]
            empty = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "utilization": 0.0}
            capacity = storage.max_size if isinstance(storage, Storage) else 0
            return {**empty, "capacity": capacity, "initialized": False}
        storage = self._storage
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
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": True,
        }

    def flush(self) -> None:
        """Write all committed items to disk, so that they survive a power cut.

        Raises:
            DurabilityError: the disk has failed.
        """
        engine = self._storage.open_engine
        if engine is not None:
            engine.flush()

    def close(self) -> None:
        """Leave the buffer; committed items stay in its directory. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._storage.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _ask_rank(self) -> None:
        """Have the sampler's next draw find out the rank."""
        self._sampler._rank_in_draws = UNKNOWN
        self._sampler._rank_given = self._rank_given, self._shared

    def _draws(self) -> Draws:
        """The position of the draws."""
        generator = self._generator
        state = None if generator is None else between_forks(generator.get_state)
        return Draws(self._sampler._position(), generator, state)

    def _go_to(self, draws: Draws) -> None:
        """Continue drawing from a position."""
        with self._plan.choosing():
            self._sampler._rewind(draws.position)
            if draws.generator is not None and draws.state is not None:
                between_forks(draws.generator.set_state, draws.state)

    def _drop_prefetched(self) -> None:
        """Forget the batches that were made ahead, as if they had never been drawn."""
        if self._prefetcher is not None:
            self._prefetcher.drop()

    def _measure_hand_over(self) -> None:
        """Measure again where the next batches are made, because they have changed."""
        if self._prefetcher is not None:
            self._prefetcher.hand_over.restart()

    def _join(self) -> None:
        """Make the parts know each other."""
        storage = self._storage
        self.generator = self._generator
        self._writer.register_storage(storage)
        if isinstance(storage, TensorStorage):
            storage.mapping = self._mapping
        elif not isinstance(storage, RingBacked):
            storage.attach(self)  # a ring gives new items their priority itself
        self._make_plan()

    def _make_plan(self) -> Plan:
        """Make the plan from the present parts."""
        describe(self)
        if isinstance(self._sampler, PrioritizedSampler | Consumes):
            self._sampler.bind(self._storage)
        self._plan = Plan(self)
        self._measure_hand_over()
        return self._plan

    def _planned(self) -> Plan:
        """The plan; a new one if the storage has a new ring or new rows."""
        plan = self._plan
        backed = plan.ring_backed
        if backed is None or plan.payload is (backed._mover or backed.mover()):
            return plan
        return self._make_plan()

    def _collate(self, data: Any) -> Any:
        """A batch from items of the storage."""
        if self._collate_fn is None:
            return self._storage.collate(data)
        return self._collate_fn(self._storage.uncollated(data))
