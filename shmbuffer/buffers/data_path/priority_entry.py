"""Sets priorities by index or from the entry of a sample, and reads priorities in new data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.buffers.data_path.sample_info import stack_dim_of, stacks_items
from shmbuffer.items.keys import GENERATION, INDEX, OWN_KEYS
from shmbuffer.items.raw_priorities import PriorityUpdate, reduced
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.sampler import lanes_of
from shmbuffer.tensors.eager import FRAMES
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_batches import swap_dims
from shmbuffer.tensors.form.tensor_nodes import entry_at, is_collection
from shmbuffer.tensors.form.tensors import as_tensor


class PriorityUpdates:
    """Implements the methods of a buffer that set priorities."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._said_what_is_missing = False  # True after the warning about missing priorities

    def update(self, index: Any, priority: Any, generation: Any) -> Any:
        """Sets priorities by index; see `ReplayBuffer.update_priority`."""
        parts = self._parts
        if priority is None:
            return self.update_by_sample(sample_alone(index, index_generation=generation), calls=5)
        if (updates := parts.plan.updates) is not None:
            found = updates.update_arrays(index, priority, generation)
            if found is not None:
                return found
        if parts.dim_extend and np.ndim(priority) > 1:
            priority = swap_dims(cpu.as_tensor(priority), parts.dim_extend).flatten()
        known = {} if generation is None else {"generation": generation}
        return parts.sampler.update_priority(index, priority, storage=parts.storage, **known)

    def update_by_sample(self, data: Any, *, calls: int = 4) -> PriorityUpdate:
        """Sets the priorities of a sample's items from its entry ``priority_key``.

        Args:
            data: the sample.
            calls: number of stack frames between this method and the user's code, for a warning.
        """
        parts, key = self._parts, self._parts.priority_key
        sampler, storage = parts.sampler, parts.storage
        if key is None:
            raise TypeError(
                f"update_priority: samples of a {parts.family} have no entry for priorities. "
                "Nothing was changed. Call sample(return_info=True) and "
                'update_priority(info["index"], priority), or use a TensorDictReplayBuffer'
            )
        if not isinstance(sampler, PrioritizedSampler):
            return PriorityUpdate(0, 0)
        given = data
        lanes: tuple[int, ...] = () if storage.ndim == 1 else lanes_of(storage)
        if parts.plan.unit is not None:
            data = parts.plan.unit._by_anchor(data, key, sampler.reduction, lanes)
        if stacks_items(data, stack_dim_of(storage)):
            data = of_items(data, key, sampler.reduction)
        entries = data._tensordict if type(data) is TensorDict else data
        index = entries.get(INDEX, None)
        if index is None:
            raise no_index(data)
        priority = entries.get(key, None) if type(key) is str else data.get(key, None)
        generation = entries.get(GENERATION, None)
        if lanes:
            count = index.numel() // index.shape[-1]
        else:
            index = index if index.dim() < 2 else one_each(index)
            count = index.numel()
        if generation is not None and generation.dim() > 1:
            generation = one_each(generation)
        raw: Any = priority
        if priority is None:
            if not self._said_what_is_missing:
                self._said_what_is_missing = True
                say_what_is_missing(key, given, calls=calls)
            raw = sampler.default_priority
        elif not (isinstance(priority, torch.Tensor) and priority.numel() == count):
            raw = reduced(priority, count, sampler.reduction)
        return sampler.update_priority(index, raw, storage=storage, generation=generation)


def in_batch(data: Any, key: Key, dims: int, how: str) -> Floats | None:
    """Returns the raw priorities in a batch or an item, float64 ``[n * lanes]``.

    Args:
        data: the batch or the item.
        key: key of the priorities.
        dims: number of batch dimensions. Priorities in further dimensions are reduced.
        how: reduction; see `PrioritizedSampler`.

    Returns:
        The priorities, or None if the data have no entry ``key``.
    """
    if type(data) is TensorDict:  # the method `TensorDict.get` takes ten times as long
        data = data._tensordict
    priority = entry_at(data, key)
    if priority is None:
        return None
    priority = as_tensor(priority)
    return reduced(priority, priority.shape[:dims].numel(), how)


def in_items(items: Sequence[Any], key: Key, how: str) -> Floats | None:
    """Returns one raw priority per TensorDict in ``items``, float64 ``[n]``.

    Returns None if an item is not a TensorDict or has no entry ``key``. Several priorities of an
    item are combined with the reduction ``how``.
    """
    found = [item.get(key, None) for item in items if is_collection(item)]
    if len(found) < len(items) or not items or any(one is None for one in found):
        return None
    return np.concatenate([reduced(cpu.as_tensor(one), 1, how) for one in found])


def of_items(data: LazyStackedTensorDict, key: Key, how: str) -> TensorDict:
    """Returns index, ticket and priority of each item in a lazy stack as a TensorDict ``[n]``.

    Entries that the items lack are omitted.
    """
    items = data.tensordicts
    rows: dict[Any, torch.Tensor] = {}
    for name in (INDEX, GENERATION):
        found = [item.get(name, None) for item in items]
        if all(one is not None for one in found):
            rows[name] = torch.stack([one.reshape(-1)[0] for one in found])
    if (raw := in_items(items, key, how)) is not None:
        rows[key] = torch.from_numpy(raw)
    return TensorDict(rows, [len(items)])


def one_each(entry: torch.Tensor) -> torch.Tensor:
    """Returns the first value per item of an entry that was expanded to the items' dimensions.

    The result has shape ``[n]``.
    """
    while entry.dim() > 1:
        entry = entry[..., 0]
    return entry


def sample_alone(data: Any, **known: Any) -> Any:
    """Returns the sample for a call of ``update_priority`` without priorities.

    Args:
        data: the first argument of the call, which must be a sample.
        **known: entries that replace those of the sample. If None, keeps the sample's entry.

    Raises:
        TypeError: ``data`` is not a TensorDict, so the priorities are missing.
    """
    if not is_collection(data):
        raise TypeError(
            "update_priority: an index was passed without priorities. Nothing was changed. Call "
            "update_priority(index, priority), or update_priority(batch) with a sample of a "
            "TensorDict buffer"
        )
    given = {key: value for key, value in known.items() if value is not None}
    return data.copy().update(given) if given else data


def no_index(data: TensorDictBase) -> KeyError:
    """Returns the KeyError for a sample without an index, which lists the sample's keys."""
    return KeyError(
        f"update_tensordict_priority needs the entry {INDEX!r} of a sample, but this TensorDict "
        f"has {sorted(map(str, data.keys()))}; pass a sample, or a part of it with this entry"
    )


def say_what_is_missing(key: Key, data: TensorDictBase, *, calls: int) -> None:
    """Warns that a sample has no entry with priorities.

    Args:
        key: key of the missing entry.
        data: the sample.
        calls: number of stack frames between the caller and the user's code, which the warning
            shows.
    """
    names = ((one,) if isinstance(one, str) else one for one in data.keys(True))
    there = sorted(".".join(name) for name in names if name[0] not in OWN_KEYS)
    warnings.warn(
        f"update_tensordict_priority: this sample has no entry {key!r}, so its items get the "
        f"default priority. The sample has the entries {there}. Set sample[{key!r}] to the new "
        "priorities, or set the buffer's priority_key to the key of their entry",
        stacklevel=calls + FRAMES,
    )
