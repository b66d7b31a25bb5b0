"""Converts a data set in another format to a memory-mapped TensorDict, once per version.

    <root>/<source>/.lock                        locked by the process that converts a data set
    <root>/<source>/<name>-<sha256>/             a conversion, which is complete or does not exist
    <root>/<source>/<name>-<sha256>/shmbuffer.conversion.json
                                                 the source, and the columns that were not converted

The digest in the name covers the canonical path, size, inode, mtime and ctime of every file of the
source, and the content of its metadata. A source is therefore converted again if its content has
changed. A conversion is kept only if the source has the same digest before and after it.

The root, and every directory between the root and a conversion, must belong to this user. If the
process dies during a conversion, the kernel releases the lock, and the next conversion removes the
incomplete files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tensordict import TensorDict

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.publication import publish
from shmbuffer.saves.safe_files import write_file
from shmbuffer.saves.work_directory import MARK, sweep_one
from shmbuffer.storages.read_only import report_losses
from shmbuffer.torchrl.compat.folders import require_nameable

_FORMAT = 1
"""Version of the conversion. If it changes, every source is converted again."""
_RECORD = "shmbuffer.conversion.json"
_RECORD_BYTES = 2**24
_LOCK = ".lock"
_NAME_CHARACTERS = 64  # maximum length of the source's name in the name of a conversion


class FoundDataset(NamedTuple):
    """A data set on this machine."""

    kind: str
    name: str
    identity: str  # digest from `identity_of`, computed before the source was opened
    identify: Callable[[], str]  # computes the digest again
    items: int  # number of items
    batches: Callable[[], Iterator[TensorDict]]  # yields batches ``[n]`` of the items in order
    # For each incomplete or missing column, a sentence that describes the missing data. It is
    # filled while the batches are read.
    losses: dict[str, str]


def identity_of(files: Iterable[Path], metadata: bytes) -> str:
    """Returns a digest of the attributes of files and of their metadata.

    The ctime is included because a program can set the mtime of a file to any value, but every
    write changes the ctime.
    """
    stats = [
        (str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        for file in files
        for found in [os.lstat(file)]
    ]
    digest = hashlib.sha256(metadata).hexdigest()
    return hashlib.sha256(json.dumps([_FORMAT, stats, digest]).encode()).hexdigest()


def _default_root() -> Path:
    """Returns the cache directory: ``$XDG_CACHE_HOME/shmbuffer`` or ``~/.cache/shmbuffer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shmbuffer"


def converted(
    source: FoundDataset, root: Path | None, *, strict: bool
) -> tuple[Path, dict[str, str]]:
    """Converts a source if necessary.

    Returns:
        The directory of the conversion, and its losses: a sentence for each column that is missing
        or incomplete.

    Raises:
        UnsafePathError: the root, or a directory below it, belongs to another user.
        ValueError: the items cannot be batched, the source changed during the conversion, or a
            column cannot be converted and ``strict`` is True. No conversion is kept.
    """
    name = f"{quote(os.path.basename(source.name), safe='')[:_NAME_CHARACTERS]}-{source.identity}"
    # A conversion does not change while it is mapped, so any file system can be used.
    with Directory.open(
        resolve_path(_default_root() if root is None else root), create=True, allow_unsafe_fs=True
    ) as cache:
        cache.make(source.kind)
        with cache.folder(source.kind) as folder:
            if not folder.exists(name):
                _convert(source, folder, name, strict=strict)
            with folder.folder(name) as conversion:
                losses = _losses_in(conversion)
    return folder.path / name, losses


def _convert(source: FoundDataset, folder: Directory, name: str, *, strict: bool) -> None:
    """Converts a source, unless another process has converted it in the meantime."""
    with Lock() as turn:
        # No timeout is needed, because the kernel releases the lock if the process that holds it
        # dies. Converting a large source can take a long time.
        turn.hold(folder, _LOCK, timeout=math.inf, purpose="converts a data set")
        if folder.exists(name):
            return
        for left in folder.listdir():
            if left.endswith(MARK):  # incomplete files of a process that died
                sweep_one(folder, left)
        with publish(folder.path / name) as made:
            _write(source, made, strict=strict)
            if source.identify() != source.identity:
                raise ValueError(
                    f"{source.kind}:{source.name}: the files changed while they were converted, so "
                    "the result was discarded; load the data set again when they are complete"
                )
            record = {"format": _FORMAT, "source": source.name, "losses": source.losses}
            write_file(made / _RECORD, json.dumps(record))


def _losses_in(conversion: Directory) -> dict[str, str]:
    """Reads the losses that were recorded with a conversion."""
    try:
        losses = json.loads(conversion.read(_RECORD, limit=_RECORD_BYTES))["losses"]
        return {str(column): str(why) for column, why in losses.items()}
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        raise CorruptBufferError(
            f"{conversion.path}: the conversion is damaged ({error!r:.200}); remove this "
            "directory, and load the data set again",
            path=str(conversion.path),
        ) from error


def _write(source: FoundDataset, path: Path, *, strict: bool) -> None:
    """Writes the items of a source to the memory-mapped files of a conversion."""
    at, files = 0, None
    for batch in source.batches():
        if strict:
            report_losses(f"{source.kind}:{source.name}", source.losses, strict=True)
        if files is None:
            require_nameable(batch, f"{source.kind}:{source.name}")
            files = batch[:1].expand(source.items, *batch.batch_size[1:]).memmap_like(path)
            form = _form_of(batch)
        if _form_of(batch) != form:
            raise ValueError(
                f"{source.kind}:{source.name}: item {at} has {_form_of(batch)}, but the items "
                f"before it have {form}; all items of a data set must have the same form"
            )
        files[at : at + len(batch)] = batch
        at += len(batch)
    if at != source.items or files is None:
        raise ValueError(
            f"{source.kind}:{source.name}: contains {at} items, but {source.items} according to "
            "its metadata; it is damaged or empty"
        )


def _form_of(batch: TensorDict) -> dict[Any, Any]:
    return {
        str(key): (str(leaf.dtype), list(leaf.shape[1:]))
        for key, leaf in sorted(batch.items(True, True), key=lambda entry: str(entry[0]))
    }
