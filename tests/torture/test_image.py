"""The second reader agrees with the engine and rejects anything that is not documented."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.torture import items
from tests.torture.image import Image, crc32c
from tests.torture.plan import Plan
from tests.torture.roles import read, write

PLANS = {
    "rows": Plan(20, 40, 8, 0, 1, 1, 0.6),
    "records": Plan(300, 64, 8, 8192, 1, 1, 0.5),
}
WRITER = items.who_of(1, 1)


@pytest.mark.parametrize("name", PLANS)
def test_it_reads_what_the_engine_reads(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    with Engine.open(tmp_path / "buffer", plan.settings) as engine:
        ring = engine.define(plan.schema)
        for first in range(0, 400, 8):
            write(ring, items.keys_of(WRITER, first, 8), plan)
        image = Image(tmp_path / "buffer")
        counts = (image.head, image.write_count, image.length, image.alpha, image.max_priority)
        assert counts == (400, 400, ring.length, ring.tree.alpha, ring.tree.max_priority)
        assert (image.words == ring.live.words).all()
        assert (image.sources == ring.live.sources).all()
        assert image.raw.tobytes() == ring.tree.priorities().tobytes()
        assert (image.mass[: plan.capacity] == ring.tree.mass()).all()
        sums, least = image.nodes[-1]
        assert (sums[0], least[0]) == (ring.tree.p_sum, ring.tree.p_min)
        assert not len(image.wrong_checksums())
        assert not len(image.wrong_leaves())
        assert not image.wrong_nodes()
        assert [entry.incarnation for entry in image.entries if entry.live] == [
            ring.seat.incarnation
        ]
        there = read(ring, plan)
        assert list(there) == image.committed.tolist()
        for slot, key in there.items():
            if plan.record_bytes:
                assert items.record_key(image.record(slot)[24:], plan.mean_words) == key
            else:
                assert items.key_in(image.leaves[1][slot : slot + 1], 1)[0] == key


def test_the_older_superblock_counts_where_the_newer_is_damaged(tmp_path: Path) -> None:
    plan = PLANS["rows"]
    with Engine.open(tmp_path / "buffer", plan.settings) as engine:
        engine.define(plan.schema)
        path = tmp_path / "buffer" / ".shmbuffer" / "control"
        whole = bytearray(path.read_bytes())
        newer = max((0, 4096), key=lambda at: struct.unpack_from("<Q", whole, at + 16))
        path_of_copy = tmp_path / "copy" / ".shmbuffer"
        path_of_copy.mkdir(parents=True)
        for name in ("schema.json", "slots"):
            (path_of_copy / name).write_bytes((path.parent / name).read_bytes())
        whole[newer + 56] ^= 1
        (path_of_copy / "control").write_bytes(whole)
        assert Image(tmp_path / "copy").epoch == Image(tmp_path / "buffer").epoch
        whole[4096 - newer + 100] ^= 1
        (path_of_copy / "control").write_bytes(whole)
        with pytest.raises(AssertionError, match="no copy of the superblock is valid"):
            Image(tmp_path / "copy")


def test_its_checksum_is_that_of_the_core() -> None:
    data = np.random.default_rng(1).bytes(1000)
    assert crc32c(0, b"123456789") == 0xE3069283  # the polynomial is in RFC 3720, appendix B.4
    assert crc32c(7, data) == _core.crc32c(data, 7)
