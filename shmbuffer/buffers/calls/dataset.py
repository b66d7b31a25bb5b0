"""A buffer as a data set of torch's ``DataLoader``: whole batches, drawn in its workers.

    worker 0 ── sample ──┐
    worker 1 ── sample ──┴─▶ DataLoader, pinned ──▶ loop ──▶ priorities, by index and generation

Each worker opens the directory and draws as a learner of its own. Of n workers, worker i of rank r
has the rank r * n + i, and torch's default generator with the loader's seed.
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

_IN_THE_PIPE = 1 << 20  # bytes


class BatchDataset(IterableDataset[Any]):
    """The batches of a buffer as a data set, made by `ReplayBuffer.as_dataset`."""

    def __init__(
        self,
        buffer: Any,
        batches: Callable[[Callable[[], Any]], Iterator[Any]],  # of a function that samples
        **options: Any,  # of ``buffer.sample``
    ) -> None:
        self._buffer, self._batches, self._options = buffer, batches, options
        self._rank = known_rank(buffer._parts.rank_given) or 0
        self._is_ours = True  # not in a worker

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if self._is_ours and worker is not None:
            self._become(worker)
        yield from self._batches(partial(self._buffer.sample, **self._options))

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """The batch unchanged; the loader's default would take it apart."""
        return batch if get_worker_info() is None else _Sent(batch)

    def _become(self, worker: Any) -> None:
        """In each worker, once: become a learner of its own."""
        buffer, count = self._buffer, worker.num_workers
        buffer._parts.rank_given = self._rank * count + worker.id
        buffer.generator = None  # a copy of it would draw the same in all of them
        buffer.sampler._divide(worker.id, count, self._rank, worker.seed - worker.id)
        Finalize(None, buffer.close, exitpriority=0)
        self._is_ours = False


class _Sent:
    """A batch on its way out of a worker; it is unpickled as itself."""

    # A small TensorDict goes through the pipe. Torch would make a file in memory for each leaf,
    # which takes ten times as long, and only pays for large ones.

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self._batch
        if type(batch) is TensorDict and batch.bytes() <= _IN_THE_PIPE:
            with suppress(TypeError):  # text, objects, bfloat16
                return _received, _in_arrays(batch)
        return BatchDataset.collate_fn, (batch,)


def _in_arrays(batch: Any) -> tuple[Any, ...]:
    if type(batch) is not TensorDict:
        raise TypeError(f"a {type(batch).__name__} is not a dict of tensors")
    arrays = {
        key: leaf.numpy() if isinstance(leaf, torch.Tensor) else _in_arrays(leaf)
        for key, leaf in batch.items()
    }
    return arrays, batch.batch_size, batch.device


def _received(arrays: dict[str, Any], batch_size: Any, device: Any) -> TensorDict:
    entries = {
        key: _received(*leaf) if isinstance(leaf, tuple) else torch.from_numpy(leaf)
        for key, leaf in arrays.items()
    }
    return TensorDict(entries, batch_size, device=device)
