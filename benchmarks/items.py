"""Items of three sizes, and batches of them that are created before the time is measured.

The peers import this module in their own environments, so it must not import shmbuffer. Some of
them do not have torch and tensordict, so functions import these when they need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tensordict import TensorDict

Arrays = dict[str, NDArray[Any]]

#: How much memory the batches of one operation may take; large items get fewer of them.
POOL_BYTES = 64 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of items.

    Attributes:
        name: name on the command line.
        leaves: dtype and shape of each leaf.
        capacity: default capacity of a buffer, which takes a few hundred MB.
    """

    name: str
    leaves: dict[str, tuple[str, tuple[int, ...]]]
    capacity: int

    @property
    def nbytes(self) -> int:
        """Size of an item in bytes."""
        return sum(
            np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in self.leaves.values()
        )

    def arrays(self, count: int, rng: np.random.Generator) -> Arrays:
        """Returns a batch of random items as a dict of arrays ``[count, *shape]``."""
        return {
            name: _random(dtype, (count, *shape), rng)
            for name, (dtype, shape) in self.leaves.items()
        }

    def batches(self, count: int, form: str, seed: int = 0) -> list[Any]:
        """Returns 2 to 64 different batches of ``count`` items, as many as POOL_BYTES allow.

        Args:
            count: number of items in a batch; 0 returns single items without a batch dimension.
            form: ``"TensorDict"`` or ``"arrays"``.
            seed: seed of the contents.
        """
        rng = np.random.default_rng(seed)
        how_many = min(64, max(2, POOL_BYTES // (max(1, count) * self.nbytes)))
        batches = [self.arrays(max(1, count), rng) for _ in range(how_many)]
        if not count:
            batches = [{name: leaf[0, ...] for name, leaf in batch.items()} for batch in batches]
        if form == "arrays":
            return batches
        return [tensordict(batch, [count] if count else []) for batch in batches]

    def fill(self, write: Callable[[Any], object], count: int, form: str) -> None:
        """Writes ``count`` items, repeatedly the same ones if they are many.

        Args:
            write: function that writes a batch.
            count: number of items.
            form: form of the batches, as in `batches`.
        """
        chunk = max(1, min(count, 100_000, POOL_BYTES // self.nbytes))
        arrays = self.arrays(chunk, np.random.default_rng(0))
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            batch = {name: leaf[:size] for name, leaf in arrays.items()}
            write(batch if form == "arrays" else tensordict(batch, [size]))


def _kind(name: str, observation: tuple[str, tuple[int, ...]], action: Any, capacity: int) -> Kind:
    leaves = {
        "obs": observation,
        "next_obs": observation,
        "action": action,
        "reward": ("float32", ()),
        "done": ("bool", ()),
        "td_error": ("float32", ()),
    }
    return Kind(name, leaves, capacity)


KINDS = {
    "S": _kind("S", ("float32", (4,)), ("int64", ()), 1_000_000),
    "M": _kind("M", ("float32", (376,)), ("float32", (17,)), 200_000),
    "L": _kind("L", ("uint8", (4, 84, 84)), ("int64", ()), 20_000),
}
"""Small like CartPole's (49 bytes), like a humanoid's (3 KB), and like Atari frames (56 KB)."""


def tensordict(arrays: Arrays, batch_size: list[int]) -> TensorDict:
    """Returns a batch of arrays as a TensorDict that shares their memory."""
    import torch
    from tensordict import TensorDict

    return TensorDict(
        {name: torch.from_numpy(np.asarray(leaf)) for name, leaf in arrays.items()},
        batch_size=batch_size,
    )


def priorities(count: int, sets: int, seed: int = 0) -> list[NDArray[np.float32]]:
    """Returns sets of raw priorities, float32 ``[count]`` in (0, 1]."""
    return list(1 - np.random.default_rng(seed).random((sets, count), np.float32))


def index_sets(count: int, sets: int, capacity: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Returns sets of random indices of a buffer, int64 ``[count]``.

    A benchmark uses the sets in turn. With many sets, their parts of the tree are not in the cache,
    as in a learner that has sampled other items before.
    """
    return list(np.random.default_rng(seed).integers(capacity, size=(sets, count)))


def _random(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return np.asarray(rng.random(shape, np.float32), kind)
    return rng.integers(0, 2 if kind.kind == "b" else 100, shape).astype(kind)
