"""Flips every bit of both superblock copies, one at a time and in pairs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import CorruptBufferError, FormatError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.damage.conftest import Specimens
from tests.damage.judgement import answer
from tests.damage.specimen import Change, Specimen, edited_control
from tests.damage.superblocks import BITS, Copies


@pytest.fixture
def copies(specimens: Specimens, tmp_path: Path) -> Copies:
    return Copies(specimens("rows", False).files[layout.CONTROL], tmp_path / "control")


@pytest.mark.parametrize("copy", [0, 1])
def test_no_bit_of_a_copy_can_flip_unnoticed(copies: Copies, copy: int) -> None:
    for bit in range(BITS):
        copies.require_noticed(copy, bit)


@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_copy_is_read_from_the_other(copies: Copies, copy: int) -> None:
    for byte in range(0, layout.SUPERBLOCK_BYTES, 4):
        copies.require_repaired(copy, 8 * byte + byte // 4 % 8)


def test_two_damaged_copies_are_never_believed(copies: Copies) -> None:
    rng = random.Random(4)
    for _ in range(500):
        copies.require_refused(rng.randrange(BITS), rng.randrange(BITS))


@pytest.mark.parametrize("bits", [(3, 3), (64, 64), (64, 65), (129, 4000), (32767, 1)], ids=str)
def test_a_buffer_with_two_damaged_copies_is_refused_and_left_as_it_is(
    specimen: Specimen, bits: tuple[int, int]
) -> None:
    whole = specimen.files[layout.CONTROL]
    specimen.damage(
        *(
            Change(layout.CONTROL, at, bytes([whole[at] ^ 1 << bit % 8]))
            for copy, bit in enumerate(bits)
            for at in [copy * layout.SUPERBLOCK_BYTES + bit // 8]
        )
    )
    before = {name: (specimen.path / name).read_bytes() for name in specimen.files}
    with pytest.raises((CorruptBufferError, FormatError)):
        Engine.open(specimen.path, None)
    with pytest.raises((CorruptBufferError, FormatError)):
        Engine.open(specimen.path, Settings(capacity=8), existing="overwrite")
    with pytest.raises((CorruptBufferError, FormatError)):
        inspect(specimen.path)
    assert {name: (specimen.path / name).read_bytes() for name in specimen.files} == before


IMPOSSIBLE = [
    ("settings", {}),
    ("settings", {"capacity": "8"}),
    ("settings", {"capacity": 0}),
    ("settings", {"capacity": 8, "colour": "red"}),
    ("settings", {"capacity": 8, "extra": []}),
    ("settings", {"capacity": 8, "alpha": float("nan")}),
    ("settings", {"capacity": 8, "eps": "small"}),
    ("settings", {"capacity": 8, "record_bytes": 2**70}),
    ("capacity", 2**63),
    ("lanes", 0),
    ("leaves", 2**31),
    ("slots_bytes", 2**60),
    ("durable_ticket", 2**64 - 1),
    ("epoch", 2**64 - 1),
    ("sequence", 2**64 - 1),
    ("owner_pid", 2**64 - 1),
    ("created_ns", 2**64 - 1),
    ("device", 2**64 - 1),
]


@pytest.mark.product(few=12)
@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE, ids=[f"{f}-{v}" for f, v in IMPOSSIBLE])
def test_a_whole_superblock_that_says_the_impossible_is_refused_or_does_no_harm(
    specimen: Specimen, field: str, value: object
) -> None:
    """Its checksum is valid, because other software or an attacker wrote it."""
    with edited_control(specimen.path) as control:
        forged = replace(control.superblock(), **{field: value})  # type: ignore[arg-type]
        page = np.frombuffer(forged.pack(), np.uint8)
        for copy in (0, 1):
            at = copy * layout.SUPERBLOCK_BYTES
            control._bytes[at : at + layout.SUPERBLOCK_BYTES] = page
    answer(lambda: inspect(specimen.path), specimen)
    answer(lambda: check(specimen.path), specimen)
    engine = answer(lambda: Engine.open(specimen.path, None), specimen)
    if engine is not None:
        with engine:
            assert engine.settings.capacity == 8
            assert engine.stats()["length"] == len(specimen.truth)
