"""What is changed in several buffers: each item in the one that it is from."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.numpy.keys import GENERATION, INDEX
from shmbuffer.numpy.priorities import reduced
from shmbuffer.replay.buffers import ReplayBuffer, TensorDictReplayBuffer
from shmbuffer.replay.buffers.access import ConditionalUpdateResult
from shmbuffer.replay.buffers.priority_entry import no_index, say_what_is_missing
from shmbuffer.replay.eager import eager
from shmbuffer.replay.ensembles.ends import newest_of_streams, patch_of
from shmbuffer.replay.ensembles.members import Ensemble
from shmbuffer.replay.ensembles.rows import known_tickets, routes
from shmbuffer.replay.ensembles.storage import StorageEnsemble
from shmbuffer.replay.samplers import PrioritizedSampler, PriorityUpdate, SliceSampler
from shmbuffer.replay.writers import ImmutableDatasetWriter

_VERSION = ("", "version")  # among the entries of a patch, which have names

Key = str | tuple[str, ...]


class Changes(ReplayBuffer, Ensemble):
    """The part of an ensemble that changes items which are there."""

    _what = "buffer"
    _members: tuple[ReplayBuffer, ...]
    _storage: StorageEnsemble
    _said_what_is_missing = False  # as in a TensorDictReplayBuffer

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i][index]``."""
        raise RuntimeError(
            f"the ensemble was told to change {index!r}, and not in which of its buffers: "
            "ensemble[i][index] = data"
        )

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i]``."""
        raise RuntimeError(
            f"the ensemble was told to change {key!r}, and not in which of its buffers: "
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
        """Change entries of the items of a sample that have not been written over since.

        Args:
            index: ``sample["index"]``.
            generation: ``sample["index_generation"]``.
            patch: TensorDict or dict of the entries that are to change, with the shape of the
                sample in front.
            version_key: see `ReplayBuffer.update_if_present`.
            version: one number, or one for each item, of the same leading shape.
            require_newer: see there.

        Returns:
            `ConditionalUpdateResult` for the sample, flat.

        Raises:
            RuntimeError: a buffer keeps no generations; see `ReplayBuffer.update_if_present`. Other
                buffers may have been changed already.
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
        updated = torch.zeros(sum(len(rows) for rows, _ in results), dtype=torch.bool)
        rejected = None if version_key is None else torch.zeros_like(updated)
        for rows, result in results:
            updated[rows] = result.updated
            if rejected is not None and result.version_rejected is not None:
                rejected[rows] = result.version_rejected
        return ConditionalUpdateResult(updated, rejected)

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Set the priorities of a sample, each in the buffer that its item is from.

        Args:
            data: a sample, or part of one: entries ``"index"`` and the ``priority_key`` of the
                buffers. See `TensorDictReplayBuffer.update_tensordict_priority`.

        Returns:
            How many were applied and how many were stale, in all buffers together. Buffers without
            priorities count none.

        Raises:
            KeyError: no entry ``"index"``.
            ValueError: NaN, infinite or negative; what belongs to other buffers may have been
                changed.
        """
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
        """End every trajectory that is open, before collectors begin again after a resume.

        The newest item of each stream of each collector, in every buffer, becomes the end of its
        trajectory; unless it is one already, it is truncated. Slices never cross from a collector
        to its successor, so that they need no call; a consumer of the flags does. No collector may
        write meanwhile. A data set that is not written to (`ImmutableDatasetWriter`) stays as it
        is. Batches that were made ahead stay as they are.

        Args:
            end_key: flag of the last step of a trajectory; becomes True.
            terminated_key: flag of a step that has ended by itself; is only read. None, and where
                the items have it not: none has.
            truncated_key: flag of a step that was cut off; becomes True where the step was neither
                an end nor terminated. None, and where the items have it not: nothing says so.

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


def _priority_key(rb: ReplayBuffer) -> str | tuple[str, ...]:
    return rb.priority_key if isinstance(rb, TensorDictReplayBuffer) else "td_error"
