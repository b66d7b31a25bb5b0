"""Recorded settings and schemas with impossible values and valid checksums."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyMemmapStorage,
    ShmBufferError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.memory.format import layout
from tests.damage.specimen import edited_control

#: Values of every JSON type, and some that are just invalid.
STRANGE: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**70, -0.5, 1.5, 1e300),
    *("", "x", "ReplayBuffer", [], ["a"], ["a", ["b"]], [1], [[]], {}, {"kind": 1}),
]


def made(path: Path, *, records: bool) -> None:
    """Makes a dead buffer in which everything that can be recorded is recorded."""
    items = TensorDict({"obs": torch.zeros(8, 3), "td_error": torch.ones(8)}, [8])
    buffer: TensorDictReplayBuffer
    if records:
        storage = CompressedListStorage(
            8, scratch_dir=path, shared_init=True, max_bytes=2**16, compress=["obs"]
        )
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    else:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6,
            beta=0.4,
            storage=LazyMemmapStorage(8, scratch_dir=path, shared_init=True),
            batch_size=4,
            weight_key="weight",
        )
    buffer.extend(items)
    buffer.storage.close()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of keys to each value inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in pairs:
        yield (*at, key)
        if isinstance(below, (dict, list)):
            yield from places(below, (*at, key))


def exchanged(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = by
    return changed


def require_refused_or_served(path: Path) -> None:
    """Checks that a client gets a sample, or an error with the directory and a remedy."""
    try:
        with attach(path) as buffer:
            assert len(buffer.sample(None if buffer.batch_size else 4)) >= 1
            return
    except ShmBufferError as error:
        said = str(error)
    assert str(path) in said
    assert ";" in said, f"{said} does not say what to do"


@pytest.fixture(params=[False, True], ids=["rows", "records"])
def dead(request: pytest.FixtureRequest, fast_path: Path) -> Iterator[Path]:
    path = fast_path / "buffer"
    made(path, records=request.param)
    return path


@pytest.mark.filterwarnings("ignore:beta=")  # a recorded beta may be strange, and is used
@pytest.mark.product(few=1)
def test_settings_with_another_value_are_refused_or_served(dead: Path, full: bool) -> None:
    rng = random.Random(4)
    with edited_control(dead) as control:
        whole = control.superblock()
        for at in places(whole.settings):
            for value in STRANGE if full else rng.sample(STRANGE, 4):
                settings = exchanged(whole.settings, at, value)
                for _ in (0, 1):
                    control.write(replace(whole, settings=settings))
                require_refused_or_served(dead)


def test_a_schema_with_another_value_is_refused_or_served(dead: Path, full: bool) -> None:
    rng = random.Random(5)
    file = dead / layout.SCHEMA
    whole = json.loads(file.read_text())
    with edited_control(dead) as control:
        superblock = control.superblock()
        for at in places(whole):
            for value in rng.sample(STRANGE, 6 if full else 3):
                data = json.dumps(exchanged(whole, at, value)).encode()
                file.write_bytes(data)
                digest = hashlib.sha256(data).digest()
                for _ in (0, 1):
                    control.write(replace(superblock, schema_sha256=digest))
                require_refused_or_served(dead)
