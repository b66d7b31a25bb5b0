"""TorchRL's sampler for several buffers. It chooses buffers, each of which draws its share.

    batch_size 12, 3 buffers chosen ──▶ buffer 1: 4 items
                                        buffer 0: 4 items   ──▶ index [3, 4], buffer_ids [3]
                                        buffer 1: 4 items

The choice of buffers, and then the draws row by row, use the random generator of the ensemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shmbuffer.ensembles.joint_parts import JointPart, PartsOf, StorageEnsemble
from shmbuffer.ensembles.joint_rows import known_tickets, routes, stack_index, stack_rows
from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.samplers.sampler import Sampler, ask_rank, drawn_by
from shmbuffer.saves.checkpoints import OWN_FILES
from shmbuffer.tensors.form import cpu

SAMPLEABLE = "sampleable"

Weights = Sequence[float] | torch.Tensor | str | None


class IndivisibleBatchError(ValueError, RuntimeError):
    """Raised if a batch size is not a multiple of the number of rows."""


class SamplerEnsemble(JointPart, Sampler):
    """The samplers of a `ReplayBufferEnsemble`, and the choice of buffers.

    ``samplers[i]`` returns a sampler; any other index returns an ensemble of the selected samplers.

    Args:
        *samplers: one sampler per buffer.
        p: non-negative relative frequency of each buffer. ``"sampleable"`` uses the number of
            possible draws in each buffer at the time of the call: items, or slots at which a slice
            can begin. If None, uses equal frequencies. The attribute can be changed later.
        sample_from_all: if True, each batch contains one row from each buffer. Cannot be combined
            with ``p``.
        num_buffer_sampled: number of rows of a batch. A buffer can provide several rows, or none.
            The default is the number of buffers, which is also used with ``sample_from_all``.

    Raises:
        RuntimeError: both ``p`` and ``sample_from_all`` were passed.
        ValueError: ``p`` has the wrong length, or contains a negative, infinite or NaN value.

    Source: ``torchrl.data.SamplerEnsemble``.
    """

    _what = "sampler"

    def __init__(
        self,
        *samplers: Sampler,
        p: Weights = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self._members = list(samplers)
        self.sample_from_all = bool(sample_from_all)
        self.p = p
        self.num_buffer_sampled = num_buffer_sampled

    @property
    def p(self) -> torch.Tensor | str | None:
        """Probability of each buffer, ``[buffers]``; or ``"sampleable"`` or None, as in Args."""
        return self._p

    @p.setter
    def p(self, value: Weights) -> None:
        if value is not None and self.sample_from_all:
            raise RuntimeError(
                "p, the probability of each buffer, cannot be combined with sample_from_all=True, "
                "which samples from all buffers; pass only one of the two"
            )
        if value is None or isinstance(value, str):
            if value not in (None, SAMPLEABLE):
                raise ValueError(f"p must be numbers, {SAMPLEABLE!r} or None, got {value!r}")
            self._p: torch.Tensor | str | None = value
            return
        weights = cpu.as_tensor(value).detach().cpu()
        weights = weights if weights.is_floating_point() else weights.float()
        if weights.shape != (len(self._members),):
            raise ValueError(
                f"p must have one number for each of the {len(self._members)} buffers, got a "
                f"tensor of shape {list(weights.shape)}"
            )
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError(f"p must be finite and non-negative, got {weights.tolist()}")
        total = weights.sum()
        self._p = weights / total if total > 0 else weights

    @property
    def num_buffer_sampled(self) -> int:
        """Number of rows of a batch, each from one buffer."""
        if self._given_number is None or self.sample_from_all:
            return len(self._members)
        return self._given_number

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"num_buffer_sampled must be at least 1, got {value}")
        self._given_number = value

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, Any]:
        """Draws items from a `StorageEnsemble`.

        Returns:
            The index, a TensorDict ``[rows]`` with ``"buffer_ids"`` int64 ``[rows]`` and
            ``"index"`` int64 ``[rows, batch_size / rows]``, and a TensorDict ``[rows]`` with the
            info of each draw. Rows that differ in keys or shapes are stacked lazily.

        Raises:
            TypeError: ``storage`` is not a `StorageEnsemble`.
            RuntimeError: the batch size is not a multiple of ``num_buffer_sampled`` (also a
                ValueError).
            EmptyBufferError: a chosen buffer has no items to sample, or no buffer can be chosen.
        """
        chosen = self.shares(storage, batch_size)
        share = batch_size // len(chosen)
        drawn = [self._draw(at, storage._members[at], share) for at in chosen]
        return stack_index(chosen, [index for index, _ in drawn]), stack_rows([i for _, i in drawn])

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if every buffer that can be chosen has enough items for a batch of this size.

        In an ensemble of buffers, the rate limiter of each buffer must also admit the sample.
        """
        share, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest:
            return False
        storages = storage._members
        p = None if self.sample_from_all else self._p
        weights: Sequence[Any] = [1] * len(storages) if p is None else list(p)
        if isinstance(p, str):
            weights = self._sampleable(storages, share)
        chosen = [at for at, weight in enumerate(weights) if weight]
        if not chosen:
            return False
        members = self._members
        if not isinstance(members, PartsOf):
            return all(members[at].can_sample(storages[at], share) for at in chosen)
        most = share if self.sample_from_all else batch_size  # one buffer can provide all rows
        buffers = [members.buffers[at] for at in chosen]
        return all(rb.plan.limits.admits(most) and rb.can_sample(share) for rb in buffers)

    def shares(self, storage: Any, batch_size: int) -> list[int]:
        """Chooses the buffer of each row of a batch, and returns the buffer numbers.

        Raises the same errors as `sample`.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(
                f"a SamplerEnsemble needs a StorageEnsemble, got {type(storage).__name__}"
            )
        rows = self.num_buffer_sampled
        if batch_size % rows:
            raise IndivisibleBatchError(
                f"batch_size must be a multiple of num_buffer_sampled={rows}, the number of rows, "
                f"got {batch_size}"
            )
        ask_rank(self, storage)
        return self._choose(storage._members, batch_size // rows)

    def _sampleable(self, storages: Sequence[Any], share: int) -> list[int]:
        """Returns the number of possible draws in each buffer, for ``share`` items per row."""
        each = zip(self._members, storages, strict=True)
        return [sampler._sampleable_count(storage, share) for sampler, storage in each]

    def _choose(self, storages: Sequence[Any], share: int) -> list[int]:
        """Chooses the buffer of each row, and returns the buffer numbers.

        Args:
            storages: the storages of the buffers.
            share: number of items per row.
        """
        count = self.num_buffer_sampled
        if self.sample_from_all:
            return list(range(count))
        p = self._p
        if p is None:
            return drawn_by(self, cpu.randint, len(storages), (count,)).tolist()
        if isinstance(p, str):
            p = cpu.tensor(self._sampleable(storages, share), dtype=torch.float64)
        if not bool(p.any()):
            raise EmptyBufferError(
                "no buffer can be chosen, because p is 0 for all buffers"
                if p is self._p
                else "no buffer can be chosen, because all buffers are empty, or have no slice of "
                "the required length"
            )
        return drawn_by(self, torch.multinomial, p, count, True).tolist()

    def _draw(self, at: int, storage: Any, count: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draws the items of one row, and returns their index and info.

        If a pass without replacement ends within the row, the next pass fills the rest.

        Args:
            at: number of the buffer.
            storage: storage of the buffer.
            count: number of items.

        Raises:
            EmptyBufferError: the buffer is empty.
        """
        if not len(storage):
            raise EmptyBufferError(
                f"buffer {at} of the ensemble is empty; write to ensemble[{at}] before sampling, "
                "or exclude it with p"
            )
        sampler = self._members[at]
        indices, infos, missing = [], [], count
        while True:
            index, info = sampler.sample(storage, missing)
            part = torch.stack(index, -1) if isinstance(index, tuple) else cpu.as_tensor(index)
            indices.append(part)
            infos.append(info)
            missing -= len(part)
            # Before the end of a pass, a sampler of short slices may return fewer items.
            if missing <= 0 or not sampler.ran_out or not len(part):
                break
        if len(indices) == 1:
            return indices[0], infos[0]
        return torch.cat(indices), {key: torch.cat([i[key] for i in infos]) for key in infos[0]}

    def _position(self) -> list[Any]:
        return [sampler._position() for sampler in self._members]

    def _rewind(self, position: list[Any]) -> None:
        for sampler, part in zip(self._members, position, strict=True):
            sampler._rewind(part)

    def _to_plain(self, position: list[Any], before: list[Any] | None) -> list[Any]:
        earlier = before or [None] * len(position)
        each = zip(self._members, position, earlier, strict=True)
        return [sampler._to_plain(part, one) for sampler, part, one in each]

    def _of_plain(self, plain: list[Any], before: list[Any] | None) -> list[Any]:
        earlier = before or [None] * len(plain)
        each = zip(self._members, plain, earlier, strict=True)
        return [sampler._of_plain(part, one) for sampler, part, one in each]

    # -- priorities ----------------------------------------------------------------------------

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Sets priorities of items; see `PrioritizedSampler.update_priority`.

        The result contains the sums over all buffers. Items in buffers without priorities are not
        counted. If an error occurs, other buffers may already have been changed.

        Args:
            index: ``sample["index"]`` or ``info["index"]``, or a part of it.
            priority: one number per item, with the same leading shape as ``index``, or one number
                for all items.
            storage: the `StorageEnsemble`.
            generation: ``sample["index_generation"]``, or None to update without a check.
        """
        applied = stale = 0
        for part in routes(index, storage, {"priority": priority, "generation": generation}):
            tickets = known_tickets(part.entries["generation"])
            known = {} if tickets is None else {"generation": tickets}
            update = self._members[part.at].update_priority(
                part.where, part.entries["priority"], storage=part.storage, **known
            )
            if update is not None:  # a sampler of another package may return None
                applied, stale = applied + update.applied, stale + update.stale
        return PriorityUpdate(applied, stale)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Sets the priority of the items at ``index`` to the default priority of their buffers."""
        for part in routes(index, storage, {}):
            self._members[part.at].mark_update(part.where, storage=part.storage)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each sampler, keyed by its number, and ``p``."""
        return {**super().state_dict(), **self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` has returned."""
        super().load_state_dict(state_dict)
        self._take_state(state_dict)

    def _own_state(self) -> dict[str, Any]:
        """Returns the state of the ensemble itself, without the states of the samplers."""
        return {"_p": self._p}

    def _take_state(self, state: dict[str, Any]) -> None:
        """Sets the state that `_own_state` has returned."""
        self._p = state.get("_p", self._p)

    def _dump(self, directory: Path, moment: Any) -> None:
        super()._dump(directory, moment)
        OWN_FILES.write(directory, self, self._own_state(), moment)

    def _saved(self, moment: Any, folder: Path) -> Any:
        return super()._saved(moment, folder), self._own_state()

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        of_members, state = saved
        return super()._of_saved(of_members, folder), state

    def _read(self, directory: Path) -> Any:
        return super()._read(directory), OWN_FILES.read(directory, self)

    def _apply(self, saved: Any, loaded: Any) -> None:
        of_members, state = saved
        super()._apply(of_members, loaded)
        self._take_state(state or {})

    def _empty(self) -> None:
        for sampler in self._members:
            sampler._empty()

    def _subset(self, found: list[int]) -> SamplerEnsemble:
        return SamplerEnsemble(*(self._members[at] for at in found), **self.choice(found))

    def choice(self, found: list[int]) -> dict[str, Any]:
        """Returns constructor arguments for an ensemble of the selected buffers.

        Args:
            found: numbers of the buffers.
        """
        return {
            "p": self._p[found] if isinstance(self._p, torch.Tensor) else self._p,
            "sample_from_all": self.sample_from_all,
            "num_buffer_sampled": self._given_number,
        }
