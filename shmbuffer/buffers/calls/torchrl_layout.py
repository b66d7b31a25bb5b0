"""Writes and reads saves in TorchRL's layout.

    <path>/
      storage/              the items, as written by the storage's checkpointer
      sampler/, writer/     the states of sampler and writer, if any
      rng_state/            state of the generator, if any
      transform.t           state of the transforms, if any
      buffer_metadata.json  batch size, and the program that wrote the save
      .shmbuffer/parts/     extra, consumers and prefetched batches; see `saved_parts`

The metadata list the files in ``.shmbuffer/parts`` under a key of this package. If TorchRL later
saves to the same path, it rewrites the metadata, so these files are ignored. TorchRL's prefetched
batches (``prefetch.pkl``) are ignored, because nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shmbuffer.buffers.data_path.prefetched import read_prefetched
from shmbuffer.buffers.flow.consumed import read_consumed, write_consumed
from shmbuffer.memory.format.layout import PARTS
from shmbuffer.saves.checkpoints import dump_part, export_storage, read_part
from shmbuffer.saves.safe_files import make_folders_below
from shmbuffer.saves.saved_parts import SavedBuffer, optional_parts
from shmbuffer.saves.values import read_value, write_value
from shmbuffer.storages.storage import ring_of
from shmbuffer.torchrl.compat.buffer_files import (
    read_generator,
    read_metadata,
    read_states,
    write_generator,
    write_metadata,
    write_states,
)
from shmbuffer.torchrl.compat.storage_files import METADATA as STORAGE_METADATA
from shmbuffer.torchrl.compat.writer_files import read_counts

_PREFETCHED = "prefetch.pkl"
_TRANSFORM = "transform.t"
_EXTRA = "extra"

_log = logging.getLogger("shmbuffer.buffers")


def is_ours(place: Path) -> bool:
    """True if a directory contains a save in the layout of this package.

    False if there is no such save, or if TorchRL has written a newer save into the directory.
    """
    with suppress(FileNotFoundError):
        ours = os.stat(place / PARTS).st_mtime_ns
        with suppress(FileNotFoundError):
            return ours > os.stat(place / STORAGE_METADATA).st_mtime_ns
        return True
    return False


def export(saving: Any, directory: Path, extra: Any) -> None:
    """Writes a buffer into an empty directory.

    Args:
        saving: the `Saving` object of the buffer.
        directory: the empty directory.
        extra: the user's data, or None.
    """
    parts = directory / PARTS
    make_folders_below(directory, parts / _EXTRA)
    moment = export_storage(saving.parts.storage, directory / "storage")
    dump_part(saving.parts.writer, directory / "writer", moment)
    with saving.as_delivered(parts):
        dump_part(saving.parts.sampler, directory / "sampler", moment)
        for name, (state, device) in saving.generator_states().items():
            write_generator(directory / name, state, torch.device(device))
    write_states(directory / _TRANSFORM, saving.parts.transform)
    write_consumed(parts, ring_of(saving.parts.storage), moment)
    if extra is not None:
        write_value(parts, _EXTRA, extra, "extra")
    write_metadata(directory, saving.parts.batch_size, optional_parts(parts))


def read_export(saving: Any, path: Path) -> SavedBuffer:
    """Reads a save by `export` or by TorchRL, without changing the buffer.

    Args:
        saving: the `Saving` object of the buffer.
        path: the directory of the save.
    """
    batch_size, beside = read_metadata(path)
    if (path / _PREFETCHED).exists():
        _log.info("%s is ignored, because nothing is unpickled", path / _PREFETCHED)
    names = saving.seeded()
    return SavedBuffer(
        where=path / _TRANSFORM,
        transforms=read_states(path / _TRANSFORM, saving.parts.transform),
        sampler=read_part(saving.parts.sampler, path / "sampler"),
        writer=read_part(saving.parts.writer, path / "writer"),
        storage=read_part(saving.parts.storage, path / "storage"),
        extra=read_value(path / PARTS, _EXTRA) if _EXTRA in beside else None,
        consumers=read_consumed(path / PARTS) if "consumers" in beside else [],
        ahead=read_prefetched(path / PARTS) if "ahead" in beside else [],
        generators={name: found for name in names if (found := read_generator(path / name))},
        batch_size=batch_size,
        written=read_counts(path / "writer"),
    )
