"""Loads data sets by name as read-only buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.datasets import minari, parquet
from shmbuffer.datasets.converted import FoundDataset, converted
from shmbuffer.storages.read_only import ReadOnlyStorage, report_losses
from shmbuffer.writers.immutable import ImmutableDatasetWriter

_SOURCES: dict[str, Callable[..., FoundDataset]] = {"minari": minari.find, "parquet": parquet.find}


def load_dataset(
    dataset_id: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    priorities: str | os.PathLike[str] | None = None,
    strict: bool = False,
    rename: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> TensorDictReplayBuffer:
    """Opens a data set as a read-only buffer.

    Data sets of Minari get TorchRL's entries: ``"observation"``, ``"action"`` and ``"episode"``.
    Under ``"next"`` they have the next ``"observation"``, and ``"reward"``, ``"terminated"``,
    ``"truncated"`` and ``"done"``, ``[n, 1]`` each. ``"info"`` is included if it is numeric. If an
    episode has no observation after its last step, the last observation is repeated. If an episode
    has no info for its reset, its infos are only under ``"next"``.

    A UserWarning states which columns are omitted or incomplete, and why.

    Args:
        dataset_id: ``"minari:<id>"`` (the extra ``minari``), ``"parquet:<file>"`` or
            ``"parquet:<folder>"`` (the extra ``parquet``), or the path of a directory for a
            `ReadOnlyStorage`.
        root: directory for converted data sets. Each version of a source is converted once into
            its own directory, which is never removed. With None, ``$XDG_CACHE_HOME/shmbuffer`` is
            used, or ``~/.cache/shmbuffer`` if that variable is not set.
        priorities: see `ReadOnlyStorage`.
        strict: if True, an omitted or incomplete column is an error instead of a warning.
        rename: new names for columns of Parquet files; see `ReplayBuffer.from_parquet`.
        **kwargs: further arguments of `TensorDictReplayBuffer`.

    Raises:
        ValueError: the source is unknown, the items have different forms, or ``strict`` is True
            and a column is omitted or incomplete.
        FileNotFoundError: the data set is not on this machine. Nothing is downloaded.
        UnsafePathError: the root belongs to another user, or a file of the data set is a link, a
            FIFO or a device. The path of the data set itself may be a link.
        MissingExtra: the package that reads the data set is not installed. The message contains
            the command to install it.

    Cost: the first call reads and converts all bytes. Later calls map each leaf.

    Source: ``torchrl.data.datasets.load_dataset``.
    """
    path = Path(dataset_id)
    if rename and not str(dataset_id).startswith("parquet:"):
        raise ValueError(
            f"{dataset_id}: rename= is only supported for the columns of Parquet files; leave it "
            "out for this kind of data set"
        )
    if isinstance(dataset_id, str):
        source, colon, name = dataset_id.partition(":")
        if not colon or source not in _SOURCES:
            raise ValueError(
                f"{dataset_id!r} is not the name of a data set, which must begin with one of "
                f"{', '.join(f'{each}:' for each in _SOURCES)}. Pass a directory as a pathlib.Path "
                "(for a data set that TorchRL has downloaded, its data_path)"
            )
        found = _SOURCES[source](name, **({"rename": rename} if rename else {}))
        path, losses = converted(found, Path(root) if root else None, strict=strict)
        report_losses(dataset_id, losses, strict=strict)
    return TensorDictReplayBuffer(
        storage=ReadOnlyStorage(path, priorities=priorities, strict=strict),
        **{"writer": ImmutableDatasetWriter(), **kwargs},
    )


def opened(dataset: Any, batch_size: int | None, options: dict[str, Any]) -> ReplayBuffer:
    """Returns the buffer of a data set, which is opened if it is a directory or a name.

    Args:
        dataset: a buffer, a directory or a name.
        batch_size: default batch size of an opened buffer.
        options: further arguments of `load_dataset`.

    Raises:
        ValueError: a data set that is opened by name has no batch size, or ``options`` were passed
            with a buffer.
        TypeError: ``dataset`` is none of these.
    """
    if isinstance(dataset, (str, os.PathLike)):
        if isinstance(dataset, str) and batch_size is None and "batch_size" not in options:
            raise ValueError(f"batch_size is required to load {dataset!r} as a separate buffer")
        return load_dataset(dataset, **{"batch_size": batch_size, **options})
    if options:
        raise ValueError(
            f"{', '.join(map(repr, options))} is only supported for a data set that is loaded by "
            "name, but this one is already a buffer; leave it out"
        )
    if not isinstance(dataset, ReplayBuffer):
        raise TypeError(
            "a data set must be a buffer of this package, a directory or a name, got "
            f"{type(dataset).__name__}; for a data set of TorchRL, pass the directory of its "
            "files: pathlib.Path(dataset.data_path)"
        )
    return dataset
