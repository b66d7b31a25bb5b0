"""A damaged save is loaded, or refused with an error that names a file of it.

Bits are flipped, files are cut and removed, and values of JSON files are exchanged for others.
Nothing outside of the save changes.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass

from shmbuffer import (
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ShmBufferError,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from shmbuffer.saves.file_tree import MANIFEST

SEED = 1
CASES = 40
"""Of each kind, drawn."""

OTHERS: tuple[Any, ...] = (None, -1, 2**70, float("nan"), "x", [], {}, [1])
Damage = tuple[str, bytes | None]


@tensorclass
class Step:
    obs: torch.Tensor


def items(n: int) -> TensorDict:
    i = torch.arange(n)
    leaves = {"a": i, "b": {"c": i[:, None].repeat(1, 3).float()}, "traj": i // 3}
    return TensorDict({**leaves, "done": i % 3 == 2}, [n])


def rows(filled: bool) -> Any:
    storage, generator = LazyTensorStorage(8), torch.Generator().manual_seed(1)
    rb = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.4, storage=storage, batch_size=4, generator=generator
    )
    if filled:
        data = items(6)
        data["t"] = NonTensorStack(*[f"x{i}" for i in range(6)])
        rb.extend(data)
        rb.update_priority(torch.arange(6), torch.arange(6) + 1.0)
    return rb


def pytree(filled: bool) -> Any:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    if filled:
        rb.extend((torch.arange(6), {"k": torch.ones(6, 2)}))
    return rb


def nested(filled: bool) -> Any:
    """A tensorclass, and a lazy stack in each item."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    if filled:
        parts = [TensorDict(a=torch.zeros(6, n), batch_size=[6]) for n in (2, 3)]
        step = Step(obs=torch.zeros(6, 2), batch_size=[6])
        rb.extend(TensorDict({"step": step, "lazy": lazy_stack(parts, 1)}, [6]))
    return rb


def objects(filled: bool, storage: Callable[[int], Any] = ListStorage) -> Any:
    rb = ReplayBuffer(storage=storage(8), batch_size=4, collate_fn=lambda batch: batch)
    for i in range(6 * filled):
        rb.add({"x": torch.ones(i + 1), "s": "t", "n": (1, 2.5, None), "z": np.arange(3)})
    return rb


def records(filled: bool) -> Any:
    storage = LazyStackStorage(8, max_bytes=2**16, shared_init=True)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=2)
    for i in range(6 * filled):
        rb.add(TensorDict({"x": torch.arange(float(i + 1)), "y": torch.tensor(i)}))
    return rb


def slices(filled: bool) -> Any:
    sampler = SliceSamplerWithoutReplacement(slice_len=3, traj_key="traj")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=6)
    if filled:
        rb.extend(items(6))
        rb.sample()
    return rb


def ensemble(filled: bool) -> Any:
    writer = TensorDictMaxValueWriter(rank_key="a")
    members = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4),
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, writer=writer),
    )
    for member in members * filled:
        member.extend(items(6))
    return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator())


KINDS: dict[str, Callable[[bool], Any]] = {
    "rows": rows,
    "pytree": pytree,
    "nested": nested,
    "objects": objects,
    "compressed": lambda filled: objects(filled, CompressedListStorage),
    "records": records,
    "slices": slices,
    "ensemble": ensemble,
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to everything in a value of JSON."""
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
    """What can become of a file; None: it is gone."""
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


def drawn(save: Path, kind: str) -> list[tuple[str, Damage]]:
    draw = random.Random(f"{SEED} {kind}")
    cases = [
        (str(file.relative_to(save)), damage)
        for file in sorted(save.rglob("*"))
        if file.is_file() and file.name != MANIFEST
        for damage in damages(file.read_bytes(), draw)
    ]
    draw.shuffle(cases)
    return cases[:CASES]


def is_clear(error: BaseException, save: Path) -> bool:
    """It is documented for `loads`, and names a file of the save."""
    documented = isinstance(error, (ShmBufferError, FileNotFoundError)) or type(error).__name__ in (
        "ValueError",
        "RefusedError",
    )
    return documented and str(save) in str(error)


def refused(kind: str, save: Path) -> Exception | None:
    """What loading it ends in."""
    rb = KINDS[kind](False)
    try:
        rb.loads(save)
    except Exception as error:
        return error
    finally:
        end(rb)
    return None


def end(rb: Any) -> None:
    """Without waiting for the end of the process, at which a temporary directory goes."""
    if hasattr(rb, "close"):
        rb.close()
    for storage in getattr(rb._storage, "_members", [rb._storage]):
        if hasattr(storage, "cleanup"):
            storage.cleanup()


def judged(kind: str, save: Path, name: str, damage: Damage) -> None:
    """Load a save with this damage."""
    what, new = damage
    file = save / name
    before = file.read_bytes()
    outside = sorted(path for path in save.parent.rglob("*") if save not in path.parents)
    if new is None:
        file.unlink()
    else:
        file.write_bytes(new)
    error = refused(kind, save)
    file.write_bytes(before)
    assert error is None or is_clear(error, save), f"{name}, {what}: {error!r}"
    assert sorted(p for p in save.parent.rglob("*") if save not in p.parents) == outside


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(kind: str) -> Path:
        rb = KINDS[kind](True)
        rb.dumps(tmp_path / "saves" / kind)
        end(rb)
        return tmp_path / "saves" / kind

    return save


@pytest.mark.product(few=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_save_is_loaded_or_refused_with_the_name_of_a_file(
    saved: Callable[[str], Path], kind: str
) -> None:
    save = saved(kind)
    for name, damage in drawn(save, kind):
        judged(kind, save, name, damage)


LAZY = ("shmbuffer", "structure", "items", 1, 1)

#: What ended in TypeError, KeyError, IndexError, OverflowError and the like.
FOUND: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("rows", "buffer_metadata.json", ("batch_size",), {}),
    ("rows", "buffer_metadata.json", ("batch_size",), float("nan")),
    ("rows", "rng_state/meta.json", (), {}),
    ("rows", "rng_state/meta.json", ("device",), "nowhere"),
    ("rows", "rng_state/meta.json", ("rng_state", "shape"), [1]),
    ("rows", "sampler/sampler_metadata.json", ("_alpha",), -1),
    ("rows", "sampler/sampler_metadata.json", ("_alpha",), 2**40),
    ("rows", "sampler/sampler_metadata.json", ("shmbuffer", "max_priority"), -1),
    ("rows", "storage/meta.json", ("b",), None),
    ("rows", "storage/meta.json", ("..",), {"type": "TensorDict"}),
    ("rows", "storage/b/meta.json", ("c", "shape"), []),
    ("rows", "storage/storage_metadata.json", ("is_pytree",), True),
    ("rows", "storage/storage_metadata.json", ("shmbuffer", "structure"), True),
    ("rows", "storage/storage_metadata.json", ("shmbuffer", "structure", "items"), []),
    ("rows", "storage/storage_metadata.json", ("shmbuffer", "structure", "items", 0, 0), 3),
    ("rows", "storage/storage_metadata.json", ("shmbuffer", "write_count"), 2**70),
    ("nested", "storage/storage_metadata.json", (*LAZY, "items", 0, 1, "batch"), [1]),
    ("nested", "storage/storage_metadata.json", (*LAZY, "dim"), -1),
    ("pytree", "storage/storage_metadata.json", ("metadata",), 3),
    ("pytree", "storage/storage_metadata.json", ("metadata",), {}),
]


@pytest.mark.parametrize(("kind", "name", "at", "new"), FOUND)
def test_a_value_that_makes_no_sense_is_an_error_that_names_its_file(
    saved: Callable[[str], Path], kind: str, name: str, at: tuple[Any, ...], new: Any
) -> None:
    save = saved(kind)
    (save / name).write_bytes(exchanged((save / name).read_bytes(), at, new))
    with pytest.raises(ShmBufferError, match=str(save)):
        KINDS[kind](False).loads(save)


@pytest.mark.parametrize("cut", [64, 90, 100, 110])
def test_a_file_of_numpy_whose_head_is_damaged_is_an_error_that_names_it(
    saved: Callable[[str], Path], cut: int
) -> None:
    file = saved("rows") / "storage" / "shmbuffer.items.npy"
    head = bytearray(file.read_bytes())
    head[cut] ^= 8
    for content in (bytes(head[:cut]), bytes(head)):
        file.write_bytes(content)
        error = refused("rows", file.parents[1])
        assert error is None or is_clear(error, file)


def test_a_load_that_is_refused_changes_nothing(saved: Callable[[str], Path]) -> None:
    save = saved("rows")
    (save / "rng_state" / "rng_state.memmap").write_bytes(bytes(5056))
    rb = rows(True)
    before = rb.state_dict()
    with pytest.raises(ShmBufferError, match=r"rng_state/meta.json: .*another copy"):
        rb.loads(save)
    assert rb[:]["a"].tolist() == list(range(6))
    assert torch.equal(rb.generator.get_state(), before["_rng"][0])
    shutil.rmtree(save)
