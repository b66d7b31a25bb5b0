"""What every sampler offers: indices of items, and what is known about the draw."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from shmbuffer.replay.checkpoints import Checkpoints
from shmbuffer.replay.storages.indexing import unravel
from shmbuffer.replay.storages.ring_backed import RingBacked

if TYPE_CHECKING:
    pass

NOTHING_THERE = "Cannot sample from an empty storage: write something into it first"


class PriorityUpdate(NamedTuple):
    """What became of a priority update."""

    applied: int
    """Items whose priority was set."""
    stale: int
    """Items that had been written over since they were sampled; theirs was dropped."""


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

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """What takes the place of a draw whose items were written over before they were read.

        Returns:
            As `sample`. Another draw; where there are passes, the same places with what they hold
            now, so that nothing is left out and nothing comes twice.
        """
        return self.sample(storage, len(index[0] if isinstance(index, tuple) else index))

    def state_dict(self) -> dict[str, Any]:
        """What the sampler knows beyond its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""

    def _empty(self) -> None:
        """The storage was emptied."""

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
_gate = threading.RLock()  # reentrant: a signal handler may fork while its thread draws


def between_forks(call: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """What a call answers that uses a generator of torch, with no fork of this process meanwhile.

    A generator has a mutex. A child that is forked while another thread draws inherits it locked,
    and its first draw would wait for ever.
    """
    with _gate:
        return call(*arguments, **options)


def draw_key(generator: torch.Generator | None) -> int:
    """One key of 63 bits for a draw, from ``generator`` or torch's default one.

    `torch.manual_seed` decides it.

    Cost: 0.5 µs; the tensor that torch fills is kept, one a thread, and read where it is.
    """
    try:
        key, number = _scratch.key
    except AttributeError:
        key = torch.empty((), dtype=torch.int64)
        number = key.numpy()
        _scratch.key = key, number
    with _gate:
        key.random_(generator=generator)
    return int(number.item())


# Methods of C: Ctrl-C comes in at the start of a function.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)
