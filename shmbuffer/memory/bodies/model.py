"""What all records have in common that start with the same bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.bodies.forms import Form, form_of
from shmbuffer.memory.bodies.heads import HEAD
from shmbuffer.memory.bodies.pieces import measure, place_inline, require_short
from shmbuffer.memory.records import HEADER_BYTES


class Model(NamedTuple):
    """A record without a front: what all records have in common that start with the same bytes."""

    form: Form
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """int64[pieces]."""
    sizes: NDArray[np.int64]
    """int64[pieces]."""
    end: int
    start: NDArray[np.uint8]
    """All bytes up to the end of the form; zeros where the header is."""
    gaps: NDArray[np.int64]
    """Words of 8 bytes in which there are zeros between the pieces."""


@lru_cache(256)
def model(start: bytes) -> Model:
    """A record whose body starts with these bytes, up to the end of its form."""
    _, _, told, form_bytes, _, _ = HEAD.unpack_from(start)
    form_at = HEAD.size + 4 * told
    form = form_of(start[form_at : form_at + form_bytes], np.array([told]))
    numbers = np.frombuffer(start, "<u4", told, HEAD.size).astype(np.int64)[None]
    sizes = measure(form, numbers)
    offsets = np.zeros_like(sizes)
    at = np.array([HEADER_BYTES + len(start)])
    ends = place_inline(form, sizes, at, offsets)
    require_short(ends)
    end = int(ends[0])
    gaps = np.append(offsets[0, form.columns.gapped], end + 7 & -8) - 1 >> 3
    whole = np.zeros(HEADER_BYTES + len(start), np.uint8)
    whole[HEADER_BYTES:] = np.frombuffer(start, np.uint8)
    return Model(form, numbers[0], offsets[0], sizes[0], end, whole, gaps)
