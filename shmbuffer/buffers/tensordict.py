"""Buffers of TensorDicts, whose samples have their index and weights as entries."""

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
    """A `ReplayBuffer` for TensorDicts: samples have their index, data may have a priority.

    A priority in ``data[priority_key]`` becomes the item's, in the same write.

    A dict of tensors or numpy arrays (nested, or with tuple keys) is written like the TensorDict
    with these entries, and faster. Numbers, lists of them and arrays of other libraries (JAX) are
    converted. A plain number takes the dtype of its leaf if that can hold it; other differences of
    dtype are errors.

    A sample has these entries, which are never stored. If an item has a batch size of its own, they
    are expanded to it.

    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one tensor | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | shared, or the writer tracks generations |

    Args:
        priority_key: entry of the data and of samples that holds priorities.
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
        """Entry that holds priorities."""
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
        """Writes a batch: whole or not at all.

        Priorities in ``tensordicts[priority_key]`` become the items', in the same native call.

        Args:
            tensordicts: a TensorDict ``[n, *lanes]``, a dict, or a list of TensorDicts.
            update_priority: False ignores priorities in the data: items get the default one.
            timeout: see `ReplayBuffer.extend`.
            streams: see there.
            stream_dim: see there.

        Returns and raises as `ReplayBuffer.extend`; a tuple is a TypeError, too.
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
        """Draws a batch.

        Args:
            batch_size: see `ReplayBuffer.sample`.
            return_info: see there.
            include_info: False leaves index and weights out of the sample; they are in ``info``.
            out: a sample that is no longer needed: its tensors are filled again, other entries are
                dropped. Any TensorDict ``[batch_size]`` will do.
            min_size: see there.
            timeout: see there.
            lease: see there.

        Returns:
            A TensorDict ``[batch_size]`` with the entries of the class's table; ``out``, if given.
            For tensorclasses, and items of your own storage that are no TensorDicts, index and
            weights are in ``info`` only.

        Raises:
            EmptyBufferError, RateLimitTimeout, RateLimitError: see there.
            RuntimeError: no batch size, or a transform has changed it, so that index and weights do
                not fit (then take them from ``return_info=True``).
            TypeError: ``out`` is no TensorDict.
            ValueError: ``out`` has another batch size, or the sample takes more than one native
                call: ``out`` works for TensorDicts of tensors of one shape in the ring's own
                memory, one storage dimension, and no ``include_info=False``, ``sample_unit`` (but a
                `FrameStack`), ``collate_fn``, transform, ``pin_memory`` or ``prefetch``.

        Cost: one native call; 0.4 µs a leaf for new tensors, nothing with ``out``.
        """
        count = self._parts.batch_size if batch_size is None else None
        if count is None:
            count = self._reads.count(batch_size)
        batch = self._reads.sample(count, include_info, out, min_size, timeout, lease)
        return batch if return_info else batch[0]

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Sets the priorities of a sample from its entry ``priority_key``.

        With ``"index_generation"``, items that were overwritten since are left alone and counted.
        Without an entry ``priority_key`` the items get the default priority, as in TorchRL, and one
        warning is given.

        Args:
            data: a sample, or part of one: entries ``"index"`` and ``priority_key``. Several
                priorities of an item (a stored trajectory) are reduced by the sampler's
                ``reduction``; those of a window go to the item that was drawn, see `Sequence`.

        Returns:
            How many were applied and how many were stale; zeros if the sampler has no priorities.

        Raises:
            KeyError: no entry ``"index"``.
            ValueError: NaN, infinite or negative; nothing was changed.

        Cost: one native call.
        """
        parts = self._parts
        updates = parts.plan.updates
        if updates is not None and type(data) is TensorDict:
            get = data._tensordict.get
            found = updates.update_given(get(INDEX), get(parts.priority_key), get(GENERATION))
            if found is not None:
                return found
        return self._priorities.update_by_sample(data)
