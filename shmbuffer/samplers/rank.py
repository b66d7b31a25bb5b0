"""Ranks of learners, so that learners with the same seed draw different items.

    key of a draw = mixed(63 bits of torch's default generator, rank)

The rank has no effect if it is 0, if the user has passed a generator, or if the buffer is not
shared. A draw does not depend on process ids or incarnations, so that a run can be reproduced.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.key_names import is_number
from shmbuffer.tensors.form import cpu

UNKNOWN = -1
"""Placeholder for a rank that has not been determined yet."""

_BITS = 2**64 - 1
_KEY = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def require_rank(rank: Any) -> int | None:
    """Returns ``rank``. Raises ValueError unless it is None or an integer of at least 0."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise ValueError(
            f"rank must be the number of this learner (0, 1, 2, ...) or None, got {rank!r}"
        )
    return rank


def known_rank(given: int | None) -> int | None:
    """Returns the rank of this process, or None if it is unknown.

    The rank is ``given``, the rank in torch.distributed, or the environment variable ``RANK``. The
    first of these that is set is used.
    """
    if given is not None:
        return given
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "").strip()
    if text and not is_number(text):
        raise ValueError(
            "the environment variable RANK must be the number of this learner (0, 1, 2, ...), got "
            f"{text!r}; correct or unset it, or pass rank= to the buffer or to attach()"
        )
    return int(text) if text else None


def mixed(key: int, rank: int) -> int:
    """Mixes a rank into a 63-bit key, with the finalizer of SplitMix64. Rank 0 changes nothing."""
    if not rank:
        return key
    return int(_scrambled(key ^ _scrambled(rank * _GOLDEN))) & _KEY


def _scrambled(bits: Any) -> Any:
    """Applies the finalizer of SplitMix64 to an int or to an array of uint64."""
    bits &= _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return bits ^ (bits >> 31)


class Share(NamedTuple):
    """A learner's share of a pass: one of each ``world_size`` consecutive elements."""

    # The share is different in each pass. Whether an element belongs to it does not depend on the
    # number of elements.
    rank: int
    """Rank of the learner."""
    world_size: int
    """Number of learners."""
    seed: int
    """Seed of the shares, which is the same for all learners."""
    number: int
    """Number of the pass, starting at 0."""

    def of(self, places: Ints, *, shuffle: bool, even: bool) -> Ints:
        """Returns the elements that belong to this share, in the order of the pass.

        Args:
            places: all elements of the pass.
            shuffle: if True, the elements are shared and ordered at random.
            even: if True, elements are dropped so that all learners get the same number.
        """
        common = mixed(self.seed & _KEY, self.number + 1)
        block, at = np.divmod(places, self.world_size)
        turn = np.zeros(len(places), np.int64)
        if shuffle:
            blocks = block.astype(np.uint64) * np.uint64(_GOLDEN)  # the product may overflow
            turn = (_scrambled(blocks ^ np.uint64(common)) % self.world_size).astype(np.int64)
        owner = (at + turn) % self.world_size
        ours: Ints = places[owner == self.rank]
        if shuffle:
            generator = torch.Generator().manual_seed(mixed(common, self.rank + 1))
            ours = ours[cpu.randperm(len(ours), generator=generator).numpy()]
        if even:
            ours = ours[: np.bincount(owner, minlength=self.world_size).min()]
        return ours


def share_rank(given: int | None, world_size: int) -> int:
    """Returns the rank of a learner that shares its passes with other learners.

    Args:
        given: the argument ``rank``, or None.
        world_size: number of learners.

    Raises:
        ValueError: the rank is unknown, or is not below ``world_size``.
    """
    rank = known_rank(given)
    if rank is None and world_size > 1:
        raise ValueError(
            f"{world_size} learners share a pass, but the rank of this learner is unknown; pass "
            "rank= to the sampler or the buffer, initialize torch.distributed, or set the "
            "environment variable RANK"
        )
    if (rank or 0) >= world_size:
        raise ValueError(
            f"rank must be below world_size={world_size}, the number of learners that share a "
            f"pass, got {rank}; pass the number of all learners as world_size, or a smaller rank"
        )
    return rank or 0


def rank_of_draws(
    storage: Any, generator: torch.Generator | None, given: int | None, *, shared: bool
) -> int:
    """Returns the rank that a sampler mixes into its draws.

    Warns if another process draws from the same buffer with an equal random state and rank.

    Args:
        storage: the storage to draw from.
        generator: random generator that the user has passed, or None for torch's default.
        given: the argument ``rank``, or None.
        shared: True if the buffer is treated as shared.
    """
    engine = getattr(storage, "open_engine", None)
    seat = None if engine is None else engine.seat
    if seat is not None and not seat.is_ours():
        seat.rejoin()
    shared = shared or getattr(storage, "shared", False)  # other storages may lack the attribute
    if not (shared or (seat is not None and seat.was_joined())):
        return 0
    rank = (known_rank(given) if generator is None else given) or 0
    if seat is not None and not seat.closed:
        source = torch.default_generator if generator is None else generator
        state = source.get_state().numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, salt=rank.to_bytes(8, "little")).digest()
        origin = int.from_bytes(digest, "little") | 1
        if pids := seat.registry.note_first_draw(seat.entry, origin):
            _warn(seat.where, pids, given=generator is not None)
    return rank


def _warn(where: str, pids: list[int], *, given: bool) -> None:
    """Warns that this process samples the same batches as other processes.

    Args:
        where: description of the buffer.
        pids: pids of the other processes.
        given: True if the user has passed a generator.
    """
    remedy = (
        "use another seed for each generator=, or pass rank="
        if given
        else "pass rank= to attach(), set the environment variable RANK, or seed each process "
        "with seed + rank"
    )
    named = f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"
    warnings.warn(
        f"{where}: this process samples the same batches as {named}, because both started with "
        f"the same random state and rank; {remedy}",
        stacklevel=2,
    )
