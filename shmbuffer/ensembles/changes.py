"""Changes of items in several buffers, each in its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.buffers import ReplayBuffer, TensorDictReplayBuffer
from shmbuffer.buffers.calls.access import ConditionalUpdateResult
from shmbuffer.buffers.data_path.priority_entry import no_index, say_what_is_missing
from shmbuffer.ensembles.ends import newest_of_streams, patch_of
from shmbuffer.ensembles.members import Ensemble
from shmbuffer.ensembles.stacked_rows import known_tickets, routes
from shmbuffer.ensembles.storage import StorageEnsemble
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.raw_priorities import reduced
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers import PrioritizedSampler, PriorityUpdate, SliceSampler
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.writers import ImmutableDatasetWriter

_VERSION = ("", "version")  # among the entries of a patch, which have names


class Changes(ReplayBuffer, Ensemble):
    """Changes the items of an ensemble."""

    _what = "buffer"
    _members: tuple[ReplayBuffer, ...]
    _storage: StorageEnsemble
    _said_what_is_missing = False  # as in a TensorDictReplayBuffer

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i][index]``."""
        raise RuntimeError(
            f"the ensemble was told to change {index!r}, but not in which of its buffers: "
            "ensemble[i][index] = data"
        )

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i]``."""
        raise RuntimeError(
            f"the ensemble was told to change {key!r}, but not in which of its buffers: "
            "ensemble[i].set_at_(key, value, index)"
        )

    @eager
    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> Any:
        """`ReplayBuffer.update_if_present`, each item in its buffer.

        ``patch`` and ``version`` have the leading shape of the sample; the result is flat. After an
        error, other buffers may have been changed.
        """
        patch = patch if isinstance(patch, TensorDictBase) else TensorDict(patch)
        entries = dict(patch.items(True, True))
        own: dict[Any, Any] = {GENERATION: generation, _VERSION: version}
        results = []
        for part in routes(index, self._storage, {**entries, **own}):
            tickets, versions = (part.entries.pop(key) for key in own)
            result = self._members[part.at].update_if_present(
                index=part.where,
                generation=tickets,
                patch=TensorDict(part.entries),
                version_key=version_key,
                version=versions,
                require_newer=require_newer,
            )
            results.append((part.rows, result))
        count = sum(len(rows) for rows, _ in results)
        return together(count, results, compared=version_key is not None)

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """`TensorDictReplayBuffer.update_tensordict_priority`, each item in its buffer.

        The result is the sum over all buffers; those without priorities count none. After an error,
        other buffers may have been changed.
        """
        return self._update_by_sample(data)

    def _update_by_sample(self, data: Any) -> PriorityUpdate:
        """See `update_tensordict_priority`."""
        index = data.get(INDEX, None)
        if index is None:
            raise no_index(data)
        keys = {GENERATION, *map(_priority_key, self._members)}
        entries = {key: data.get(key, None) for key in keys}
        applied = stale = 0
        for part in routes(index, self._storage, entries, several=True):
            member = self._members[part.at]
            if not isinstance(member._sampler, PrioritizedSampler):
                continue
            sampler, tickets = member._sampler, known_tickets(part.entries[GENERATION])
            key = _priority_key(member)
            priority = part.entries[key]
            if priority is None and not self._said_what_is_missing:
                self._said_what_is_missing = True
                say_what_is_missing(key, data)
            raw = (
                sampler.default_priority
                if priority is None
                else reduced(priority, len(part.where), sampler.reduction)
            )
            update = sampler.update_priority(
                part.where, raw, storage=part.storage, generation=tickets
            )
            applied, stale = applied + update.applied, stale + update.stale
        return PriorityUpdate(applied, stale)

    def end_streams(
        self,
        *,
        end_key: Key = ("next", "done"),
        terminated_key: Key | None = ("next", "terminated"),
        truncated_key: Key | None = ("next", "truncated"),
    ) -> None:
        """End every open trajectory, before collectors begin again after a resume.

        The newest item of each stream of each collector, in every buffer, becomes the end of its
        trajectory; unless it is one already, it is truncated. Readers of the flags need it, slices
        do not: they never cross from a collector to its successor. No collector may write
        meanwhile. A data set (`ImmutableDatasetWriter`) and prefetched batches do not change.

        Args:
            end_key: flag of the last step of a trajectory; becomes True.
            terminated_key: flag of a step that ends by itself, read only; may be None or missing.
            truncated_key: flag of a step that was cut off; becomes True if the step was neither an
                end nor terminated. May be None or missing.

        Raises:
            RuntimeError: a storage that cannot change items in place; nothing was changed.
            KeyError: the items have no ``end_key``; nothing was changed.
            TypeError: a flag is not bool; nothing was changed.
            ValueError: two of the keys are the same; nothing was changed.

        Cost: O(capacity).
        """
        self.synchronize()
        patches = []
        for rb in self._members:
            if isinstance(rb._writer, ImmutableDatasetWriter):
                continue
            rb.synchronize()
            newest = newest_of_streams(rb._storage)
            if newest is not None:
                data = rb._storage.get(newest.index)
                patch = patch_of(data, end_key, terminated_key, truncated_key)
                patches.append((rb, newest, patch))
        for rb, newest, patch in patches:
            rb.update_if_present(index=newest.index, generation=newest.tickets, patch=patch)
            if isinstance(rb._sampler, SliceSampler):
                rb._sampler._boundaries.forget()


def together(
    count: int,
    results: Iterable[tuple[torch.Tensor, ConditionalUpdateResult]],
    *,
    compared: bool,  # whether versions were
) -> ConditionalUpdateResult:
    """The result for ``count`` items from those for some rows each."""
    updated, rejected = cpu.zeros((2, count), dtype=torch.bool)
    for rows, result in results:
        updated[rows] = result.updated
        if result.version_rejected is not None:
            rejected[rows] = result.version_rejected
    return ConditionalUpdateResult(updated, rejected if compared else None)


def _priority_key(rb: ReplayBuffer) -> str | tuple[str, ...]:
    return rb.priority_key if isinstance(rb, TensorDictReplayBuffer) else "td_error"
