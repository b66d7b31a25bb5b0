"""The buffer: a storage, a sampler and a writer, and what goes in and out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.memory import patience
from shmbuffer.replay import pinned
from shmbuffer.replay.buffers.access import StorageOrder, swap_dims
from shmbuffer.replay.buffers.arguments import refuse
from shmbuffer.replay.buffers.drawing import Drawing
from shmbuffer.replay.buffers.prefetch import Prefetcher
from shmbuffer.replay.buffers.whole import Whole
from shmbuffer.replay.eager import eager
from shmbuffer.replay.form.batches import stack
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.keys import WEIGHT_KEYS
from shmbuffer.replay.samplers import RandomSampler, Sampler
from shmbuffer.replay.storages import ListStorage, Storage
from shmbuffer.replay.storages.ring_backed import RingBacked
from shmbuffer.replay.storages.tensor import TensorStorage
from shmbuffer.replay.transforms import Transform, compose
from shmbuffer.replay.writers import RoundRobinWriter, Writer

if TYPE_CHECKING:
    from shmbuffer.memory import RateLimiter

DEFAULT_CAPACITY = 1000  # of the ListStorage that a buffer without a storage gets, as in TorchRL
_PARTS = frozenset(("_storage", "_sampler", "_writer", "_transform"))


class ReplayBuffer(StorageOrder, Drawing, Whole):
    """A replay buffer made of three parts.

    Where all parts are of this package, a batch is one native call: ``extend`` is claim, copy,
    commit; ``sample`` is draw, gather and validate. Parts of your own work through `Storage`,
    `Sampler` and `Writer`.

    Args:
        storage: where the items are; None is a ``ListStorage(1000)``. Or something to call that
            makes one.
        sampler: who draws; None is a `RandomSampler`.
        writer: who decides where the next item goes; None is a `RoundRobinWriter`.
        collate_fn: called with what the storage gives for a batch; None takes it as it is (a list
            is stacked).
        pin_memory: have samples in pinned memory, gathered there at once. A sample is the caller's
            for as long as he holds any part of it, and its memory is used again when the transfers
            from it have ended; see docs/memory.md. Without a GPU a warning, and ordinary memory.
        prefetch: make that many batches ahead, in as many threads; needs ``batch_size``. What is in
            a batch is drawn when it is ordered, in the caller's thread; see `Prefetcher`. Also on a
            shared buffer. Its rows are whole items that were there when it was made, and may have
            been written over while it waited, as while the caller works with it.
        transform: called with every sample and every ``rb[i]``; one, several, or a `Compose`. See
            `append_transform`.
        transform_factory: called without arguments for the transform, in place of ``transform``,
            when the buffer is first used.
        batch_size: of ``sample()`` and of iteration.
        dim_extend: dimension of the data along which ``extend`` appends; None is
            ``storage.ndim - 1``.
        checkpointer: of the storage; None leaves the storage's own.
        generator: of the draws; None is torch's default one.
        shared: treat the buffer as shared also where its storage is in anonymous memory: samples
            carry ``index_generation``, reads are validated copies. A storage in a directory is
            shared by itself.
        compilable: accepted; the calls are marked for `torch.compile` either way.
        delayed_init: make the parts when the buffer is first used: it can be pickled before that
            with whatever makes them. None is True where there is a ``transform_factory``.
        weight_key: name of the importance weights in a sample; None is ``"_weight"`` and
            ``"priority_weight"``, one tensor under both.
        rate_limiter: what keeps writers and samplers in step, or makes a queue of the buffer; see
            `RateLimiter`. It is the directory's, and so everybody's. None leaves what is set there.
        **later: ``sample_unit``, ``consume_after_n_samples``, ``service_backend``,
            ``service_backend_options``, ``transport``, ``transport_options``: known from TorchRL,
            not there yet.

    Raises:
        NotImplementedError: one of ``later`` asks for something.
        ValueError: ``prefetch``, or a sampler with ``drop_last``, without a batch size.
        TypeError: both ``transform`` and ``transform_factory``, or an argument nobody knows.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        >>> rb.extend(torch.arange(3))
        tensor([0, 1, 2])
        >>> rb.sample().shape
        torch.Size([4])

    Source: ``torchrl.data.ReplayBuffer``.
    """

    family: ClassVar[str] = "ReplayBuffer"
    """The name under which a directory remembers this class and those derived from it."""
    default_writer: ClassVar[type[RoundRobinWriter]] = RoundRobinWriter
    _mapping = "dict"  # what a plain dict is in the data

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Iterable[Transform] | None = None,
        transform_factory: Callable[[], Transform] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        weight_key: str | None = None,
        rate_limiter: RateLimiter | None = None,
        **later: Any,
    ) -> None:
        refuse(type(self).__name__, later)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size has to be at least 1, got {batch_size}")
        if prefetch and batch_size is None:
            raise ValueError(
                f"prefetch={prefetch} makes batches ahead, so it has to know their size: give "
                "batch_size to the constructor"
            )
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other; give one of them")
        self._collate_fn = collate_fn
        self._pin_memory = pinned.wanted(pin_memory)
        self._batch_size = batch_size
        self._dim_extend = dim_extend
        self._generator = generator
        self._shared = shared
        self.compilable = bool(compilable)
        self._weight_key = weight_key
        self._weight_keys = WEIGHT_KEYS if weight_key is None else (weight_key,)
        self._prefetcher = Prefetcher(prefetch, self._order) if prefetch else None
        self._iterator: Iterator[Any] | None = None
        self._makers: dict[str, Any] | None = {
            "storage": storage,
            "sampler": sampler,
            "writer": writer,
            "transform": transform_factory or transform,
            "is_factory": transform_factory is not None,
            "checkpointer": checkpointer,
            "rate_limiter": rate_limiter,
        }
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            self._make_parts()

    def _make_parts(self) -> None:
        """Make what the constructor was given the makers of. Once."""
        makers, self._makers = self._makers, None
        assert makers is not None
        storage, sampler, writer = (makers[name] for name in ("storage", "sampler", "writer"))
        self._storage = ListStorage(DEFAULT_CAPACITY) if storage is None else made(storage)
        self._sampler = RandomSampler() if sampler is None else made(sampler)
        self._writer = self.default_writer() if writer is None else made(writer)
        transform = makers["transform"]
        self._transform = compose(transform() if makers["is_factory"] else transform)
        if makers["checkpointer"] is not None:
            self._storage.checkpointer = makers["checkpointer"]
        if self._batch_size is None and getattr(self._sampler, "drop_last", False):
            raise ValueError(
                f"{type(self._sampler).__name__}(drop_last=True) has to know how large a whole "
                "batch is: give batch_size to the constructor of the buffer"
            )
        if self.dim_extend < 0 or (self._dim_extend and 1 < self._storage.ndim <= self._dim_extend):
            raise ValueError(
                f"dim_extend has to be from 0 to ndim - 1 = {self._storage.ndim - 1}, "
                f"got {self._dim_extend}"
            )
        self._join()
        limiter = makers["rate_limiter"]
        if limiter is not None and not limiter.says_the_same(self.rate_limiter):
            self.rate_limiter = limiter  # else the ratio would count anew

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Asked only for what is not there: a part, before the first use of a delayed buffer.
            if name in _PARTS and self.__dict__.get("_makers") is not None:
                self._make_parts()
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the parts are made: always, unless ``delayed_init`` was asked for."""
        return self._makers is None

    @property
    def _planned_capacity(self) -> int:
        storage = None if self._makers is None else self._makers["storage"]
        return storage.max_size if isinstance(storage, Storage) else 0

    def __repr__(self) -> str:
        if self._makers is not None:
            return f"{type(self).__name__}(not used yet)"
        parts = {
            "storage": self._storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
            "collate_fn": self._collate_fn,
        }
        lines = "".join(f",\n    {name}={part!r}" for name, part in parts.items())
        return f"{type(self).__name__}({lines[1:]})"

    def __getstate__(self) -> dict[str, Any]:
        self._drop_prefetched()
        depth = None if self._prefetcher is None else self._prefetcher.depth
        kept = self.__dict__.keys() - {"_direct", "_limited_ring", "_limiter_version"}
        state = {name: self.__dict__[name] for name in kept}
        return {**state, "_prefetcher": depth, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if (depth := state["_prefetcher"]) is not None:
            self._prefetcher = Prefetcher(depth, self._order)
        if self._makers is None:
            self._join()

    # -- writing -------------------------------------------------------------------------------

    @eager
    def add(self, data: Any, timeout: float | None = None) -> int | torch.Tensor:
        """Write one item ``[*lanes, ...]``.

        Args:
            data: the item.
            timeout: seconds to wait for others. None: 5 s for a slot that is being written, and as
                long as it takes for a `RateLimiter`.

        Returns:
            Its index, an int; where the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed. A plain number takes the dtype of its leaf, if that can hold it.
            TypeError: None.
            RingOverrunError: the ring came round to a slot that a living writer is filling.
            RateLimitTimeout, RateLimitError: samples have to be drawn first; nothing was changed.

        Cost: one native call.
        """
        if timeout is not None:
            with patience.within(timeout):
                return self.add(data)
        direct = self._direct
        if direct is not None and not self._transform.transforms:
            index = direct.add(data)
            if index is not None:
                return index
        if data is None:
            self._refuse_none("add")
        data = self._inverted(data) if len(self._transform) else data
        return self._nothing() if data is None else self._write(data, True, None)

    @eager
    def extend(
        self, data: Any, *, update_priority: bool | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Write a batch: whole or not at all, also if the process is killed in the middle.

        Args:
            data: ``[n, *lanes, ...]`` (with ``dim_extend`` d, n is dimension d of the data). A list
                is a stack of items; a tuple or dict is a PyTree.
            update_priority: of TensorDict buffers; has to be None here.
            timeout: as of `add`.

        Returns:
            Indices, int64 ``[n]``; where the storage has lanes, ``[n * lanes, ndim]``. Of more
            items than the capacity the last ones stay. None, where a transform has kept all data
            back (one that waits for more steps), is no index: ``[0]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed.
            TypeError: None; an empty list writes nothing.
            RingOverrunError, RateLimitTimeout, RateLimitError: as `add`.

        Cost: one native call; 0.6 µs a leaf more where something has to be converted.
        """
        if timeout is not None:
            with patience.within(timeout):
                return self.extend(data, update_priority=update_priority)
        if update_priority is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.extend(update_priority={update_priority}): only TensorDict "
                "buffers find priorities in the data; use update_priority(index, priority)"
            )
        direct = self._direct
        if direct is not None and not self._transform.transforms and not self._dim_extend:
            written = direct.extend(data)
            if written is not None:
                return written
        if data is None:
            self._refuse_none("extend")
        data = self._batch_of(data)
        index = self._nothing() if data is None else self._write(data, False, None)
        assert isinstance(index, torch.Tensor)
        return index

    # -- sampling ------------------------------------------------------------------------------

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: how many items; None is the constructor's. Where both are given and differ,
                this one wins and a warning says so.
            return_info: return ``(data, info)``; info has ``"index"``, and, where there are any,
                the weights and ``"index_generation"``.
            min_size: wait until so many items are there.
            timeout: seconds to wait, for them and for a `RateLimiter`; None: as long as it takes.

        Returns:
            The data ``[batch_size, ...]`` in the form in which they were written.

        Raises:
            EmptyBufferError: nothing to draw from.
            RateLimitTimeout, RateLimitError: items have to be written first.
            RuntimeError: no batch size anywhere.

        Cost: one native call; 0.4 µs a leaf for the tensors that it fills.
        """
        count = self._count(batch_size)
        asked = min_size is not None or timeout is not None
        if not asked and (not self._limiter_version[0] or self._admitted(count)):
            try:
                data, info = self._next(count)
            except BaseException:
                self._not_drawn(count)
                raise
        else:
            data, info = self._in_turn(
                count, min_size, timeout, lambda: self._next(count), lambda batch: batch
            )
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Samples, until the sampler has run out; a `RandomSampler` never does.

        A pass that was left in the middle goes on where it was.

        Raises:
            RuntimeError: the constructor was given no batch size.
        """
        if self._batch_size is None:
            raise RuntimeError("iteration needs a batch size: give batch_size to the constructor")
        if self._passes.ran_out:
            self._passes.ran_out = False
        while not self._passes.ran_out:
            yield self.sample()

    @property
    def _passes(self) -> Any:
        """Who knows where a pass ends; looked up each time: the sampler may be exchanged."""
        return self._sampler if self._prefetcher is None else self._prefetcher

    def next(self) -> Any:
        """The next sample of an iteration over the buffer; None at its end, and then anew."""
        if self._iterator is None:
            self._iterator = iter(self)
        data = next(self._iterator, None)
        if data is None:
            self._iterator = None
        return data

    @eager
    def update_priority(self, index: Any, priority: Any, *, generation: Any = None) -> Any:
        """Change priorities.

        Args:
            index: what a sample or a write gave: ``[n]``, ``[n, ndim]``, an int.
            priority: ``[n]`` or one number; finite and not negative. Of several dimensions, with
                ``dim_extend``: as the batch was given, ``[lanes, n]``.
            generation: ``index_generation`` of the sample, ``[n]``: an item that was written over
                since is left alone, and counted as stale. None sets whatever is there.

        Returns:
            `PriorityUpdate`: how many were applied, and how many were stale.

        Raises:
            ValueError: NaN, infinite or negative; nothing was changed.
            IndexError: out of range; nothing was changed.

        Cost: one native call.
        """
        if self.dim_extend and np.ndim(priority) > 1:
            priority = swap_dims(torch.as_tensor(priority), self.dim_extend).flatten()
        if generation is None:
            return self._sampler.update_priority(index, priority, storage=self._storage)
        return self._sampler.update_priority(
            index, priority, storage=self._storage, generation=generation
        )

    def mark_update(self, index: Any) -> None:
        """Give the items at ``index`` the default priority."""
        self._sampler.mark_update(index, storage=self._storage)

    # -- inside --------------------------------------------------------------------------------

    def _batch_of(self, data: Any) -> Any:
        """A batch as the storage takes it: stacked, transformed, the right dimension first."""
        if type(data) is list and isinstance(self._storage, TensorStorage):
            if not data:
                return None
            # Transforms, and writers of somebody else's, are given tensors.
            seen = not self._native_write or bool(len(self._transform) or self.dim_extend)
            data = stack(data, self._mapping, tensors=seen)
        if len(self._transform):
            data = self._transform.inv(data)
        if self.dim_extend and data is not None:
            data = swap_dims(data, self.dim_extend)
        return data

    def _inverted(self, item: Any) -> Any:
        """One item on its way in. Transforms see a TensorDict with a dimension more, of size 1."""
        if not is_collection(item):
            return self._transform.inv(item)
        with item.unsqueeze(-1) as batch:
            found = self._transform.inv(batch)
            return None if found is None else found.squeeze(-1)

    def _refuse_none(self, call: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}.{call}(None): there is nothing to write; give it "
            f"{'an item' if call == 'add' else 'a batch (an empty list writes nothing)'}, or leave "
            "the call out"
        )

    def _nothing(self) -> torch.Tensor:
        """What a write of nothing returns."""
        ndim = self._storage.ndim
        return torch.zeros((0,) if ndim == 1 else (0, ndim), dtype=torch.int64)

    def _write(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> int | torch.Tensor:
        writer, storage = self._writer, self._storage
        if self._native_write and isinstance(storage, RingBacked):
            given = priorities if self._ring_priorities else None
            first, count = storage.append(data, single, given)
            index = storage.written(first, count, single=single)
            if self._tell_sampler:
                (self._sampler.add if single else self._sampler.extend)(index)
            if given is not priorities:
                self._sampler.update_priority(index, priorities, storage=storage)
            return index
        index = writer.add(data) if single else writer.extend(data)
        if index is not None:
            if single:
                self._sampler.add(index)
            else:
                self._sampler.extend(index)
            if priorities is not None:
                self._sampler.update_priority(index, priorities, storage=storage)
        return index  # type: ignore[no-any-return]


def made(part: Any) -> Any:
    """A part, or what makes one."""
    if isinstance(part, (Storage, Sampler, Writer)):
        return part
    if not callable(part):
        raise TypeError(f"a storage, sampler or writer is needed, or what makes one; got {part!r}")
    return part()
