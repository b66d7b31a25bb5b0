"""A prepared directory has traps in the place of files, and lies in files that are read.

No file outside of the directory is read, written or removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from shmbuffer import CorruptBufferError, ShmBufferError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory import removal
from shmbuffer.memory.directory.made import NAME as MADE
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.damage.conftest import Specimens
from tests.damage.hostile import ROOT_TRAPS, TRAPS, Trap, spring
from tests.damage.judgement import answer
from tests.damage.specimen import Specimen, clear, edited_control
from tests.damage.trials import require_all
from tests.kit.programs import needs_root
from tests.memory.rows import Parent, child

REPEAT = "pytest tests/damage/test_hostile.py"


@pytest.mark.product(few=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "trap",
    [*TRAPS, *(pytest.param(name, marks=needs_root) for name in ROOT_TRAPS)],
)
def test_a_trap_in_the_place_of_a_file_catches_nobody(specimens: Specimens, trap: str) -> None:
    rows, records = specimens("rows", False), specimens("records", False)
    made: Trap = {**TRAPS, **ROOT_TRAPS}[trap]
    cases = [("rows", name) for name in rows.files]
    cases += [("records", name) for name in (layout.RECORDS, layout.DICTIONARY)]

    def trial(case: tuple[str, str]) -> None:
        kind, name = case
        spring(rows if kind == "rows" else records, name, made)

    require_all(cases, trial, REPEAT)
    rows.renew()
    records.renew()


LISTS = {
    "outside": ["../precious.memmap"],
    "absolute": ["/etc/passwd.memmap"],
    "down and out": ["next/../../precious.memmap"],
    "a user's file": ["notes.txt"],
    "private files": [".shmbuffer/control", ".shmbuffer/init.lock"],
    "a private leaf": [".shmbuffer/x.memmap"],
    "NUL": ["a\0.memmap"],
    "empty": [""],
    "dots": ["./number.memmap"],
    "numbers": [1, 2],
    "no list": {"number.memmap": 1},
}


@pytest.mark.parametrize("names", LISTS.values(), ids=LISTS)
def test_a_list_of_files_that_lies_removes_nothing_of_others(
    specimen: Specimen, names: object
) -> None:
    precious = [specimen.path.parent / "precious.memmap", specimen.path / "notes.txt"]
    for path in precious:
        path.write_text("precious")
    (specimen.path / MADE).write_text(json.dumps(names))
    with pytest.raises(ShmBufferError, match=str(specimen.path)):
        Engine.open(specimen.path, Settings(capacity=4), existing="overwrite")
    assert all(path.read_text() == "precious" for path in precious)
    assert (specimen.path / layout.CONTROL).exists()


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'["a.memmap', b"\xff\xfe", b"", b"[" + b'"a",' * 10**6], ids=range(5)
)
def test_an_invalid_list_of_files_is_an_error_of_this_package(
    specimen: Specimen, text: bytes
) -> None:
    (specimen.path / MADE).write_bytes(text)
    with pytest.raises(CorruptBufferError, match=r"made\.json"):
        Engine.open(specimen.path, Settings(capacity=4), existing="overwrite")


LEAF = '{"path":["number"],"dtype":"int64","shape":%s}'
SCHEMA = '{"capacity":%s,"lanes":%s,"leaves":[%s],"structure":{"kind":"tensordict"}%s}'
SCHEMAS = {
    "a huge capacity": SCHEMA % (2**47, "[]", LEAF % "[]", ""),
    "a huge product": SCHEMA % (2**40, "[]", LEAF % f"[{2**47},{2**47},{2**47}]", ""),
    "a product that wraps to 8": SCHEMA % (8, "[]", LEAF % f"[{2**32},{2**32}]", ""),
    "many dims": SCHEMA % (8, "[]", LEAF % ("[" + ",".join(["1"] * 10_000) + "]"), ""),
    "negative": SCHEMA % (-8, "[]", LEAF % "[]", ""),
    "no number": SCHEMA % ("NaN", "[]", LEAF % "[]", ""),
    "digits without end": SCHEMA % ("9" * 10_000, "[]", LEAF % "[]", ""),
    "deep": SCHEMA % (8, "[" * 100_000 + "]" * 100_000, LEAF % "[]", ""),
    "above": SCHEMA % (8, "[]", LEAF.replace("number", "..") % "[]", ""),
    "absolute": SCHEMA % (8, "[]", LEAF.replace('["number"]', '["/","etc"]') % "[]", ""),
    "NUL": SCHEMA % (8, "[]", LEAF.replace("number", "a\\u0000b") % "[]", ""),
    "private": SCHEMA % (8, "[]", LEAF.replace('["number"]', '[".shmbuffer","x"]') % "[]", ""),
    "the key twice": SCHEMA % (8, "[]", LEAF % "[]", ',"capacity":1099511627776'),
    "the leaf twice": SCHEMA % (8, "[]", ",".join([LEAF % "[]"] * 2), ""),
    "many leaves": SCHEMA % (8, "[]", ",".join([LEAF % "[]"] * 5000), ""),
    "another dtype": SCHEMA % (8, "[]", LEAF.replace("int64", "object") % "[]", ""),
    "a huge byte ring": SCHEMA % (8, "[]", "", f',"record_bytes":{2**46}'),
    "half a surrogate": SCHEMA % (8, "[]", LEAF.replace("number", "\\ud800") % "[]", ""),
    "a pickle": "\x80\x04cos\nsystem\n",
}


@pytest.mark.product(few=10)
@pytest.mark.parametrize("text", SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_that_lies_is_refused_before_anything_is_mapped(
    specimen: Specimen, text: str
) -> None:
    """The superblock contains its digest, and the sizes that follow from it."""
    data = text.encode("latin-1")
    (specimen.path / layout.SCHEMA).write_bytes(data)
    with edited_control(specimen.path) as control:
        claims = {"schema_sha256": sha256(data).digest(), "capacity": 8, "lanes": 1, "leaves": 1}
        for _ in (0, 1):
            control.write(replace(control.superblock(), **claims))
    before = {name: (specimen.path / name).read_bytes() for name in specimen.files}
    with pytest.raises(CorruptBufferError, match=str(specimen.path)):
        Engine.open(specimen.path, None)
    answer(lambda: inspect(specimen.path), specimen)
    assert check(specimen.path).problems
    assert {name: (specimen.path / name).read_bytes() for name in specimen.files} == before


def test_no_file_of_a_buffer_is_unpickled(specimen: Specimen, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    payload = f"cos\nmkdir\n(V{marker}\ntR.".encode()
    for name in specimen.files:
        specimen.renew()
        (specimen.path / name).write_bytes(payload)
        for look in (inspect, check, lambda path: Engine.open(path, None).close()):
            answer(lambda look=look: look(specimen.path), specimen)  # type: ignore[misc]
    assert not marker.exists()


def _swap_folder(path: Path, theirs: Path) -> None:
    """Replaces ``next`` by a directory of another user that has files with the same names."""
    if (path / "next").exists():
        (path / "next").rename(path / "gone")
    (path / "next").symlink_to(theirs / "next")


def _swap_private(path: Path, theirs: Path) -> None:
    (path / layout.PRIVATE).rename(path / "gone")
    (path / layout.PRIVATE).symlink_to(theirs / layout.PRIVATE)


def _swap_directory(path: Path, theirs: Path) -> None:
    path.rename(path.parent / "gone")
    path.symlink_to(theirs)


@pytest.mark.product(few=3)
@pytest.mark.crash
@pytest.mark.parametrize("point", ["remove.closing", "remove.file", "remove.leaves"])
@pytest.mark.parametrize("swap", [_swap_folder, _swap_private, _swap_directory])
def test_a_file_exchanged_for_a_link_during_a_removal_is_not_followed(
    specimens: Specimens, tmp_path: Path, point: str, swap: Callable[[Path, Path], None]
) -> None:
    specimen = specimens("rows", False)
    specimen.renew()
    path, theirs = specimen.path, tmp_path / "theirs"
    shutil.copytree(path, theirs)
    before = _tree(theirs)

    def work(parent: Parent) -> None:
        parent.pause_at(point)
        with Engine.open(path, None) as engine:
            uuid = engine.superblock.uuid
        answer(lambda: removal.remove(path, uuid), specimen)

    with child(work) as remover:
        remover.reached()
        swap(path, theirs)
        remover.go()
        assert remover.end() == 0
    assert _tree(theirs) == before
    clear(path.parent / "gone")
    specimen.renew()


def _tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
