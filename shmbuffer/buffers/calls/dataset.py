"""A data set for torch's ``DataLoader``. Each worker samples complete batches from the buffer.

    worker 0 ── sample ──┐
    worker 1 ── sample ──┴─▶ DataLoader, pinned ──▶ loop ──▶ priorities, by index and generation

Each worker opens the directory and samples as a separate learner. With n workers, worker i of rank
r has the rank r * n + i and a default generator seeded with the loader's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from shmbuffer.samplers.rank import known_rank

_IN_THE_PIPE = 1 << 20  # maximum size in bytes of a batch that is sent through the pipe


class BatchDataset(IterableDataset[Any]):
    """The batches of a buffer as a data set, which `ReplayBuffer.as_dataset` creates.

    Args:
        buffer: the buffer to sample from.
        batches: function that receives a function that samples a batch, and yields the batches of a
            pass.
        **options: arguments of ``buffer.sample``.
    """

    def __init__(
        self,
        buffer: Any,
        batches: Callable[[Callable[[], Any]], Iterator[Any]],
        **options: Any,
    ) -> None:
        self._buffer, self._batches, self._options = buffer, batches, options
        self._rank = known_rank(buffer._parts.rank_given) or 0
        self._is_ours = True  # False once a worker has become a separate learner

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if self._is_ours and worker is not None:
            self._become_learner(worker)
        yield from self._batches(partial(self._buffer.sample, **self._options))

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Returns the batch unchanged, because the loader's default function would split it."""
        return batch if get_worker_info() is None else _SentBatch(batch)

    def _become_learner(self, worker: Any) -> None:
        """Makes this worker process a separate learner. Called once in each worker."""
        buffer, count = self._buffer, worker.num_workers
        buffer._parts.rank_given = self._rank * count + worker.id
        buffer.generator = None  # with copies of one generator, all workers would draw equal items
        buffer.sampler._divide(worker.id, count, self._rank, worker.seed - worker.id)
        Finalize(None, buffer.close, exitpriority=0)
        self._is_ours = False


class _SentBatch:
    """A batch that a worker sends to the main process. Unpickling returns the batch itself."""

    # Small TensorDicts are sent through the pipe. Torch would create a file in shared memory for
    # each leaf, which takes ten times as long and is only worthwhile for large leaves.

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self._batch
        if type(batch) is TensorDict and batch.bytes() <= _IN_THE_PIPE:
            with suppress(TypeError):  # NumPy arrays cannot contain text, objects or bfloat16
                return _from_arrays, _to_arrays(batch)
        return BatchDataset.collate_fn, (batch,)


def _to_arrays(batch: Any) -> tuple[Any, ...]:
    """Returns a TensorDict as nested dicts of NumPy arrays, with its batch sizes and devices.

    Raises TypeError if a leaf cannot be an array.
    """
    if type(batch) is not TensorDict:
        raise TypeError(f"a {type(batch).__name__} is not a dict of tensors")
    arrays = {
        key: leaf.numpy() if isinstance(leaf, torch.Tensor) else _to_arrays(leaf)
        for key, leaf in batch.items()
    }
    return arrays, batch.batch_size, batch.device


def _from_arrays(arrays: dict[str, Any], batch_size: Any, device: Any) -> TensorDict:
    """Returns the TensorDict from the result of `_to_arrays`."""
    entries = {
        key: _from_arrays(*leaf) if isinstance(leaf, tuple) else torch.from_numpy(leaf)
        for key, leaf in arrays.items()
    }
    return TensorDict(entries, batch_size, device=device)
