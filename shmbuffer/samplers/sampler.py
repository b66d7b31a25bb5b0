"""The base class of samplers, and functions that draw random numbers for samplers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shmbuffer.items.indices import unravel
from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.rank import UNKNOWN, mixed, rank_of_draws
from shmbuffer.saves.checkpoints import Checkpoints
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu

_T = TypeVar("_T")

NOTHING_THERE = "Cannot sample from an empty storage: write something into it first"
ATTEMPTS = 16
"""Maximum number of attempts to draw items that no other process overwrites during the draw."""


class WithOrWithout(type):
    """Metaclass whose classes return another sampler if ``replacement=False`` is passed.

    ``RandomSampler(replacement=False)``, for example, is a `SamplerWithoutReplacement`.
    """

    _without_replacement: Any  # the class to use if ``replacement`` is False

    def __call__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
        """Creates a sampler of this class, or of the class without replacement."""
        if replacement:
            return super().__call__(*args, **options)
        if "_without_replacement" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} has no variant without replacement; derive a class from "
                "SamplerWithoutReplacement or SliceSamplerWithoutReplacement instead"
            )
        return cls._without_replacement(*args, **options)


class Sampler(Checkpoints):
    """Base class for samplers, which choose the items of a batch.

    A custom sampler must define ``sample``. The buffer reads the items at the returned indices. If
    the storage has a ring, the samplers of this package draw, gather and validate items in one call
    of the C core.

    Source: ``torchrl.data.replay_buffers.Sampler``.
    """

    _rng: torch.Generator | None = None
    """The random generator of the buffer. None means torch's default generator."""
    _rank_in_draws: int = UNKNOWN
    """Rank that is mixed into the keys of draws. 0 changes nothing; `UNKNOWN` before a draw."""
    _rank_given: tuple[int | None, bool] = None, False
    """The argument ``rank`` of the buffer, and True if the buffer is treated as shared."""
    _own_rank: int | None = None
    """The argument ``rank`` of the sampler."""

    _kind = "sampler"

    @property
    def _given_rank(self) -> int | None:
        """The argument ``rank`` of the sampler or, if that is None, of the buffer."""
        return self._rank_given[0] if self._own_rank is None else self._own_rank

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws items.

        Args:
            storage: the storage to draw from.
            batch_size: number of items.

        Returns:
            Element indices, int64 ``[batch_size]`` or a tuple of ``ndim`` such tensors, and a dict
            of tensors ``[batch_size]`` that become entries of the sample.

        Raises:
            EmptyBufferError: the storage is empty.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement sample()")

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if `sample` would return a batch now."""
        return len(storage) > 0

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        """Returns the number of possible draws: items, or positions at which a slice can start."""
        return len(storage)

    def add(self, index: Any) -> None:
        """Called by the buffer after it has written an item at ``index``."""

    def extend(self, index: Any) -> None:
        """Called by the buffer after it has written items at ``index``."""

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Called when the items at ``index`` have been changed."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Sets the priorities of items. Does nothing if the sampler has no priorities."""
        return PriorityUpdate(0, 0)

    @property
    def default_priority(self) -> float:
        """The priority of new items."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """True if the last draw ended a pass. In samplers with passes, it can be set to False."""
        return False

    def _position(self) -> Any:
        """Returns the state that draws change, for `_rewind`, or None if draws change no state.

        The call is fast, because it is made before each prefetched batch.
        """
        return None

    def _rewind(self, position: Any) -> None:
        """Restores a state that `_position` returned, so that later draws are repeated.

        Used to discard prefetched batches that were not delivered.
        """

    def _to_plain(self, position: Any, before: Any) -> Any:
        """Converts the result of `_position` to plain values for a save.

        Args:
            position: the position to save.
            before: the previous position in the same save, which can share values, or None.

        Raises:
            TypeError: the position cannot be saved.
        """
        if position is not None:
            raise TypeError(
                f"the position of a {type(self).__name__} cannot be saved as plain values"
            )

    def _of_plain(self, plain: Any, before: Any) -> Any:
        """Converts plain values that `_to_plain` returned back to a position."""
        return None

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """Repeats a draw whose items were overwritten before they could be read.

        Samplers with passes draw the same elements again.
        """
        return self.sample(storage, self._size_of(index))

    def _size_of(self, index: Any) -> int:
        """Returns the number of items in an index that `sample` returned."""
        return len(index[0] if isinstance(index, tuple) else index)

    def _divide(self, worker: int, workers: int, rank: int, seed: int) -> None:
        """Divides each pass among the data loader workers of a learner.

        Args:
            worker: number of this worker.
            workers: number of workers.
            rank: rank of the learner.
            seed: seed of the order, which is the same for all workers.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler, without the arguments of its constructor."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` has returned."""

    def _empty(self) -> None:
        """Called when the storage has been emptied."""

    def _loaded_into(self, storage: Any) -> None:
        """Called after a load. The loaded state belongs to the items in ``storage``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rank_in_draws": UNKNOWN}  # another learner may use the copy

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def lanes_of(storage: Any) -> tuple[int, ...]:
    """Returns the sizes of a storage's dimensions after the first, or ``()`` for one dimension."""
    if isinstance(storage, RingBacked):
        return storage.lanes()
    ndim = getattr(storage, "ndim", 1)  # for other storages, use the shape, as TorchRL does
    return tuple(storage.shape[1:ndim]) if ndim > 1 else ()


def in_storage(storage: Any, elements: torch.Tensor) -> Any:
    """Converts element numbers to an index of a storage.

    The index is a tuple of coordinates if the storage has several dimensions.
    """
    lanes = lanes_of(storage)
    return unravel(elements, lanes) if lanes else elements


def wait_for_marks(storage: Any) -> None:
    """Waits until the writer that is changing slot words, if any, has released the mutex."""
    ring: Ring | None = ring_of(storage)
    if ring is not None:
        ring.totals()


def unchanged(storage: Any, draw: Callable[[], _T | None], what: str) -> _T:
    """Repeats a draw until no chosen item was overwritten during the draw.

    Args:
        storage: the storage to draw from.
        draw: function that chooses items, and returns None if an item was overwritten.
        what: name of the chosen items, for the message.

    Raises:
        RuntimeError: items were overwritten in each attempt.
    """
    for attempt in range(ATTEMPTS):
        if attempt > 1:
            wait_for_marks(storage)
        if (drawn := draw()) is not None:
            return drawn
    raise RuntimeError(
        f"{what} were overwritten in each of {ATTEMPTS} attempts to read them; make the buffer "
        "larger, or write more slowly"
    )


_scratch = threading.local()
_asked: weakref.WeakSet[Sampler] = weakref.WeakSet()
_gate = threading.RLock()  # reentrant, because a signal handler may fork while its thread draws


def between_forks(call: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """Calls a function that uses a torch generator, and delays forks of this process meanwhile."""
    # Otherwise a child that is forked during the call would inherit a locked generator.
    with _gate:
        return call(*arguments, **options)


def draw_key(sampler: Sampler, storage: Any) -> int:
    """Draws a 63-bit key from the sampler's generator, and mixes the rank into it. Takes 0.5 µs."""
    # Each thread reuses one tensor, because allocating a tensor would take longer than the draw.
    if rank := sampler._rank_in_draws:
        rank = ask_rank(sampler, storage)
    try:
        key, number = _scratch.key
    except AttributeError:
        with cpu.without_inference_mode():
            key = cpu.empty((), dtype=torch.int64)
        number = key.numpy()
        _scratch.key = key, number
    with _gate:
        key.random_(generator=sampler._rng)
    found = int(number.item())
    return mixed(found, rank) if rank else found


def drawn_by(sampler: Sampler, call: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Draws random numbers with a torch function and the sampler's generator and rank.

    Args:
        sampler: the sampler, whose rank must be known (see `ask_rank`).
        call: a torch function that accepts ``generator``.
        *arguments: further arguments of the function.
    """
    generator = sampler._rng
    if sampler._rank_in_draws > 0:
        generator = torch.Generator().manual_seed(draw_key(sampler, None))
    return between_forks(call, *arguments, generator=generator)


def random_numbers(sampler: Sampler, count: int) -> Ints:
    """Returns ``count`` random numbers below 2**62.

    If the numbers are reduced modulo a length below 2**32, their bias is below 2**-30.
    """
    numbers: Ints = drawn_by(sampler, cpu.randint, 2**62, (count,)).numpy()
    return numbers


def ask_rank(sampler: Sampler, storage: Any) -> int:
    """Returns the rank that is mixed into draws. It is determined by a process's first draw."""
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
    """Makes all samplers determine their rank again, in a forked process."""
    for sampler in list(_asked):
        sampler._rank_in_draws = UNKNOWN


# These are C functions, because Ctrl-C could interrupt a Python function before its first line.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)
os.register_at_fork(after_in_child=_forget_ranks)  # the child process may be another learner
