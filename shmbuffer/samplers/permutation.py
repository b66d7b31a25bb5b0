"""Computes a random order of many numbers piece by piece.

A table with the order would have to be computed completely before the first draw. Instead, each
number is computed from its position by a keyed permutation. The permutation is a generalized
Feistel network, which is applied repeatedly until the result is below the count (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002).

    position = high * columns + low          columns is about the square root of the count
    high = (high + hash(low)) mod rows       low = (low + hash(high)) mod columns, and so on
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.rank import mixed

FEWEST = 8192
"""Smallest count for which a permutation is used. A smaller table is fast and can be any order."""
_PIECE = 4096  # numbers that are computed together, so that the overhead of numpy's calls is small
_TURNS = 3  # rounds with two hashes each; with two rounds, small orders are not uniform
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_FOLD, _TOP, _BITS = np.uint64(32), np.uint64(33), np.uint64(31)  # a hash has 31 bits


class Permutation:
    """The numbers below ``count`` in a random order. Immutable.

    Args:
        count: length of the order.
        key: 63-bit key that determines the order. None means ascending order.

    Cost: 30 ns per number, plus 50 µs for the first access.
    """

    def __init__(self, count: int, key: int | None) -> None:
        self.count, self.key = count, key
        columns = max(1, math.isqrt(count))
        self._columns, self._rows = np.uint64(columns), np.uint64(-(-count // columns))
        self._keys = [np.uint64(mixed(key or 0, turn + 1)) for turn in range(2 * _TURNS)]
        self._first, self._piece = 0, np.empty(0, np.int64)  # start and numbers of the last piece

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: slice) -> Ints:
        """Returns the numbers at the positions in a slice, whose step must be 1."""
        first, end, _ = positions.indices(self.count)
        if self.key is None:
            return np.arange(first, max(first, end), dtype=np.int64)
        start, piece = self._first, self._piece
        if first < start or end > start + len(piece):
            start, last = first, min(self.count, max(end, first + _PIECE))
            piece = np.empty(last - first, np.int64)
            for at in range(0, len(piece), _PIECE):  # computed in parts that fit into the CPU cache
                part = piece[at : at + _PIECE]
                part[:] = self._images(np.arange(first + at, first + at + len(part), dtype="u8"))
            if len(piece) <= _PIECE:
                self._first, self._piece = start, piece
        return piece[first - start : end - start]

    def __reduce__(self) -> tuple[Any, ...]:
        return Permutation, (self.count, self.key)

    def _images(self, numbers: NDArray[np.uint64]) -> Ints:
        """Returns the numbers below the count at the given positions."""
        found = self._image(numbers)
        while len(outside := (found >= self.count).nonzero()[0]):
            found[outside] = self._image(found[outside])
        return found.view(np.int64)

    def _image(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Applies the Feistel network once. The results are below rows times columns."""
        rows, columns = self._rows, self._columns
        high = numbers // columns
        low = numbers - high * columns
        for turn in range(0, len(self._keys), 2):
            high = _shifted(high, low, self._keys[turn], rows)
            low = _shifted(low, high, self._keys[turn + 1], columns)
        return high * columns + low


def _shifted(
    half: NDArray[np.uint64], by: NDArray[np.uint64], key: np.uint64, size: np.uint64
) -> NDArray[np.uint64]:
    """Adds a keyed hash of ``by`` to ``half``, modulo ``size``."""
    bits = by + key  # sums and products may overflow
    bits *= _FACTORS[0]
    bits ^= bits >> _FOLD
    bits *= _FACTORS[1]
    bits >>= _TOP
    bits *= size
    bits >>= _BITS
    bits += half
    found: NDArray[np.uint64] = np.minimum(bits, bits - size)  # bits - size overflows if below 0
    return found
