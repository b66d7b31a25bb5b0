"""Replay buffer for TensorDicts, whose samples contain the index and the weights as entries."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.tensors.eager import eager
from shmbuffer.writers.round_robin import TensorDictRoundRobinWriter


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDicts. Samples contain their index, and data can have priorities.

    If new data have the entry ``priority_key``, the write also sets the priorities of the items.

    A dict of tensors or NumPy arrays (nested, or with tuple keys) is written like a TensorDict with
    these entries, but faster. Numbers, lists of numbers and arrays of other libraries (JAX) are
    converted. A plain number is converted to the dtype of its leaf if that dtype can represent it.
    Any other difference in dtype raises SchemaMismatchError.

    A sample has the following entries, which are never stored. If items have their own batch
    dimensions, the entries are expanded to these.
    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one tensor | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | shared, or the writer tracks generations |

    Args:
        priority_key: key of the entry that contains priorities, in new data and in samples.
        **kwargs: see `ReplayBuffer`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> rb.extend(TensorDict({"obs": torch.arange(3)}, [3]))
        tensor([0, 1, 2])
        >>> sorted(rb.sample().keys())
        ['index', 'obs']

    Source: ``torchrl.data.TensorDictReplayBuffer``.
    """

    family = "TensorDictReplayBuffer"
    default_writer = TensorDictRoundRobinWriter
    _mapping = "tensordict"
    _own_options: ClassVar[tuple[str, ...]] = ("priority_key",)

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kwargs: Any) -> None:
        super().__init__(priority_key=priority_key, **kwargs)

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Key of the entry that contains priorities."""
        return self._parts.priority_key  # type: ignore[return-value] # not None here

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._parts.priority_key = key
        self._parts.join()

    @eager
    def extend(
        self,
        tensordicts: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> torch.Tensor:
        """Writes a batch atomically.

        Priorities in ``tensordicts[priority_key]`` are set in the same native call.

        Args:
            tensordicts: a TensorDict ``[n, *lanes]``, a dict, or a list of TensorDicts.
            update_priority: False ignores priorities in the data, so that items get the default
                priority.
            timeout: see `ReplayBuffer.extend`.
            streams: see `ReplayBuffer.extend`.
            stream_dim: see `ReplayBuffer.extend`.

        Returns:
            The indices of the items; see `ReplayBuffer.extend`.

        Raises:
            TypeError: ``tensordicts`` is a tuple. Other exceptions are those of
                `ReplayBuffer.extend`.
        """
        plan = self._parts.plan
        if timeout is update_priority is streams is stream_dim is None and not plan.transforms:
            fast = plan.fast_write
            if fast is not None and (index := fast.write(tensordicts, False)) is not None:
                return index  # type: ignore[no-any-return]
        return self._writes.write(  # type: ignore[no-any-return]
            tensordicts, False, update_priority, timeout, streams, stream_dim
        )

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDict | None = None,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Any:
        """Samples a batch.

        Args:
            batch_size: see `ReplayBuffer.sample`.
            return_info: see `ReplayBuffer.sample`.
            include_info: if False, the sample has no entries for index and weights. They are still
                in ``info``.
            out: a sample that is no longer needed, or any TensorDict ``[batch_size]``. The new
                sample is written into its tensors, and its other entries are dropped.
            min_size: see `ReplayBuffer.sample`.
            timeout: see `ReplayBuffer.sample`.
            lease: see `ReplayBuffer.sample`.

        Returns:
            A TensorDict ``[batch_size]`` with the additional entries that the class documents, or
            ``out`` if it was passed. If the items are tensorclasses, or objects from a custom
            storage, only ``info`` contains index and weights.

        Raises:
            EmptyBufferError, RateLimitTimeout, RateLimitError: see `ReplayBuffer.sample`.
            RuntimeError: there is no batch size, or a transform has changed the batch size, so that
                index and weights do not fit. In the latter case, use ``return_info=True`` together
                with ``include_info=False``.
            TypeError: ``out`` is not a TensorDict.
            ValueError: ``out`` has another batch size, or it was passed although the sample needs
                more than one native call. ``out`` requires a storage with ``ndim=1`` whose items
                are TensorDicts of tensors with a fixed shape in the ring's own memory. It cannot be
                combined with ``include_info=False``, ``collate_fn``, transforms, ``pin_memory``,
                ``prefetch``, or any ``sample_unit`` except `FrameStack`.

        Cost: one native call, and 0.4 µs per leaf for new tensors, which ``out`` avoids.
        """
        count = self._parts.batch_size if batch_size is None else None
        if count is None:
            count = self._reads.count(batch_size)
        batch = self._reads.sample(count, include_info, out, min_size, timeout, lease)
        return batch if return_info else batch[0]

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Sets the priorities of a sample from its entry ``priority_key``.

        If the sample has ``"index_generation"``, items that have been overwritten in the meantime
        are skipped and counted. If the sample has no entry ``priority_key``, the items get the
        default priority, as in TorchRL, and a warning is issued once.

        Args:
            data: a sample or a part of it, with entries ``"index"`` and ``priority_key``. Several
                priorities of one item (a stored trajectory) are combined by the sampler's
                ``reduction``. The priority of a window of steps is set on the item that was drawn;
                see `Sequence`.

        Returns:
            The number of priorities that were set, and the number that were skipped as stale. Both
            are zero if the sampler has no priorities.

        Raises:
            KeyError: there is no entry ``"index"``.
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.

        Cost: one native call.
        """
        parts = self._parts
        updates = parts.plan.updates
        if updates is not None and type(data) is TensorDict:
            get = data._tensordict.get
            found = updates.update_arrays(get(INDEX), get(parts.priority_key), get(GENERATION))
            if found is not None:
                return found
        return self._priorities.update_by_sample(data)
