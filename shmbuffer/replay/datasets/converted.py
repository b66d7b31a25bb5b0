"""A data set of another form, converted once into a TensorDict in files.

    <root>/<source>/<name>-<version>/   is there as a whole, or not at all

A data set with other content gets another version, and is converted again. One process converts,
the others wait; the next one sweeps what a dead one has left.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tensordict import TensorDict

from shmbuffer.replay.publication import publish


class FoundDataset(NamedTuple):
    """A data set that was found."""

    kind: str
    name: str
    version: int
    """Another one for other content."""
    items: int
    batches: Callable[[], Iterator[TensorDict]]
    """The items in their order, ``[n]`` each."""


def converted(source: FoundDataset, root: Path | None) -> Path:
    """The directory of a data set; made now, if it is not there yet."""
    root = Path.home() / ".cache" / "shmbuffer" if root is None else root
    path = root / source.kind / f"{quote(source.name, safe='')}-{source.version:x}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system where its holder dies
            if not path.exists():
                with publish(path) as made:
                    _write(source, made)
    return path


def _write(source: FoundDataset, path: Path) -> None:
    at, files = 0, None
    for batch in source.batches():
        if files is None:
            files = batch[:1].expand(source.items, *batch.batch_size[1:]).memmap_like(path)
            form = _form_of(batch)
        if _form_of(batch) != form:
            raise ValueError(
                f"{source.kind}:{source.name}: item {at} has {_form_of(batch)}, those before have "
                f"{form}; a data set has items of one form"
            )
        files[at : at + len(batch)] = batch
        at += len(batch)
    if at != source.items or files is None:
        raise ValueError(
            f"{source.kind}:{source.name}: has {at} items, and says {source.items}; it is damaged, "
            "or empty"
        )


def _form_of(batch: TensorDict) -> dict[Any, Any]:
    return {
        str(key): (str(leaf.dtype), list(leaf.shape[1:]))
        for key, leaf in sorted(batch.items(True, True), key=lambda entry: str(entry[0]))
    }
