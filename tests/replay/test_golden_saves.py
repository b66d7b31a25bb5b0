"""A save of an earlier build loads: items, places, priorities, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.rings import ring_of
from tests.replay import golden_saves
from tests.replay.test_checkpoint_lists import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saves")
    golden_saves.unpack(path)
    return path


def state(rb: Any) -> Any:
    """Its contents, without anything that depends on a process or an address."""
    storages = getattr(rb.storage, "_members", [rb.storage])
    rings = [ring_of(storage) for storage in storages]
    slots = [sorted({*(ring.live.committed() // ring.width).tolist()}) for ring in rings]
    items = [[one.get(at) for at in held] for one, held in zip(storages, slots, strict=True)]
    positions = [ring.head % ring.capacity for ring in rings]
    priorities = [ring.tree.priorities().tolist() for ring in rings]
    parts = rb.sampler.state_dict(), rb.writer.state_dict()
    rng = None if rb.generator is None else rb.generator.get_state()
    return slots, items, positions, priorities, parts, rng


@pytest.mark.parametrize("name", golden_saves.MAKE)
def test_a_save_of_an_earlier_build_is_loaded(name: str, folder: Path) -> None:
    rb, expected = golden_saves.MAKE[name](False), golden_saves.MAKE[name](True)
    rb.loads(folder / name)
    for found, known in zip(state(rb), state(expected), strict=True):
        assert same(found, known)
