"""The buffer: a storage, a sampler and a writer, and the data that go in and out."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch

from shmbuffer.buffers.calls.access import StorageOrder
from shmbuffer.buffers.calls.columnar import Columnar
from shmbuffer.buffers.calls.sampling import Sampling
from shmbuffer.buffers.calls.saving import Saving
from shmbuffer.buffers.calls.serving import Serving
from shmbuffer.buffers.calls.writing import Writing
from shmbuffer.buffers.data_path.late import LatePlan
from shmbuffer.buffers.data_path.prefetch import Prefetcher
from shmbuffer.buffers.flow.publishing import Publishing
from shmbuffer.buffers.flow.reserving import Reserving
from shmbuffer.buffers.unsupported import refuse
from shmbuffer.items.indices import as_int
from shmbuffer.items.keys import WEIGHT_KEYS
from shmbuffer.memory import RateLimiter
from shmbuffer.samplers import ConsumingSampler, RandomSampler, Sampler
from shmbuffer.samplers.rank import require_rank
from shmbuffer.storages import ListStorage, Storage
from shmbuffer.tensors import pinned
from shmbuffer.tensors.eager import eager
from shmbuffer.torchrl.transforms import Transform, compose
from shmbuffer.units import SampleUnit
from shmbuffer.writers import RoundRobinWriter, Writer

DEFAULT_CAPACITY = 1000  # of the ListStorage that a buffer without a storage gets, as in TorchRL


class ReplayBuffer(
    Writing,
    Reserving,
    Sampling,
    StorageOrder,
    Serving,
    Saving,
    Columnar,
    Publishing,
    metaclass=ABCMeta,  # so that an ensemble counts as one
):
    """A replay buffer made of three parts.

    If all parts are of this package, a batch is one native call: ``extend`` is claim, copy, commit;
    ``sample`` is draw, gather and validate. Parts of your own derive from `Storage`, `Sampler` and
    `Writer`.

    Args:
        storage: where the items are, or a function that makes one; None is a ``ListStorage(1000)``.
        sampler: draws items; None is a `RandomSampler`.
        writer: places new items; None is a `RoundRobinWriter`.
        collate_fn: called with the storage's items of a batch; None takes them as they are (a list
            is stacked).
        pin_memory: gather samples in pinned memory. It is reused once no part of a sample is held
            and the transfers from it have ended; see docs/memory.md. Without a GPU there is a
            warning, and ordinary memory.
        prefetch: draw and make so many batches ahead, also on a shared buffer; needs
            ``batch_size``. As many threads make them, or the caller's thread if that is measured to
            be faster; ``print(buffer.plan)`` says which. Batches are always drawn in the caller's
            thread, so both ways give the same ones. Items may be overwritten while a batch waits.
        transform: called with every sample and every ``rb[i]``; one, several, or a `Compose`. See
            `append_transform`.
        transform_factory: makes the transform when the buffer is first used, instead of
            ``transform``.
        batch_size: of ``sample()`` and of iteration.
        dim_extend: dimension of the data along which ``extend`` appends; None is
            ``storage.ndim - 1``.
        checkpointer: of the storage; None keeps the storage's own.
        generator: of the draws; None is torch's default one.
        rank: of this learner among several, from 0; None: torch.distributed's, else that in the
            variable ``RANK``, else 0. Draws on a shared buffer differ by rank; rank 0 draws as
            without one. With a ``generator`` only a rank that is given here counts.
        shared: treat the buffer as shared even in anonymous memory: samples carry
            ``index_generation``, reads are validated copies. A directory is always shared.
        compilable: accepted; the calls are marked for `torch.compile` either way.
        delayed_init: make the parts when the buffer is first used, so that it can be pickled
            before that with their factories. None is True with a ``transform_factory``.
        weight_key: name of the importance weights in a sample; None is ``"_weight"`` and
            ``"priority_weight"``, one tensor under both.
        rate_limiter: keeps writers and samplers in step, or makes a queue of the buffer; see
            `RateLimiter`. It belongs to the directory. None keeps its present limiter.
        sample_unit: what a batch has for each item drawn: a `Sequence` of steps, one transition
            over n of them (`NStep`), or the item with the frames before it (`FrameStack`); None is
            the item. Batch sizes count the draws.
        consume_after_n_samples: a `ConsumingSampler` with that ``max_sample_count``; not with
            ``prefetch``, or another sampler.
        **later: ``service_backend``, ``service_backend_options``, ``transport``,
            ``transport_options`` of TorchRL, so far only with their defaults.

    Raises:
        NotImplementedError: one of ``later`` is not the default.
        ValueError: ``prefetch``, or a sampler with ``drop_last``, without a batch size.
        TypeError: both ``transform`` and ``transform_factory``, or an unknown argument.

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
    """The name of this class, and of those derived from it, in a directory."""
    default_writer: ClassVar[type[RoundRobinWriter]] = RoundRobinWriter

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
        rank: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        weight_key: str | None = None,
        rate_limiter: RateLimiter | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        **later: Any,
    ) -> None:
        refuse(type(self).__name__, later)
        if batch_size is not None and (batch_size := as_int("batch_size", batch_size)) < 1:
            raise ValueError(f"batch_size has to be at least 1, got {batch_size}")
        if prefetch is not None and (prefetch := as_int("prefetch", prefetch)) < 0:
            raise ValueError(f"prefetch has to be at least 0, got {prefetch}")
        if prefetch and batch_size is None:
            raise ValueError(
                f"prefetch={prefetch} makes batches ahead and has to know their size: give "
                "batch_size to the constructor"
            )
        if consume_after_n_samples is not None:
            sampler = _consuming(sampler, consume_after_n_samples, prefetch)
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other; give one of them")
        if sample_unit is not None and not isinstance(sample_unit, SampleUnit):
            raise TypeError(f"sample_unit is a SampleUnit, such as Sequence, got {sample_unit!r}")
        self._sample_unit = sample_unit
        self._collate_fn = collate_fn
        self._pin_memory = pinned.wanted(pin_memory)
        self._batch_size = batch_size
        self._dim_extend = dim_extend
        self._generator = generator
        self._rank_given = require_rank(rank)
        self._shared = shared
        self.compilable = bool(compilable)
        self._weight_key = weight_key
        self._weight_keys = WEIGHT_KEYS if weight_key is None else (weight_key,)
        self._prefetcher = (
            Prefetcher(prefetch, self._order, self._draws, self._go_to) if prefetch else None
        )
        self._iterator = None
        self._makers = {
            "storage": storage,
            "sampler": sampler,
            "writer": writer,
            "transform": transform_factory or transform,
            "is_factory": transform_factory is not None,
            "checkpointer": checkpointer,
            "rate_limiter": rate_limiter,
        }
        if transform_factory is not None if delayed_init is None else delayed_init:
            self._plan = cast(Any, LatePlan(self))
        else:
            self._make_parts()

    def _make_parts(self) -> None:
        """Make the parts, once."""
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
                "Samplers with drop_last=True must work with a predictable batch-size: give "
                f"batch_size to the constructor of the buffer, or {type(self._sampler).__name__} "
                "drop_last=False"
            )
        if self.dim_extend < 0 or (self._dim_extend and 1 < self._storage.ndim <= self._dim_extend):
            raise ValueError(
                f"dim_extend has to be from 0 to ndim - 1 = {self._storage.ndim - 1}, "
                f"got {self._dim_extend}"
            )
        self._join()
        limiter = makers["rate_limiter"]
        same = isinstance(limiter, RateLimiter) and limiter.says_the_same(self.rate_limiter)
        if limiter is not None and not same:
            self.rate_limiter = limiter  # only then does the ratio start from zero

    def __repr__(self) -> str:
        if self._makers is not None or self._closed:
            return f"{type(self).__name__}({'closed' if self._closed else 'not used yet'})"
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
        own = ("_plan", "_making")
        state = {name: part for name, part in self.__dict__.items() if name not in own}
        return {**state, "_prefetcher": depth, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if (depth := state["_prefetcher"]) is not None:
            self._prefetcher = Prefetcher(depth, self._order, self._draws, self._go_to)
        if self._makers is None:
            self._join()
        else:
            self._plan = cast(Any, LatePlan(self))

    # -- writing -------------------------------------------------------------------------------

    @eager
    def add(
        self, data: Any, timeout: float | None = None, streams: int | None = None
    ) -> int | torch.Tensor:
        """Write one item ``[*lanes, ...]``.

        Args:
            data: the item.
            timeout: seconds to wait for others. None: 5 s for a slot that is being written, and
                without end for a `RateLimiter`.
            streams: number of its stream; see `extend`.

        Returns:
            Its index, an int; where the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed. A plain number takes the dtype of its leaf, if that can hold it.
            TypeError: None; for a TensorDict buffer a tuple or list, whose parts have no names.
            ValueError: a priority in the data of a TensorDict buffer is NaN, infinite or negative;
                nothing was changed.
            RingOverrunError: a living writer is still filling the next slot.
            RateLimitTimeout, RateLimitError: samples have to be drawn first; nothing was changed.

        Cost: one native call.
        """
        if streams is not None:
            return self._in_streams(data, True, streams, None, None, timeout)  # type: ignore[no-any-return]
        plan = self._plan
        fast = plan.fast_write
        if fast is not None and timeout is None and not plan.transforms:
            index = fast.write(data, True)
            if index is not None:
                return index  # type: ignore[no-any-return]
        return self._written(data, True, None, timeout)  # type: ignore[no-any-return]

    @eager
    def extend(
        self,
        data: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> torch.Tensor:
        """Write a batch: whole or not at all, also if the process is killed in the middle.

        Args:
            data: ``[n, *lanes, ...]`` (with ``dim_extend`` d, n is dimension d of the data). A list
                is a stack of items; a tuple or dict is a PyTree. An empty list writes nothing.
            update_priority: for TensorDict buffers only.
            timeout: see `add`.
            streams: the environment of this handle that each item is from, so that no slice mixes
                two of them: integers ``[n]`` (a list, an array, a tensor) from 0 to 2**24 - 1, or
                one int for the batch; None: 0. With lanes only one int: each lane is a stream. They
                are for the items after the transforms.
            stream_dim: the dimension of streams in the data: 0 for ``[streams, T, ...]``, 1 for
                ``[T, streams, ...]``. The items are stored step by step, in streams 0, 1, ...; the
                index has the form of the data.

        Returns:
            Indices, int64 ``[n]``; with lanes ``[n * lanes, ndim]``; ``[0]`` if a transform keeps
            all data back. If there are more items than the capacity, the last ones stay.

        Raises:
            SchemaMismatchError, TypeError, RingOverrunError, RateLimitTimeout, RateLimitError: as
                `add`.
            TypeError, ValueError: ``streams`` are no integers, out of range, not ``n``, or of a
                storage or writer without streams; nothing was changed.

        Cost: one native call; 0.6 µs a leaf more where something has to be converted.
        """
        if update_priority is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.extend(update_priority={update_priority}): only TensorDict "
                "buffers find priorities in the data; use update_priority(index, priority)"
            )
        if streams is not None or stream_dim is not None:
            return self._in_streams(data, False, streams, stream_dim, None, timeout)  # type: ignore[no-any-return]
        plan = self._plan
        if timeout is None and plan.fast_write is not None and not plan.transforms:
            index = plan.fast_write.write(data, False)
            if index is not None:
                return index  # type: ignore[no-any-return]
        return self._written(data, False, None, timeout)  # type: ignore[no-any-return]


def _consuming(sampler: Any, count: Any, prefetch: int | None) -> Any:
    """The sampler that ``consume_after_n_samples`` asks for."""
    wanted = ConsumingSampler.of(count)
    if prefetch:
        raise ValueError("Prefetching is not supported when consume_after_n_samples is set.")
    if sampler is None:
        return wanted
    if isinstance(sampler, ConsumingSampler):
        if sampler.max_sample_count == wanted.max_sample_count:
            return sampler
        raise ValueError(
            f"consume_after_n_samples={count} conflicts with the sampler's max_sample_count="
            f"{sampler.max_sample_count}; give one of them"
        )
    raise ValueError(
        "consume_after_n_samples only supports the default sampler, or a ConsumingSampler; got "
        f"{sampler!r}"
    )


def made(part: Any) -> Any:
    """A part, or the result of its factory."""
    if isinstance(part, (Storage, Sampler, Writer)):
        return part
    if not callable(part):
        raise TypeError(f"a storage, sampler or writer is needed, or what makes one; got {part!r}")
    return part()
