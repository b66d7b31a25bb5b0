"""Streams are stored with the writer in one word, which is compared as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.streams import check_streams, expand_streams
from tests.kit.rings import ring_of
from tests.memory.rows import LEAVES, Maker, Rows, fill, place, require_sound, write

LAST = layout.STREAMS - 1


def u64(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def u32(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


def write_in(ring: Ring, numbers: Any, *streams: int) -> int:
    rows = Rows.of(LEAVES, np.array(numbers))
    return ring.write(rows.addresses, len(numbers), streams=u32(*streams))


def streams_of(ring: Ring) -> list[int]:
    found: list[int] = layout.stream_of(ring.live.sources).tolist()
    return found


# -- the word --------------------------------------------------------------------------------------


@pytest.mark.product(few=10)
@pytest.mark.parametrize("stream", [0, 1, 2, 255, 256, 257, 2**16, LAST])
@pytest.mark.parametrize("writer", [1, 2, 2**32, 2**38 - 1, 2**38, 2**38 + 7, 2**39 - 2])
def test_a_source_is_taken_apart_as_it_was_made(writer: int, stream: int) -> None:
    source = layout.source_of(u64(writer), u64(stream))
    assert layout.writer_of(source).tolist() == [writer]
    assert layout.stream_of(source).tolist() == [stream]


def test_no_two_streams_of_any_two_writers_have_one_word() -> None:
    writers = u64(1, 2, 3, 2**38 - 1, 2**38, 2**38 + 1)
    streams = u64(0, 1, 2, 2**8, 2**9, 2**23, LAST)
    both = np.array(np.meshgrid(writers, streams)).reshape(2, -1)
    assert len(np.unique(layout.source_of(*both))) == len(writers) * len(streams)


def test_the_word_of_an_item_in_stream_0_is_its_writer() -> None:
    assert layout.source_of(u64(7, 2**38 - 1), u64(0, 0)).tolist() == [7, 2**38 - 1]


# -- writes ----------------------------------------------------------------------------------------


def test_the_core_and_python_split_a_source_alike(ring: Ring) -> None:
    mine = ring.seat.incarnation
    write_in(ring, range(5), 0, 1, 255, 256, LAST)
    assert ring.live.sources[:5].tolist() == [
        mine,
        *(stream << 39 | mine for stream in (1, 255, 256, LAST)),
    ]
    assert streams_of(ring)[:5] == [0, 1, 255, 256, LAST]
    assert set(layout.writer_of(ring.live.sources[:5]).tolist()) == {mine}


def test_streams_go_around_the_end_of_the_ring_with_their_items(engine: Engine) -> None:
    ring = ring_of(engine)
    write(ring, range(6))
    write_in(ring, range(6, 11), 5, 6, 7, 8, 9)
    assert streams_of(ring) == [7, 8, 9, 0, 0, 0, 5, 6]
    write(ring, range(11, 14))
    assert streams_of(ring) == [7, 8, 9, 0, 0, 0, 5, 6]
    # of more items than the capacity, the last ones stay
    write_in(ring, range(20), *range(100, 120))
    assert sorted(streams_of(ring)) == list(range(112, 120))
    require_sound(engine)


def test_a_claim_has_the_streams_of_its_slots(ring: Ring) -> None:
    ring.claims.claim(3, streams=u32(4, 0, 6))
    fill(ring, [0, 1, 2], range(3))
    ring.claims.commit()
    assert streams_of(ring)[:3] == [4, 0, 6]
    ring.claims.claim(2, streams=u32(7, 7))
    ring.claims.abort()
    ring.claims.claim(2)
    fill(ring, [5, 6], range(5, 7))
    ring.claims.commit()
    assert streams_of(ring)[5:7] == [0, 0]


def test_what_is_placed_is_in_stream_0_and_what_changes_in_place_stays_in_its_own(
    ring: Ring,
) -> None:
    write_in(ring, range(4), 1, 2, 3, 4)
    place(ring, [1], [10])
    place(ring, [2], [20], in_place=True)
    assert streams_of(ring)[:4] == [1, 0, 3, 4]


def test_items_of_another_handle_keep_who_wrote_them_and_their_streams(make_files: Maker) -> None:
    first = make_files()
    assert first.path is not None
    write_in(ring_of(first), range(2), 3, 4)
    with Engine.open(first.path, None) as second:
        write_in(ring_of(second), range(2, 4), 3, 4)
        sources = ring_of(second).live.sources[:4]
        assert layout.stream_of(sources).tolist() == [3, 4, 3, 4]
        mine, other = ring_of(first).seat.incarnation, ring_of(second).seat.incarnation
        assert layout.writer_of(sources).tolist() == [mine, mine, other, other]


# -- what is given ---------------------------------------------------------------------------------


def test_streams_are_given_as_one_number_or_as_one_each() -> None:
    assert check_streams(3) == 3
    assert check_streams(np.uint8(3)) == 3
    assert check_streams(range(3)).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    given = u32(1, 2)
    kept = check_streams(given)
    given[0] = 2**31  # a writer that changes its array during the write
    assert kept.tolist() == [1, 2]  # type: ignore[union-attr]
    assert expand_streams(0, 3) is expand_streams(None, 3) is None
    assert expand_streams(2, 3).tolist() == [2, 2, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (2**24, ValueError, "stream 16777216 at position 0 is not a number from 0 to 16777215"),
        ([0, -1], ValueError, "stream -1 at position 1 is not a number"),
        (1.0, TypeError, r"has the dtype float64 and the shape \[\]"),
        ([True], TypeError, r"has the dtype bool and the shape \[1\]"),
        ([[1]], TypeError, r"has the shape \[1, 1\].*pass stream_dim=0"),
    ],
)
def test_what_is_no_stream_is_refused(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        check_streams(given)
