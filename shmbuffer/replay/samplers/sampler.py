"""What every sampler offers: indices of items, and what is known about the draw."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shmbuffer.numpy.indices import unravel
from shmbuffer.numpy.priorities import PriorityUpdate
from shmbuffer.replay.checkpoints import Checkpoints
from shmbuffer.replay.samplers.rank import UNKNOWN, mixed, rank_of_draws
from shmbuffer.replay.storages.ring_backed import RingBacked

NOTHING_THERE = "Cannot sample from an empty storage: write something into it first"
ATTEMPTS = 16
"""How often a draw is made again, where others write over what it chose, before it gives up."""


class WithOrWithout(type):
    """Makes ``RandomSampler(replacement=False)`` the sampler that draws without replacement."""

    _without_replacement: Any

    def __call__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
        """A sampler; one that is derived from such a class draws with replacement."""
        if replacement:
            return super().__call__(*args, **options)
        if "_without_replacement" not in vars(cls):
            raise TypeError(
                f"a {cls.__name__} draws with replacement, and has no form without replacement; "
                "derive from SamplerWithoutReplacement or SliceSamplerWithoutReplacement for it"
            )
        return cls._without_replacement(*args, **options)


class Sampler(Checkpoints):
    """Who draws.

    A sampler of your own needs ``sample``; the buffer then reads the items at the indices that it
    gives. Those of this package draw, gather and validate in one call of the C core, where the
    storage lies on a ring.

    Source: ``torchrl.data.replay_buffers.Sampler``.
    """

    _rng: torch.Generator | None = None
    """The buffer's generator; None is torch's default one."""
    _rank_in_draws: int = UNKNOWN
    """What is mixed into its draws: 0 nothing, `UNKNOWN` until the first draw."""
    _rank_given: tuple[int | None, bool] = None, False
    """The buffer's ``rank``, and whether it says that others have it too."""
    _own_rank: int | None = None
    """The ``rank`` that the sampler itself was given."""

    @property
    def _given_rank(self) -> int | None:
        return self._rank_given[0] if self._own_rank is None else self._own_rank

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw.

        Args:
            storage: where from.
            batch_size: how many items.

        Returns:
            Element indices: int64 ``[batch_size]``, or a tuple of ``ndim`` of them; and a dict of
            tensors ``[batch_size]`` that become part of the sample.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sample()")

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether `sample` would give a batch now.

        Args:
            storage: where from.
            batch_size: how many items.
        """
        return len(storage) > 0

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        """How many different draws there are: items, or places where a slice can begin."""
        return len(storage)

    def add(self, index: Any) -> None:
        """An item was written at ``index``."""

    def extend(self, index: Any) -> None:
        """Items were written at ``index``."""

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """The items at ``index`` were written again."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Change priorities, where the sampler has any."""
        return PriorityUpdate(0, 0)

    @property
    def default_priority(self) -> float:
        """The priority of a new item."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether the draw before ended a pass, and an iteration over the buffer with it.

        Settable where there are passes: False begins a new one.
        """
        return False

    def _position(self) -> Any:
        """What `_rewind` needs to take back the draws from here on.

        Cheap; None where draws leave no trace. A batch that was prefetched and is never delivered
        is taken back.
        """
        return None

    def _rewind(self, position: Any) -> None:
        """As if nothing had been drawn since `_position`."""

    def _to_plain(self, position: Any, before: Any) -> Any:
        """A position as a save holds it; ``before`` is the one before it in the save, or None.

        Without it, batches that were made ahead are drawn again after a load.
        """
        if position is not None:
            raise TypeError(f"the position of a {type(self).__name__} has no plain form")

    def _of_plain(self, plain: Any, before: Any) -> Any:
        """The position again."""
        return None

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """What takes the place of a draw whose items were written over before they were read.

        Returns:
            As `sample`. Another draw; where there are passes, the same places with what they hold
            now, so that nothing is left out and nothing comes twice.
        """
        return self.sample(storage, len(index[0] if isinstance(index, tuple) else index))

    def _divide(self, worker: int, workers: int, rank: int, seed: int) -> None:
        """Share each pass with the other workers of this learner.

        Args:
            worker: which of them this is, from 0.
            workers: how many there are.
            rank: of the learner.
            seed: the same in all of them, and another one each time that they are started.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the sampler knows beyond its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""

    def _empty(self) -> None:
        """The storage was emptied."""

    def _loaded_into(self, storage: Any) -> None:
        """The state that was loaded is of the items that ``storage`` has now."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rank_in_draws": UNKNOWN}  # another process, another learner

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def lanes_of(storage: Any) -> tuple[int, ...]:
    """Sizes of a storage's dimensions after the first; ``()`` where it has one dimension."""
    if isinstance(storage, RingBacked):
        return storage.lanes()
    ndim = getattr(storage, "ndim", 1)  # somebody else's: TorchRL asks for its shape
    return tuple(storage.shape[1:ndim]) if ndim > 1 else ()


def in_storage(storage: Any, elements: torch.Tensor) -> Any:
    """Elements as an index of ``storage``: a tuple of coordinates where there are lanes."""
    lanes = lanes_of(storage)
    return unravel(elements, lanes) if lanes else elements


_T = TypeVar("_T")

_scratch = threading.local()
_asked: weakref.WeakSet[Sampler] = weakref.WeakSet()
_gate = threading.RLock()  # reentrant: a signal handler may fork while its thread draws


def between_forks(call: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """What a call answers that uses a generator of torch, with no fork of this process meanwhile.

    A generator has a mutex. A child that is forked while another thread draws inherits it locked,
    and its first draw would wait for ever.
    """
    with _gate:
        return call(*arguments, **options)


def draw_key(sampler: Sampler, storage: Any) -> int:
    """One key of 63 bits for a draw, from the sampler's generator or torch's default one.

    `torch.manual_seed` decides it, and on a shared buffer the rank of this learner: see `rank`.

    Cost: 0.5 µs; the tensor that torch fills is kept, one a thread, and read where it is.
    """
    if rank := sampler._rank_in_draws:
        rank = ask_rank(sampler, storage)
    try:
        key, number = _scratch.key
    except AttributeError:
        key = torch.empty((), dtype=torch.int64)
        number = key.numpy()
        _scratch.key = key, number
    with _gate:
        key.random_(generator=sampler._rng)
    found = int(number.item())
    return mixed(found, rank) if rank else found


def drawn_by(sampler: Sampler, call: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """What a function of torch draws for a sampler that has asked for its rank."""
    generator = sampler._rng
    if sampler._rank_in_draws > 0:
        generator = torch.Generator().manual_seed(draw_key(sampler, None))
    return between_forks(call, *arguments, generator=generator)


def ask_rank(sampler: Sampler, storage: Any) -> int:
    """What is mixed into the draws of a sampler: decided once a process, at its first draw."""
    if sampler._rank_in_draws < 0:
        sampler._rank_in_draws = between_forks(
            rank_of_draws,
            storage,
            sampler._rng,
            sampler._given_rank,
            shared=sampler._rank_given[1],
        )
        _asked.add(sampler)
    return sampler._rank_in_draws


def _forget_ranks() -> None:
    for sampler in list(_asked):
        sampler._rank_in_draws = UNKNOWN


# Methods of C: Ctrl-C comes in at the start of a function.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)
os.register_at_fork(after_in_child=_forget_ranks)  # a child may be another learner
