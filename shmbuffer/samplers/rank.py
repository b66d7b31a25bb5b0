"""Ranks of learners, which make the draws of learners with the same seed differ.

    key of a draw = mixed(63 bits of torch's default generator, rank)

The bits are unchanged for rank 0, for a user's own generator, and for a buffer that is not shared.
A draw does not depend on process ids or incarnations, so that a run is reproducible.
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
"""Placeholder for a rank that the next draw determines."""

_BITS = 2**64 - 1
_KEY = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def require_rank(rank: Any) -> int | None:
    """Raises ValueError unless ``rank`` is a rank or None."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise ValueError(
            f"rank must be the number of this learner (0, 1, 2, ...) or None, got {rank!r}"
        )
    return rank


def known_rank(given: int | None) -> int | None:
    """Returns the first known rank: ``given``, torch.distributed's, or RANK, otherwise None."""
    if given is not None:
        return given
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "").strip()
    if text and not is_number(text):
        raise ValueError(
            f"the environment variable RANK is {text!r}, which is not the number of a learner; "
            "correct it, unset it, or pass rank= to the buffer or to attach()"
        )
    return int(text) if text else None


def mixed(key: int, rank: int) -> int:
    """Returns a different 63-bit key for each rank above 0 (the finalizer of SplitMix64)."""
    if not rank:
        return key
    return int(_scrambled(key ^ _scrambled(rank * _GOLDEN))) & _KEY


def _scrambled(bits: Any) -> Any:
    """Scrambles the bits of an int or of uint64s."""
    bits &= _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return bits ^ (bits >> 31)


class Share(NamedTuple):
    """A learner's share of a pass: one of every ``world_size`` consecutive elements."""

    # The share differs from pass to pass. It depends on the element, not on the number of elements.
    rank: int
    world_size: int
    seed: int
    number: int
    """Number of the pass, from 0."""

    def of(self, places: Ints, *, shuffle: bool, even: bool) -> Ints:
        """Returns our share of ``places``, in order. ``even`` makes all shares equally large."""
        common = mixed(self.seed & _KEY, self.number + 1)
        block, at = np.divmod(places, self.world_size)
        turn = np.zeros(len(places), np.int64)
        if shuffle:
            blocks = block.astype(np.uint64) * np.uint64(_GOLDEN)  # wraps intentionally
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
    """Returns the rank of a learner that shares its passes.

    Raises ValueError if the rank is unknown or too large.
    """
    rank = known_rank(given)
    if rank is None and world_size > 1:
        raise ValueError(
            f"{world_size} learners share a pass, but the rank of this one is unknown; pass rank= "
            "to the sampler or the buffer, initialize torch.distributed, or set the environment "
            "variable RANK"
        )
    if (rank or 0) >= world_size:
        raise ValueError(
            f"{world_size} learners share a pass, but this one has rank {rank}; pass the number of "
            "all learners as world_size, and a smaller rank"
        )
    return rank or 0


def rank_of_draws(
    storage: Any, generator: torch.Generator | None, given: int | None, *, shared: bool
) -> int:
    """Returns the rank to mix into draws. Warns if another process draws from the same state."""
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
