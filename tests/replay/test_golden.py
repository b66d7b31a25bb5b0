"""Directories and saves that an earlier build of this format has written are read bit for bit."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import attach
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from tests.kit.items import alike
from tests.kit.rings import ring_of
from tests.replay import golden

ours = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its lock is of another kind of machine"
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden")
    golden.unpack(path)
    return path


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    """Directories that a test may write into."""
    golden.unpack(tmp_path)
    return tmp_path / "directories"


def test_the_archive_holds_every_directory_and_every_save_of_this_format(unpacked: Path) -> None:
    for kind, names in (("directories", golden.DIRECTORIES), ("saves", golden.SAVES)):
        assert {path.name for path in (unpacked / kind).iterdir()} == names.keys()
    for name in golden.DIRECTORIES:
        control = (unpacked / "directories" / name / layout.CONTROL).read_bytes()
        found = np.frombuffer(control, layout.SUPERBLOCK, 2)
        assert set(found["format_major"].tolist()) == {layout.FORMAT_MAJOR}
        assert set(found["format_minor"].tolist()) <= {*range(layout.FORMAT_MINOR + 1)}


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


@ours
@pytest.mark.parametrize("name", ["rows", "records", "loaded"])
def test_a_directory_of_another_build_is_opened_and_written_into(
    name: str, directories: Path
) -> None:
    path = directories / name
    with golden.attach(path) as rb:
        assert check(path).ok
        assert len(rb) == golden.CAPACITY
        found = sources(rb)
        assert set(layout.stream_of(found).tolist()) == {0, 7}
        writers = np.unique(layout.writer_of(found))
        loaded = writers >= layout.INCARNATIONS
        assert loaded.sum() == (2 if name == "loaded" else 0)
        assert ring_of(rb).seat.incarnation > writers[~loaded].max()  # incarnation numbers continue
        require_whole_slices(rb)
        for step in range(100, 105):
            rb.extend(golden.rows(5, step), streams=[3, 512])
        require_whole_slices(rb)
        found = sources(rb)
        assert set(layout.stream_of(found).tolist()) == {0, 7, 3, 512}
        assert ring_of(rb).seat.incarnation in layout.writer_of(found)
        assert check(path).ok
    with golden.attach(path) as rb:
        assert (sources(rb) == found).all()
        require_whole_slices(rb)


@ours
@pytest.mark.parametrize("name", ["rows", "records", "loaded"])
def test_a_save_of_such_a_directory_keeps_who_wrote_each_item(
    name: str, directories: Path, tmp_path: Path
) -> None:
    with golden.attach(directories / name) as rb:
        _, expected = np.unique(sources(rb), return_inverse=True)
        rb.dumps(tmp_path / "save")
        rb.empty()
        rb.loads(tmp_path / "save")
        _, found = np.unique(sources(rb), return_inverse=True)
        pairs = set(zip(expected.tolist(), found.tolist(), strict=True))
        assert len(pairs) == len(set(expected.tolist())) == len(set(found.tolist()))
        require_whole_slices(rb)


@ours
def test_ragged_items_of_another_build_are_there(directories: Path) -> None:
    assert check(directories / "ragged").ok
    rb = attach(directories / "ragged")
    report = rb.storage.engine().report
    assert (report.reason, report.checksum_failed, report.words_refused) == ("copy", 0, 0)
    assert rb.write_count == 21
    numbers = {slot: next(n for n in range(20, -1, -1) if n % 12 == slot) for slot in range(12)}
    numbers[4] = 100
    assert len(rb) == 12
    for slot, number in numbers.items():
        assert alike(rb[slot], golden.ragged(number))
    assert rb.storage.ring().tree.priorities()[:4].tolist() == [n % 6 for n in (12, 13, 14, 15)]
    rb.close()


@ours
def test_steps_of_another_build_are_there(directories: Path) -> None:
    assert check(directories / "joined").ok
    rb = attach(directories / "joined")
    film = golden.frames(0, 30)
    there = rb.storage.ring().live.committed().tolist()
    assert len(there) == 12
    for slot in there:
        number = next(n for n in range(29, -1, -1) if n % 12 == slot)
        assert torch.equal(rb[slot]["obs"], film["obs"][number])
        assert torch.equal(rb[slot]["next", "obs"], film["next", "obs"][number])
        assert float(rb[slot]["reward"]) == number / 2
    batch = rb.sample()
    assert type(batch) is TensorDict
    assert torch.equal(batch["obs"], film["obs"][(batch["reward"] * 2).long()])
    rb.close()


@ours
def test_the_same_items_are_the_same_bytes_today(directories: Path, tmp_path: Path) -> None:
    """Only raw records are compared, because compressed frames depend on the version of zstd."""
    golden.write_ragged(tmp_path / "today")
    for name in (layout.RECORDS, layout.SLOTS):
        then = np.fromfile(directories / "ragged" / name, np.uint8)
        now = np.fromfile(tmp_path / "today" / name, np.uint8)
        if name == layout.SLOTS:  # the checksums are salted with the schema, which is the same
            then, now = then[: 8 * 12 + 4 * 12], now[: 8 * 12 + 4 * 12]
        assert np.array_equal(then, now)


def state(rb: Any) -> Any:
    """Returns the contents of a buffer without process ids and addresses."""
    storages = getattr(rb.storage, "_members", [rb.storage])
    rings = [ring_of(storage) for storage in storages]
    slots = [sorted({*(ring.live.committed() // ring.width).tolist()}) for ring in rings]
    items = [[one.get(at) for at in held] for one, held in zip(storages, slots, strict=True)]
    positions = [ring.head % ring.capacity for ring in rings]
    priorities = [ring.tree.priorities().tolist() for ring in rings]
    parts = rb.sampler.state_dict(), rb.writer.state_dict()
    rng = None if rb.generator is None else rb.generator.get_state()
    return slots, items, positions, priorities, parts, rng


@pytest.mark.parametrize("name", golden.SAVES)
def test_a_save_of_another_build_is_loaded(name: str, unpacked: Path) -> None:
    rb, expected = golden.SAVES[name](False), golden.SAVES[name](True)
    rb.loads(unpacked / "saves" / name)
    for found, known in zip(state(rb), state(expected), strict=True):
        assert alike(found, known)
