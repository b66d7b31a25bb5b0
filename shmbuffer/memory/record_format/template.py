"""Lays out one record at a time, without arrays: for a single record those are most of the work."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from shmbuffer.memory.record_batch import HEADER_BYTES, RecordBatch
from shmbuffer.memory.record_format.chunks import Codec
from shmbuffer.memory.record_format.forms import Form
from shmbuffer.memory.record_format.headers import FRONT_AT, head_of
from shmbuffer.memory.record_format.limits import MAX_RAW_BYTES, MAX_U32, MAX_VOLUME, plausible


class Template:
    """The common bytes of all records of a form; ValueError if a chunk of the form is placed."""

    def __init__(self, form: Form) -> None:
        columns = form.columns
        if len(columns.placed):
            raise ValueError("a form with placed chunks has no template; assemble its records")
        self._start = bytes(HEADER_BYTES) + head_of(form)
        self._numbers = struct.Struct(f"<{columns.numbers}I")
        self._code = form.code
        self._inline_at = FRONT_AT + self._numbers.size + len(form.code)
        self._chunks = [
            (chunk.rank, chunk.itemsize, chunk.codec, chunk.alignment, chunk.joined)
            for chunk in form.chunks
        ]
        self._constants = columns.constants.tolist()
        expected, found = columns.equal
        self._equal = list(zip(expected.tolist(), found.tolist(), strict=True))

    def record(
        self, batch_dims: Sequence[int], dims: Sequence[int], pieces: Sequence[bytes | memoryview]
    ) -> RecordBatch | None:
        """The record of one item, the same bytes as `assemble` returns; None if that refuses it."""
        numbers = [*batch_dims]
        parts: list[bytes | memoryview] = [self._start, b"", self._code]
        end, held, first = self._inline_at, 0, 0
        frames: dict[int, tuple[int, int]] = {}  # of zstd, by chunk: expanded and stored bytes
        for number, (chunk, piece) in enumerate(zip(self._chunks, pieces, strict=True)):
            rank, itemsize, codec, alignment, joined = chunk
            shape = dims[first : first + rank]
            first += rank
            numbers += shape
            size, expanded = len(piece), math.prod(shape) * itemsize
            held += expanded
            if codec is Codec.RAW:
                if size != expanded:
                    return None
            elif joined is not None:
                if size:
                    return None
                before, stored = frames[joined]
                frames[joined] = before + expanded, stored
            else:
                numbers.append(size)
                if codec is Codec.ZSTD:
                    frames[number] = expanded, size
            # A zero must not hide how large the others are.
            if not expanded and math.prod(filter(None, shape)) * itemsize > MAX_VOLUME:
                return None
            if gap := -end % alignment:
                parts.append(bytes(gap))
            parts.append(piece)
            end += gap + size
        if not all(plausible(*sizes) for sizes in frames.values()):
            return None
        if held > MAX_RAW_BYTES or end > MAX_U32 or max(numbers, default=0) > MAX_U32:
            return None
        if self._equal:
            wide = numbers + self._constants
            for expected, found in self._equal:
                if wide[expected] != wide[found]:
                    return None
        parts[1] = self._numbers.pack(*numbers)
        parts.append(bytes(-end % 8))
        data = np.frombuffer(bytearray().join(parts), np.uint8)
        return RecordBatch(data, np.zeros(1, np.int64), np.array([end], np.int64))
