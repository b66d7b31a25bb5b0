"""Directories of earlier formats, kept: what every later version opens, and goes on writing into.

    python -m tests.replay.golden_directories

adds those of this version's format to ``golden_directories.tar.xz``. What is there stays as it is.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, LazyStackStorage, SliceSampler, TensorDictReplayBuffer
from shmbuffer import attach as attach_to
from shmbuffer.memory.format import layout

ARCHIVE = Path(__file__).with_name("golden_directories.tar.xz")
FORMAT = f"{layout.FORMAT_MAJOR}.{layout.FORMAT_MINOR}"
END = ("next", "done")
WRITERS, CAPACITY = 2, 24


def rows(who: int, step: int, streams: int = 1) -> TensorDict:
    """One step of each stream of a writer."""
    return TensorDict(
        {
            "who": torch.full((streams,), who),
            "env": torch.arange(streams),
            "step": torch.full((streams,), step),
            "next": TensorDict({"done": torch.zeros(streams, 1, dtype=torch.bool)}, [streams]),
        },
        [streams],
    )


def attach(path: Path) -> TensorDictReplayBuffer:
    """A handle that samples slices of three."""
    found: TensorDictReplayBuffer = attach_to(
        path, sampler=SliceSampler(slice_len=3, end_key=END), batch_size=90
    )
    return found


def _write(first: TensorDictReplayBuffer, path: Path, steps: range) -> None:
    """Two writers take turns; where there are streams they have two each."""
    with attach(path) as second:
        for step in steps:
            for who, rb in enumerate((first, second)):
                if FORMAT == "1.3":
                    rb.extend(rows(who, step))
                else:
                    rb.extend(rows(who, step, 2), streams=[0, 7])


def _buffer(storage: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage, sampler=SliceSampler(slice_len=3, end_key=END), batch_size=90
    )


def _rows(path: Path) -> None:
    with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True)) as rb:
        _write(rb, path, range(20))


def _records(path: Path) -> None:
    storage = LazyStackStorage(CAPACITY, max_bytes=2**14, scratch_dir=path, shared_init=True)
    with _buffer(storage) as rb:
        _write(rb, path, range(20))


def _loaded(path: Path) -> None:
    """What was loaded, and some more behind it."""
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder, "buffer")
        with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=one, shared_init=True)) as rb:
            _write(rb, one, range(4))
            rb.dumps(Path(folder, "save"))
        with _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True)) as rb:
            rb.loads(Path(folder, "save"))
            _write(rb, path, range(4, 7))


MAKE: dict[str, Callable[[Path], None]] = {"rows": _rows, "records": _records, "loaded": _loaded}


def unpack(folder: Path) -> None:
    """What the archive holds: a folder ``<format> <kind>`` each."""
    if ARCHIVE.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")


def names() -> list[str]:
    """Of the folders in the archive."""
    with tarfile.open(ARCHIVE) as archive:
        return sorted({name.partition("/")[0] for name in archive.getnames()})


def main() -> None:
    """Make what is missing in the archive."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        for name, make in MAKE.items():
            if not Path(folder, f"{FORMAT} {name}").exists():
                make(Path(folder, f"{FORMAT} {name}"))
        with (
            lzma.open(ARCHIVE, "wb", preset=9) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    sys.exit(main())
