"""Base class of samplers, which return the indices of items and information on the draw."""

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
"""Number of attempts if other processes overwrite the chosen items."""


class WithOrWithout(type):
    """Makes ``RandomSampler(replacement=False)`` create a `SamplerWithoutReplacement`."""

    _without_replacement: Any

    def __call__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
        """Creates a sampler, of the class without replacement if ``replacement`` is False."""
        if replacement:
            return super().__call__(*args, **options)
        if "_without_replacement" not in vars(cls):
            raise TypeError(
                f"a {cls.__name__} samples with replacement, and has no variant without "
                "replacement; derive from SamplerWithoutReplacement or "
                "SliceSamplerWithoutReplacement for it"
            )
        return cls._without_replacement(*args, **options)


class Sampler(Checkpoints):
    """Base class of samplers, which choose items.

    A custom sampler must define ``sample``. The buffer reads the items at the returned indices. The
    samplers of this package draw, gather and validate in one call of the C core if the storage has
    a ring.

    Source: ``torchrl.data.replay_buffers.Sampler``.
    """

    _rng: torch.Generator | None = None
    """Generator of the buffer. None means torch's default generator."""
    _rank_in_draws: int = UNKNOWN
    """Rank that is mixed into draws: 0 has no effect, and `UNKNOWN` is set until the first draw."""
    _rank_given: tuple[int | None, bool] = None, False
    """The buffer's ``rank``, and True if the buffer is treated as shared."""
    _own_rank: int | None = None
    """The sampler's own ``rank``."""

    _kind = "sampler"

    @property
    def _given_rank(self) -> int | None:
        return self._rank_given[0] if self._own_rank is None else self._own_rank

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws items.

        Args:
            storage: the storage to draw from.
            batch_size: number of items.

        Returns:
            Element indices, int64 ``[batch_size]`` or a tuple of ``ndim`` such tensors, and a dict
            of tensors ``[batch_size]`` that become part of the sample.

        Raises:
            EmptyBufferError: the storage is empty.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement sample()")

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if `sample` would return a batch now."""
        return len(storage) > 0

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        """Returns the number of different draws: items, or positions where a slice can start."""
        return len(storage)

    def add(self, index: Any) -> None:
        """Records that an item was written at ``index``."""

    def extend(self, index: Any) -> None:
        """Records that items were written at ``index``."""

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Records that the items at ``index`` were rewritten."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Changes priorities if the sampler has priorities."""
        return PriorityUpdate(0, 0)

    @property
    def default_priority(self) -> float:
        """Priority of a new item."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """True if the last draw ended a pass. Samplers with passes allow setting it to False."""
        return False

    def _position(self) -> Any:
        """Returns a position for `_rewind`, at low cost, or None if draws change no state."""
        return None

    def _rewind(self, position: Any) -> None:
        """Reverts all draws since `_position`, such as undelivered prefetched batches."""

    def _to_plain(self, position: Any, before: Any) -> Any:
        """Converts a position for a save.

        Raises TypeError if prefetched batches must be redrawn.
        """
        if position is not None:
            raise TypeError(
                f"the position of a {type(self).__name__} cannot be saved as plain values"
            )

    def _of_plain(self, plain: Any, before: Any) -> Any:
        """Reverses `_to_plain`."""
        return None

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """Repeats a draw because items were overwritten. In a pass, uses the same elements."""
        return self.sample(storage, self._size_of(index))

    def _size_of(self, index: Any) -> int:
        """Returns the batch size of a draw from its index."""
        return len(index[0] if isinstance(index, tuple) else index)

    def _divide(self, worker: int, workers: int, rank: int, seed: int) -> None:
        """Shares each pass with other workers of this learner, which get the same ``seed``."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler without its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state."""

    def _empty(self) -> None:
        """Records that the storage was emptied."""

    def _loaded_into(self, storage: Any) -> None:
        """Records that the loaded state belongs to the items in ``storage``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rank_in_draws": UNKNOWN}  # the copy may be in another learner

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def lanes_of(storage: Any) -> tuple[int, ...]:
    """Returns the sizes of a storage's dimensions after the first, or ``()`` for one dimension."""
    if isinstance(storage, RingBacked):
        return storage.lanes()
    ndim = getattr(storage, "ndim", 1)  # for other storages, use the shape, as TorchRL does
    return tuple(storage.shape[1:ndim]) if ndim > 1 else ()


def in_storage(storage: Any, elements: torch.Tensor) -> Any:
    """Converts elements to an index of ``storage``, to coordinates if the storage has lanes."""
    lanes = lanes_of(storage)
    return unravel(elements, lanes) if lanes else elements


def wait_for_marks(storage: Any) -> None:
    """Waits until no writer is marking slots, by acquiring the mutex."""
    ring: Ring | None = ring_of(storage)
    if ring is not None:
        ring.totals()


def unchanged(storage: Any, draw: Callable[[], _T | None], what: str) -> _T:
    """Repeats a draw until no chosen item is overwritten during the draw.

    Args:
        storage: the storage to draw from.
        draw: function that chooses items, and returns None if one was overwritten.
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
    """Calls a function that uses a torch generator, while no fork can happen."""
    # If a process forked while another thread draws, the child would inherit a locked generator.
    with _gate:
        return call(*arguments, **options)


def draw_key(sampler: Sampler, storage: Any) -> int:
    """Draws a 63-bit key from the sampler's generator and the `rank`. Takes 0.5 µs."""
    # Each thread reuses one tensor. torch fills the tensor, and the key is read in place.
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
    """Draws with a torch function, for a sampler whose rank is known."""
    generator = sampler._rng
    if sampler._rank_in_draws > 0:
        generator = torch.Generator().manual_seed(draw_key(sampler, None))
    return between_forks(call, *arguments, generator=generator)


def random_numbers(sampler: Sampler, count: int) -> Ints:
    """Returns random numbers below 2**62. Their bias modulo a count is below 2**-30."""
    numbers: Ints = drawn_by(sampler, cpu.randint, 2**62, (count,)).numpy()
    return numbers


def ask_rank(sampler: Sampler, storage: Any) -> int:
    """Returns the rank to mix into draws, which the first draw of a process determines."""
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


# These are C functions, because Ctrl-C may interrupt the start of a Python function.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)
os.register_at_fork(after_in_child=_forget_ranks)  # a child process may be another learner
