"""Saves the path of a read-only data set instead of its items."""

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
    """Saves the path and the leaves of a read-only data set. The sampler saves the priorities."""

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> ItemSnapshot:
        """Writes the path and the leaves of the data set. Returns the snapshot for the sampler."""
        make_folder(Path(path))
        write_json(Path(path) / _FILE, {"path": str(storage.path), **_form_of(storage)})
        ring = storage.ring()
        moment: ItemSnapshot = ring.copy_out([])
        write_ring(Path(path), ring, moment, settings_of(storage))
        return moment

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Checks that the save belongs to the data set of the storage.

        Raises:
            ValueError: The save belongs to another data set.
            FileNotFoundError: The directory contains no save of a data set.
        """
        file = Path(path) / _FILE
        found = read_json(file, missing="no data set was saved in this directory")
        with reading(file):
            saved = {name: found[name] for name in ("slots", "leaves")}
        if saved != _form_of(storage):
            raise ValueError(
                f"{path}: was saved with the data set {found.get('path')} of {saved['slots']} "
                f"items, but this storage has the data set {storage.path} of "
                f"{storage.ring().capacity} items; load the save into a storage with the same data "
                "set"
            )
        with open_buffer(Path(path)) as engine:
            ring = engine.ring()
            moment = None if ring is None else moment_of(ring)
        return Loaded(storage.ring().capacity, storage.ring().width, moment=moment)


def _form_of(storage: Any) -> dict[str, Any]:
    """Returns the number of slots and the leaves of a data set as JSON values."""
    leaves = storage.mover().leaves
    return {
        "slots": storage.ring().capacity,
        "leaves": [leaf.to_json() for leaf in leaves.leaves],
    }
