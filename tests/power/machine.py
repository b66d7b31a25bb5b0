"""A simulated machine that restarts: places an image and opens it under another boot id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer import BufferNotFoundError, RecoveryReport
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.clients.registry import Registry
from shmbuffer.memory.directory.diagnosis import Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.recovery import recover_directory
from tests.memory.rows import require_sound
from tests.power.contents import Contents, Superblock, names_of, schema
from tests.power.disk import Image
from tests.power.history import BUFFER
from tests.power.scripts import settings, write


@dataclass(frozen=True)
class Started:
    """The result of a start: the report of the recovery, and the files after it."""

    report: RecoveryReport
    files: dict[str, bytes]


def boot(number: int) -> None:
    """Makes this process see another boot of the machine from now on."""
    name = f"boot {number}".encode().ljust(16, b".")
    identity.boot_id = lambda: name
    identity._current = None


class Machine:
    """Directories in which images are placed.

    Attributes:
        tree: the directory that was recorded, of which the images are.
        attic: a directory for files that an image does not have.
    """

    def __init__(self, tree: Path, attic: Path, kind: str) -> None:
        self.tree = tree
        self.attic = attic
        self.path = tree / BUFFER
        self._kind = kind
        self._mapped: _Mapped | None = None

    def place(self, image: Image) -> None:
        """Gives the directory the files of an image, with the same inodes."""
        folders = set(image.folders)
        for folder, below, names in os.walk(self.tree, topdown=False):
            at = os.path.relpath(folder, self.tree)
            for name in names:
                path = os.path.normpath(os.path.join(at, name))
                inode = os.lstat(os.path.join(folder, name)).st_ino
                if path not in image.files or image.files[path][0] != inode:
                    os.rename(os.path.join(folder, name), self.attic / str(inode))
            for name in below:
                if os.path.normpath(os.path.join(at, name)) not in folders:
                    os.rmdir(os.path.join(folder, name))
        for folder in image.folders:
            if not (self.tree / folder).is_dir():
                (self.tree / folder).mkdir(mode=0o700)
        for path, (number, data) in image.files.items():
            self._store(self.tree / path, number, data)

    def start(self, image: Image) -> Started | None:
        """Opens the image like any process; returns None if there is no buffer."""
        self._mapped = None
        self.place(image)
        try:
            with Engine.open(self.path, None) as engine:
                report = engine.report
                files = self._files() if engine.ring() is not None else {}
        except BufferNotFoundError:
            return None
        assert report is not None, "another boot, and nothing was recovered"
        return Started(report, files or self._files())

    def start_mapped(self, image: Image) -> Started | None:
        """Opens an image with all its names and a schema, much faster than `start`.

        The files stay mapped, so that only the recovery is repeated. Returns None if the image has
        no schema; then `start` must be used.
        """
        if not all(f"{BUFFER}/{name}" in image.files for name in names_of(self._kind)):
            return None
        contents = {name: image.files[f"{BUFFER}/{name}"][1] for name in names_of(self._kind)}
        found = Superblock.of(contents[layout.CONTROL])
        if found is not None and not found.defined:
            return None
        if self._mapped is None:
            self.place(image)
            if found is None:
                return None
            self._mapped = _Mapped(self.path, self._kind)
        return self._mapped.recovered(contents)

    def use_and_remove(self, image: Image) -> None:
        """Creates and removes a buffer; only files of others are left."""
        self._mapped = None
        with Engine.open(self.path, settings(self._kind)) as engine:
            write(engine.define(schema(self._kind)), [200])
            engine.flush()
            assert 200 in Contents(self._kind, self._files()).items().values()
            require_sound(engine)
            engine.cleanup()
        foreign = {path for path in image.files if path.endswith("/mine")}
        left = {str(path.relative_to(self.tree)) for path in self.tree.rglob("*") if path.is_file()}
        assert left == foreign, f"{left - foreign} were left behind"

    def _files(self) -> dict[str, bytes]:
        names = [*names_of(self._kind), layout.LEDGER]
        there = [name for name in names if (self.path / name).exists()]
        return {name: (self.path / name).read_bytes() for name in there}

    def _store(self, path: Path, number: int, data: bytes) -> None:
        flags = os.O_RDWR | os.O_CREAT
        if not path.exists() and (self.attic / str(number)).exists():
            os.rename(self.attic / str(number), path)
        fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(fd, len(data))
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)


class _Mapped:
    """The backing files of a directory whose files were mapped once."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._files = Files(Directory.open(path))
        self.directory = self
        self._stat = self._files.directory.stat(layout.CONTROL)
        control = self._files.open_control()
        self._loaded = self._files.load(control.superblock())
        self._control: Control = control
        maps = [control.map, self._loaded.slots, *self._loaded.leaves]
        self._maps = dict(zip(names_of(kind), maps, strict=True))

    def __del__(self) -> None:
        self._files.close()

    def load(self, superblock: Any, schema: Any = None, *, writable: bool = True) -> Any:
        return self._loaded

    def stat(self, name: str) -> os.stat_result:
        return self._stat

    def open_file(self, name: str, **options: Any) -> Any:
        """Opens a mapped file. Others, such as the history, exist only in a real directory."""
        if name not in self._maps:
            raise BufferNotFoundError(f"{name}: is not mapped")
        return self._files.directory.open_file(name, **options)

    def listdir(self, name: str) -> list[str]:
        """Returns no names, because no coordinator has started a process here."""
        return []

    def allocate_again(self, schema: Any, slots: int) -> None:
        """Does nothing, because all images are stored in files that have their space."""

    def vouch(self, schema: Any) -> None:
        """Does nothing, because the next image belongs to another boot."""

    def recovered(self, contents: dict[str, bytes]) -> Started:
        for name, data in contents.items():
            self._bytes(name)[:] = np.frombuffer(data, np.uint8)
        control = self._control
        found = Diagnosis(self, control, control.superblock(), Registry(control, None))  # type: ignore[arg-type]
        report, _ = recover_directory(found, "reboot")
        return Started(report, {name: self._bytes(name).tobytes() for name in contents})

    def _bytes(self, name: str) -> Any:
        mapping: _core.Map = self._maps[name]
        return np.frombuffer(mapping, np.uint8, mapping.nbytes)
