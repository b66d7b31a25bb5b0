"""Items that name their writer and their sequence number in every byte.

    who   chair << 13 | life     chair: number of the chair; life: how often it was filled
    key   who << 32 | sequence   of an item; below 2^50
    word  key * ODD + leaf * LEAF + position * STEP    (mod 2^64) for each word of each leaf

The key can be computed from each word of each leaf. A mixture of two items therefore shows in the
bytes, even if the engine's own words and checksums are wrong. Priorities contain a key as well: the
key of the item, or of the update that set the priority.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

ODD = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(ODD), -1, 2**64))
LEAF = np.uint64(0xC2B2AE3D27D4EB4F)
STEP = np.uint64(0x165667B19E3779F9)
LIVES = 1 << 13
#: Chairs have the numbers 1 to 10. Their forked children and their threads have numbers above.
CHILDREN, THREADS = 10, 20

#: The length at the beginning of a record's body (see `records_of`).
_LENGTH = struct.Struct("<Q")


def who_of(chair: int, life: int) -> int:
    return chair * LIVES + life


def keys_of(who: int, first: int, count: int) -> Keys:
    """Returns the keys of the items first, first + 1, ... of a writer."""
    return (np.uint64(who) << np.uint64(32)) + np.arange(first, first + count, dtype=np.uint64)


def row(keys: Keys, leaf: int, size: int) -> Bytes:
    """Returns the bytes of one leaf of these items, ``[len(keys), size]``."""
    steps = np.arange(-(-size // 8), dtype=np.uint64) * STEP + _of_leaf(leaf)
    words = np.asarray(keys, np.uint64)[:, None] * ODD + steps[None, :]
    return np.ascontiguousarray(words.view(np.uint8)[:, :size])


def key_in(data: Bytes, leaf: int = 0) -> Keys:
    """Computes the keys from the first words of a leaf. Arbitrary bytes give arbitrary keys."""
    words = np.ascontiguousarray(data[:, :8]).view(np.uint64)[:, 0]
    return (words - _of_leaf(leaf)) * INVERSE


def _of_leaf(leaf: int) -> np.uint64:
    return np.uint64(leaf * int(LEAF) & 2**64 - 1)


def torn(leaves: list[Bytes]) -> NDArray[np.int64]:
    """Returns the rows whose leaves do not all belong to one item. Every byte is compared."""
    keys = key_in(leaves[0])
    wrong = keys >> np.uint64(50) != 0
    for leaf, data in enumerate(leaves):
        wrong |= (data != row(keys, leaf, data.shape[1])).any(axis=1)
    return wrong.nonzero()[0]


def record_words(key: int, mean: int) -> int:
    """Returns the number of words in a record's body, at least 1 and ``mean`` on average."""
    return 1 + (key * 0x9E3779B97F4A7C15 >> 17) % (2 * mean - 1)


def record_body(key: int, mean: int) -> bytes:
    """Returns the body of a record without its length."""
    steps = _steps(2 * mean)[: record_words(key, mean)]
    return (steps + np.uint64(key * int(ODD) & 2**64 - 1)).tobytes()


@cache
def _steps(words: int) -> Keys:
    """Returns the value that each word adds to the first word of the leaf."""
    return np.arange(words, dtype=np.uint64) * STEP + _of_leaf(0)


def record_bytes(keys: Keys, mean: int) -> int:
    """Returns how many bytes a batch of records takes in the byte ring, including the headers."""
    mixed = np.asarray(keys, np.uint64).tolist()
    return sum(24 + 8 + 8 * record_words(key, mean) for key in mixed)


def records_of(keys: Keys, mean: int) -> tuple[Bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Builds a batch of records: the data, the offset of each header, and the size of each record.

    The body of a record consists of its own length and its words.
    """
    numbers = np.asarray(keys, np.uint64).tolist()
    bodies = [record_body(key, mean) for key in numbers]
    parts = [bytes(24) + _LENGTH.pack(len(body)) + body for body in bodies]
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    data = np.frombuffer(bytearray(b"".join(parts)), np.uint8)
    return data, starts[:-1].copy(), np.diff(starts)


def record_key(body: bytes, mean: int) -> int | None:
    """Returns the key of a record from the bytes after its header, or None if it is torn."""
    if len(body) < 2 * _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(body)
    own = body[_LENGTH.size :]
    key = _LENGTH.unpack_from(own)[0] * int(INVERSE) & 2**64 - 1 if len(own) >= 8 else 2**63
    if key >> 50 or len(own) != length or own != record_body(key, mean):
        return None
    return key


def priority(key: Keys) -> NDArray[np.float64]:
    """Returns a priority between 1/4 and 16 that contains the key."""
    exponents = (np.asarray(key, np.uint64) * ODD >> np.uint64(40)).astype(np.int64) % 6 - 2
    return np.ldexp(1.0 + np.asarray(key, np.float64) * 2.0**-52, exponents)


def key_of_priority(raw: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the key in each priority, or -1 if a priority contains none."""
    mantissas, _ = np.frexp(np.where(np.isfinite(raw), raw, 0.0))
    keys = ((2 * mantissas - 1) * 2.0**52).astype(np.int64)
    exact = priority(np.maximum(keys, 0).astype(np.uint64)) == raw
    return np.where(exact & (keys < 2**50), keys, -1)
