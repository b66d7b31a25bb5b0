"""Buffers that sample by priority (Schaul et al., Prioritized Experience Replay, ICLR 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shmbuffer.buffers.data_path.parts import DEFAULT_CAPACITY, made
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.storage import Storage


class Prioritized(ReplayBuffer):
    """Base class for buffers that create their own `PrioritizedSampler`.

    `PrioritizedReplayBuffer` documents the arguments.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | None = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        reduction: str = "max",
        **kwargs: Any,
    ) -> None:
        if sampler is not None:
            name = type(self).__name__
            raise ValueError(
                f"a {name} makes its own sampler from alpha, beta and eps, so sampler must be "
                f"None; to use another sampler, call {name.replace('Prioritized', '')}(sampler=...)"
            )
        storage = ListStorage(DEFAULT_CAPACITY) if storage is None else made(storage)
        sampler = PrioritizedSampler(
            storage.max_size,
            alpha,
            beta,
            eps=eps,
            dtype=dtype,
            reduction=reduction,
            device=sampler_device,
        )
        super().__init__(storage=storage, sampler=sampler, **kwargs)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, under TorchRL's name."""
        return self.sampler


class PrioritizedReplayBuffer(Prioritized):
    """A `ReplayBuffer` with a `PrioritizedSampler`.

    ``sample(return_info=True)`` also returns the index and the weights of the items. Pass the index
    and the new priorities to ``update_priority``.

    Args:
        alpha: priority exponent. With 0, sampling is uniform.
        beta: exponent of the importance weights.
        eps: constant that is added to every priority.
        dtype: dtype of the weights.
        storage: storage of the items. If None, creates a ``ListStorage(1000)``.
        sampler: must be None.
        sampler_device: ``device`` of the `PrioritizedSampler`.
        sync: accepted and ignored. If this is False, TorchRL keeps a separate tree for the learner.
            Here all processes share one tree.
        reduction: see `PrioritizedSampler`.
        **kwargs: see `ReplayBuffer`.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.9, storage=LazyTensorStorage(10)
        ... )
        >>> index = rb.extend(torch.arange(3))
        >>> rb.update_priority(index, torch.tensor([1.0, 0.0, 0.0]))
        PriorityUpdate(applied=3, stale=0)

    Source: ``torchrl.data.PrioritizedReplayBuffer``.
    """

    family = "PrioritizedReplayBuffer"


class TensorDictPrioritizedReplayBuffer(Prioritized, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`.

    A sample has the entry ``"index"`` and importance weights. The weights are one tensor under two
    keys: ``"_weight"`` (TorchRL up to 0.10) and ``"priority_weight"`` (since 0.11, read by
    TorchRL's losses). To update priorities, set the entry ``priority_key`` in the sample and pass
    the sample to ``update_tensordict_priority``. In new data, this entry contains the initial
    priorities. If the storage is in a directory (`LazyMemmapStorage`), all processes share the
    priorities.

    Args:
        alpha, beta, eps, storage, sampler_device, sync, dtype, reduction: see
            `PrioritizedReplayBuffer`.
        priority_key: key of the entry that contains priorities.
        **kwargs: see `ReplayBuffer`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage
        >>> from shmbuffer import TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=1.1, storage=LazyTensorStorage(10), batch_size=5
        ... )
        >>> index = rb.extend(TensorDict({"a": torch.ones(10, 3)}, [10]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.rand(5)
        >>> rb.update_tensordict_priority(sample)
        PriorityUpdate(applied=5, stale=0)

    Source: ``torchrl.data.TensorDictPrioritizedReplayBuffer``.
    """

    family = "TensorDictPrioritizedReplayBuffer"
