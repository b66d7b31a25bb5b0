"""A damaged save is refused with an error that names it, or its items are those that were saved.

Bits are flipped, files are truncated and removed, and values in JSON files are replaced. A load
changes only its buffer, and only if it succeeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import (
    CorruptBufferError,
    ShmBufferError,
)
from shmbuffer.memory.format import layout
from shmbuffer.saves.file_tree import MANIFEST
from shmbuffer.saves.saved_parts import PARTS
from tests.damage.saves import KINDS, content, end

SEED = 1
CASES = 60
"""Number of cases for each kind and layout."""

CHECKED = list(KINDS)[:6]
"""Kinds in the format of a buffer, whose items have checksums."""

OTHERS: tuple[Any, ...] = (None, -1, 2**70, float("nan"), "x", [], {}, [1])
Damage = tuple[str, bytes | None]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of keys to each value in a JSON value."""
    yield at
    inner = value.items() if isinstance(value, dict) else ()
    for key, one in enumerate(value) if isinstance(value, list) else inner:
        yield from places(one, (*at, key))


def exchanged(text: bytes, at: tuple[Any, ...], new: Any) -> bytes:
    whole = {"": json.loads(text)}
    inner: Any = whole
    for key in ("", *at)[:-1]:
        inner = inner[key]
    inner[("", *at)[-1]] = new
    return json.dumps(whole[""]).encode()


def damages(data: bytes, draw: random.Random) -> Iterator[Damage]:
    """Yields damaged contents of a file, or None if the file is removed."""
    yield "gone", None
    yield "empty", b""
    yield "zeros", bytes(len(data))
    for _ in range(4 * bool(data)):
        at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        yield f"cut at {at}", data[:at]
        yield f"flip {bit} at {at}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    lines = data.splitlines()
    for number, line in enumerate(lines[:3] if data[:1] in (b"{", b"[") else []):
        try:
            ways = list(places(json.loads(line if len(lines) > 1 else data)))
        except ValueError:
            return
        for at in ways:
            new = draw.choice(OTHERS)
            text = b"\n".join([*lines[:number], exchanged(line, at, new), *lines[number + 1 :]])
            yield f"{new!r} at {at} of line {number}", text + b"\n"


def drawn(save: Path, seed: str) -> list[tuple[str, Damage]]:
    """Draws cases for a save: first one of each file, then others."""
    draw, cases = random.Random(f"{SEED} {seed}"), []
    for file in sorted(save.rglob("*")):
        if file.is_file() and not str(file).endswith(MANIFEST):
            some = list(damages(file.read_bytes(), draw))
            draw.shuffle(some)
            name = str(file.relative_to(save))
            cases += [(at > 0, draw.random(), (name, case)) for at, case in enumerate(some)]
    return [case for _, _, case in sorted(cases, key=lambda case: case[:2])][:CASES]


def loaded(kind: str, save: Path) -> Any:
    """Loads into a buffer with other items; returns its items or the error.

    A load that fails must not change the buffer.
    """
    rb, failed = KINDS[kind].filled(20), None
    before = content(rb)
    try:
        rb.loads(save)
    except Exception as error:
        failed = error
    after = content(rb)
    end(rb)
    assert failed is None or after == before, f"changed by {failed!r}"
    return failed or after


def is_clear(error: BaseException, save: Path) -> bool:
    """True if the error is documented for `loads` and names the save or a file in it."""
    documented = isinstance(error, (ShmBufferError, FileNotFoundError)) or type(error).__name__ in (
        "ValueError",
        "ValueRefusedError",
    )
    return documented and str(save) in str(error)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: KINDS[kind].saved(tmp_path / "saves" / "run")


@pytest.mark.product(few=4)
@pytest.mark.parametrize("kind", CHECKED)
def test_a_damaged_save_is_refused_or_all_its_items_are_loaded(
    saved: Callable[[str], Path], kind: str
) -> None:
    save = saved(kind)
    whole = loaded(kind, save)
    assert not isinstance(whole, Exception)
    for name, (what, new) in drawn(save, kind):
        found = damaged(kind, save, name, new)
        clear = is_clear(found, save) if isinstance(found, Exception) else found == whole
        assert clear, f"{name}, {what}: {found!r}"


@pytest.mark.product(few=2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("TorchRL")])
def test_a_damaged_save_in_torchrls_layout_is_loaded_or_refused(
    saved: Callable[[str], Path], kind: str
) -> None:
    """This layout has no checksums."""
    save = saved(kind)
    for name, (what, new) in drawn(save, kind):
        found = damaged(kind, save, name, new)
        assert not isinstance(found, Exception) or is_clear(found, save), (name, what, found)


def damaged(kind: str, save: Path, name: str, new: bytes | None) -> Any:
    """Loads a save in which one file has this content, and restores the file."""
    file = save / name
    before = file.read_bytes()
    outside = sorted(path for path in save.parent.rglob("*") if save not in path.parents)
    if new is None:
        file.unlink()
    else:
        file.write_bytes(new)
    found = loaded(kind, save)
    file.write_bytes(before)
    assert sorted(p for p in save.parent.rglob("*") if save not in p.parents) == outside
    return found


LAZY = ("shmbuffer", "structure", "items", 1, 1)

METADATA = "storage/storage_metadata.json"

#: Damage that once ended in TypeError, KeyError, IndexError, OverflowError or a similar error.
FOUND: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("rows", "buffer_metadata.json", ("batch_size",), {}),
    ("rows", "rng_state/meta.json", (), {}),
    ("rows", "rng_state/meta.json", ("device",), "nowhere"),
    ("rows", "rng_state/meta.json", ("rng_state", "shape"), [1]),
    ("rows", "sampler/sampler_metadata.json", ("_alpha",), 2**40),
    ("rows", "sampler/sampler_metadata.json", ("shmbuffer", "max_priority"), -1),
    ("rows", "storage/meta.json", ("next",), None),
    ("rows", "storage/meta.json", ("..",), {"type": "TensorDict"}),
    ("rows", "storage/collector/meta.json", ("traj_ids", "shape"), []),
    ("rows", METADATA, ("is_pytree",), True),
    ("rows", METADATA, ("shmbuffer", "structure"), True),
    ("rows", METADATA, ("shmbuffer", "structure", "items", 0, 0), 3),
    ("nested rows", METADATA, (*LAZY, "items", 0, 1, "batch"), [1]),
    ("nested rows", METADATA, (*LAZY, "dim"), -1),
    ("pytree", METADATA, ("metadata",), {}),
]


@pytest.mark.parametrize(("kind", "name", "at", "new"), FOUND)
def test_a_value_that_makes_no_sense_is_an_error_that_names_its_file(
    saved: Callable[[str], Path], kind: str, name: str, at: tuple[Any, ...], new: Any
) -> None:
    kind = f"{kind} for TorchRL"
    save = saved(kind)
    (save / name).write_bytes(exchanged((save / name).read_bytes(), at, new))
    with pytest.raises(ShmBufferError, match=str(save)):
        KINDS[kind].make().loads(save)


FILES = (
    *(layout.CONTROL, layout.SLOTS, layout.SCHEMA, f"{layout.PRIVATE}/items.jsonl"),
    *(f"{PARTS}/{name}.jsonl" for name in ("buffer", "sampler", "writer", "extra", "ahead")),
    "collector/traj_ids.memmap",
)


@pytest.mark.parametrize("what", ["gone", "empty", "zeros"])
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *[("rows, with everything", file) for file in FILES],
        ("records", layout.RECORDS),
    ],
)
def test_a_file_of_a_save_that_is_missing_or_has_no_content_is_an_error_that_names_the_save(
    saved: Callable[[str], Path], kind: str, file: str, what: str
) -> None:
    save, name = saved(kind), f"storage/{file}"
    size = (save / name).stat().st_size
    found = damaged(kind, save, name, {"gone": None, "empty": b"", "zeros": bytes(size)}[what])
    assert isinstance(found, (ShmBufferError, FileNotFoundError))
    assert str(save) in str(found)


@pytest.mark.parametrize(
    ("kind", "file"),
    [("rows, with everything", "collector/traj_ids.memmap"), ("records", layout.RECORDS)],
)
def test_each_flipped_byte_of_an_item_is_found_by_its_checksum(
    saved: Callable[[str], Path], kind: str, file: str
) -> None:
    save = saved(kind)
    data = (save / "storage" / file).read_bytes()
    used = [at for at, byte in enumerate(data) if byte]
    for at in random.Random(SEED).sample(used, 5):
        flipped = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        found = damaged(kind, save, f"storage/{file}", flipped)
        assert isinstance(found, CorruptBufferError)
        assert f"{save}/storage: does not match the saved data: 1 of its items" in str(found)
