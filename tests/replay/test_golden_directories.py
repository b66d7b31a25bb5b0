"""A directory of an earlier format is opened as it is, and streams are written into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from tests.kit.rings import ring_of
from tests.replay import golden_directories as golden


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    golden.unpack(tmp_path)
    return tmp_path


def sources(rb: Any) -> Any:
    ring = ring_of(rb)
    return ring.live.sources[ring.live.holds()]


def require_whole_slices(rb: Any) -> None:
    for _ in range(3):
        sample = rb.sample()
        parts = {key: sample[key].view(-1, 3) for key in ("who", "env", "step")}
        assert (parts["who"] == parts["who"][:, :1]).all()
        assert (parts["env"] == parts["env"][:, :1]).all()
        assert (parts["step"] == parts["step"][:, :1] + torch.arange(3)).all()


def test_there_are_directories_of_the_format_before_and_of_this_one() -> None:
    kinds = {name.partition(" ")[0] for name in golden.names()}
    assert kinds >= {"1.3", golden.FORMAT}


@pytest.mark.product(few=4)
@pytest.mark.parametrize("name", golden.names())
def test_a_directory_of_an_earlier_format_is_opened_and_written_into(
    name: str, folder: Path
) -> None:
    path = folder / name
    before = name.partition(" ")[0]
    with golden.attach(path) as rb:
        assert check(path).ok
        assert len(rb) == (14 if name == "1.3 loaded" else golden.CAPACITY)
        found = sources(rb)
        streams = {0} if before == "1.3" else {0, 7}
        assert set(layout.stream_of(found).tolist()) == streams
        writers = np.unique(layout.writer_of(found))
        loaded = writers >= layout.INCARNATIONS
        assert loaded.sum() == (2 if name.endswith("loaded") else 0)
        assert ring_of(rb).seat.incarnation > writers[~loaded].max()  # numbers go on
        require_whole_slices(rb)
        for step in range(100, 105):  # between items of streams that were loaded or written before
            rb.extend(golden.rows(5, step, 2), streams=[3, 512])
        require_whole_slices(rb)
        found = sources(rb)
        assert set(layout.stream_of(found).tolist()) == streams | {3, 512}
        assert ring_of(rb).seat.incarnation in layout.writer_of(found)
        assert check(path).ok
    with golden.attach(path) as rb:
        assert (sources(rb) == found).all()
        require_whole_slices(rb)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("name", golden.names())
def test_what_is_saved_of_an_earlier_format_keeps_who_wrote_it(name: str, folder: Path) -> None:
    with golden.attach(folder / name) as rb:
        _, expected = np.unique(sources(rb), return_inverse=True)
        rb.dumps(folder / "save")
        rb.empty()
        rb.loads(folder / "save")
        _, found = np.unique(sources(rb), return_inverse=True)
        pairs = set(zip(expected.tolist(), found.tolist(), strict=True))
        assert len(pairs) == len(set(expected.tolist())) == len(set(found.tolist()))
        require_whole_slices(rb)
