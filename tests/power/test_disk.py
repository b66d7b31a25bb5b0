"""The model of the disk after a power cut, and the completeness of recordings."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shmbuffer._native import _core
from tests.power import scripts
from tests.power.choices import Designed, Random
from tests.power.contents import schema
from tests.power.disk import PAGE, SECTOR, Disk, File
from tests.power.recorder import Reporter, apply, record
from tests.power.simulation import folder

OLD = Designed("all old", lambda *_: False, False)
NEW = Designed("all new", lambda *_: True, True)
ONE, TWO, THREE = (bytes([n]) * PAGE for n in (1, 2, 3))


@pytest.fixture
def disk() -> Disk:
    """A disk with a file ``f`` that contains a page of ones, all of it synced."""
    file = File(bytearray(ONE), {}, [PAGE])
    return Disk(0, {7: file}, set(), {(0, "f"): 7})


def content(disk: Disk, choice: object, path: str = "f") -> bytes:
    return disk.cut(choice).files[path][1]  # type: ignore[arg-type]


def test_a_page_may_be_as_old_as_its_last_sync(disk: Disk) -> None:
    disk.files[7].store(0, TWO)
    disk.files[7].store(0, THREE)
    assert (content(disk, OLD), content(disk, NEW)) == (ONE, THREE)
    seen = {content(disk, Random(seed)) for seed in range(200)}
    assert {ONE, TWO, THREE} < seen
    disk.sync(7)
    assert {content(disk, Random(seed)) for seed in range(50)} == {THREE}


def test_a_page_may_be_torn_between_sectors(disk: Disk) -> None:
    disk.files[7].store(0, TWO)
    torn = {content(disk, Random(seed)) for seed in range(300)} - {ONE, TWO}
    assert torn
    for page in torn:
        sectors = np.frombuffer(page, np.uint8).reshape(-1, SECTOR)
        assert (sectors == sectors[:, :1]).all()


def test_a_name_is_there_for_certain_once_its_directory_was_synced(disk: Disk) -> None:
    disk.files[8] = File(bytearray(TWO), {}, [PAGE])
    disk.pending.append({(0, "g"): 8})
    assert sorted(disk.cut(OLD).files) == ["f"]
    assert sorted(disk.cut(NEW).files) == ["f", "g"]
    disk.sync(7)
    assert sorted(disk.cut(OLD).files) == ["f"]
    disk.sync(0)
    assert sorted(disk.cut(OLD).files) == ["f", "g"]


def test_a_rename_happens_as_a_whole(disk: Disk) -> None:
    disk.files[8] = File(bytearray(TWO), {}, [PAGE])
    disk.pending += [{(0, "new"): 8}, {(0, "new"): None, (0, "f"): 8}]
    seen = set()
    for seed in range(100):
        files = disk.cut(Random(seed)).files
        seen.add(tuple((name, files[name][0]) for name in sorted(files)))
    assert seen == {(("f", 7),), (("f", 7), ("new", 8)), (("f", 8),)}


def test_an_unsynced_file_goes_with_its_directory(disk: Disk) -> None:
    disk.files[8], disk.folders = File(bytearray(TWO), {}, [PAGE]), {1}
    disk.pending += [{(0, "d"): 1}, {(1, "g"): 8}]
    disk.sync(1)
    assert sorted(disk.cut(OLD).files) == ["f"]
    disk.sync(0)
    assert sorted(disk.cut(OLD).files) == ["d/g", "f"]


def test_an_image_is_the_disk_of_the_next_boot(disk: Disk) -> None:
    disk.files[7].store(0, TWO)
    image = disk.cut(NEW)
    assert image.disk(0).cut(OLD).files == image.files


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["rows", "records"])
def test_every_step_is_recorded_and_every_byte(kind: str) -> None:
    with folder() as (tree, attic):
        path = tree / "buffer"
        recording = record(tree, attic, lambda reporter: scripts.writes(reporter, path, kind))
        steps = [event.value for event in recording.events if event.kind == "step"]
        disk = recording.before
        for event in recording.events:
            apply(disk, event)
        files = disk.cut(NEW).files
        there = {
            str(found.relative_to(tree)): found.read_bytes()
            for found in tree.rglob("*")
            if found.is_file()
        }
    assert {name: data for name, (_, data) in files.items()} == there
    assert len(schema(kind).leaves) == 0 or "buffer/number.memmap" in there
    passed = [step for step in steps if step in _core.crash_points()]
    assert passed.count("write.done") == 4
    assert passed.count("write.commit") == 11
    assert [step for step in steps if step.startswith("flush.")][-1] == "flush.synced"


def test_a_step_of_all_is_told_by_name(tmp_path: Path) -> None:
    def work(reporter: Reporter) -> None:
        _core.reached("one")
        (tmp_path / "tree" / "file").write_text("between")
        _core.reached("two")

    (tmp_path / "tree").mkdir()
    (tmp_path / "attic").mkdir()
    recording = record(tmp_path / "tree", tmp_path / "attic", work)
    kinds = [event.kind if event.kind != "step" else event.value for event in recording.events]
    assert kinds == ["one", "file", "names", "size", "page", "two"]
    with pytest.raises(ValueError, match=r"\* is not a possible name of a crash point"):
        _core.arm("*", "kill")
    assert os.listdir(tmp_path / "attic") == []
