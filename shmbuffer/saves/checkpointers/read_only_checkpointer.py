"""Saves the path of a data set that no process writes to, instead of its items."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shmbuffer.memory import ItemSnapshot
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.saves.checkpointers.record_image import moment_of
from shmbuffer.saves.checkpointers.snapshots import open_buffer, settings_of, write_ring
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.safe_files import make_folder
from shmbuffer.saves.values import read_json, reading, write_json

_FILE = "shmbuffer.data_set.json"


class ReadOnlyStorageCheckpointer(StorageCheckpointerBase):
    """Saves the path of the data set; the sampler saves the priorities."""

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> ItemSnapshot:
        """Writes the path and the form of the data set; returns the snapshot for the sampler."""
        make_folder(Path(path))
        write_json(Path(path) / _FILE, {"path": str(storage.path), **_form_of(storage)})
        ring = storage.ring()
        moment: ItemSnapshot = ring.copy_out([])
        write_ring(Path(path), ring, moment, settings_of(storage))
        return moment

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Raises ValueError if the save has another data set, FileNotFoundError if it has none."""
        file = Path(path) / _FILE
        found = read_json(file, missing="no data set was saved in this directory")
        with reading(file):
            saved = {name: found[name] for name in ("slots", "leaves")}
        if saved != _form_of(storage):
            raise ValueError(
                f"{path}: was saved with the data set in {found.get('path')}, of {saved['slots']} "
                f"items, but this storage has another data set, of {storage.ring().capacity} "
                f"items, in {storage.path}; load it with the same data set"
            )
        with open_buffer(Path(path)) as engine:
            ring = engine.ring()
            moment = None if ring is None else moment_of(ring)
        return Loaded(storage.ring().capacity, storage.ring().width, moment=moment)


def _form_of(storage: Any) -> dict[str, Any]:
    leaves = storage.mover().leaves
    return {
        "slots": storage.ring().capacity,
        "leaves": [leaf.to_json() for leaf in leaves.leaves],
    }
