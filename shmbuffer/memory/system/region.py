"""Allocate, open, sync, unlink: a file is complete or it is not ours.

    path ──open──▶ Directory ──create──────▶ descriptor of a new file, with its room
                   (one fd)  ──open_file───▶ descriptor of a file that is there, checked
                             ──read, write_atomic──▶ small files as a whole
                             ──rename, unlink, rmdir, sync──▶ names

A `Directory` holds one descriptor and reaches everything from there, part by part and never
through a link (beneath.py). A name may be nested, "next/obs.memmap". Nothing here knows what is in
it.

Always true
  1. A descriptor that `open_file` returns is of a regular file of ours, with one name and exactly
     the size asked for. A file of another size is refused and never extended: what was cut off
     would come back as zeros, or as SIGBUS where the disk is full.
  2. A new file has its room before anybody can map it, or it does not exist.
  3. New files are 0600 and new directories 0700, whatever the umask; a directory is setgid where
     the one above it is. If the group may read `beneath.PRIVATE`, they are 0640 and 0750, except
     lock files, which others could lock.
  4. Only names that the caller gives are removed; nothing is removed recursively.
  5. In a directory of another user (``reading``) nothing is written, mapped or locked. Its files
     belong to whomever they belong to; all else of 1 holds.
If a process dies here: `create` may leave a file that is too short, so what has to be complete is
built under a temporary name and renamed; `write_atomic` leaves the old file or the new one, and
perhaps one of `leftovers`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferClosedError,
    BufferNotFoundError,
    BufferUnlinkedError,
    UnsafePathError,
)
from shmbuffer.memory.system import beneath, filesystem
from shmbuffer.memory.system.path_checks import (
    explained,
    name_of,
    not_durable,
    require_one_name,
    require_own_directory,
    require_own_file,
    require_owner,
    wrong_size,
)

_CHUNK_BYTES = 2**20
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO would wait for its other end


class Directory:
    """The scratch directory of a buffer, held open.

    Raises, in every method:
        BufferNotFoundError, BufferExistsError: also a FileNotFoundError, a FileExistsError.
        BufferUnlinkedError: this directory was removed, and something is to be made in it.
        UnsafePathError: a link, another kind of file, another user's, or writable by everybody.
        ReadOnlyError: the user may not do this here.
        SpaceError: there is no room; nothing is left behind.
        BufferClosedError: after `close`.
    """

    def __init__(
        self, path: Path, file: _core.Descriptor, *, created: bool, reading: bool = False
    ) -> None:
        # where it was opened, absolute; links above it are allowed, and not resolved
        self.path = path
        # whether `open` made it. Directories above it that were made too do not count
        self.created = created
        found = os.fstat(file.fd)
        self.identity = (found.st_dev, found.st_ino)  # device and inode
        self.file = file  # what owns its descriptor
        # whether it belongs to another user, and is only read
        self.foreign = reading and found.st_uid != os.geteuid()
        # whether files are copied and not mapped, because nothing can be written here
        self.copying = self.foreign or (reading and filesystem.is_read_only(file.fd))

    def __repr__(self) -> str:
        return f"Directory({str(self.path)!r}{', closed' if self.file.fd < 0 else ''})"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        allow_unsafe_fs: bool = False,
        anybodys: bool = False,
        reading: bool = False,
    ) -> Directory:
        """Opens a directory for a buffer to live in.

        ``reading``: nothing will be written, so it may belong to another user, or lie on a
        read-only file system.
        """
        if not os.fspath(path):
            raise ValueError(f"the path of a directory cannot be empty, as {path!r} is")
        where, file, created = Path(path).absolute(), _core.Descriptor(), False
        try:
            with explained(where, wanted="a directory", reading=reading):
                created = create and beneath.make_with_parents(where)
                fd = file.take(os.open, where, beneath.FOLDER | (os.O_PATH if anybodys else 0))
                found = os.fstat(fd)
                if not (anybodys or (reading and found.st_uid != os.geteuid())):
                    require_own_directory(found, where)
                if not (allow_unsafe_fs or anybodys):
                    filesystem.require_safe(fd, where)
                return cls(where, file, created=created, reading=reading)
        except BaseException:
            file.close()
            if created:
                beneath.remove_if_empty(where)
            raise

    def make(self, name: str, *, mode: int | None = None) -> bool:
        """Makes a directory, and returns whether it was not there yet.

        It has exactly this mode, by default that of every new directory.
        """
        with self._within(name, make=True) as (folder, last):
            if mode is None:
                mode = beneath.new_modes(self._root(), self.path)[1]
            return beneath.make_folder(last, mode, dir_fd=folder)

    def folder(self, name: str) -> Directory:
        """Opens a directory below this one; it has to be ours."""
        file = _core.Descriptor()
        with self._folder(name) as found:
            file.take(os.dup, found)
            return Directory(self.path / name, file, created=False)

    def create(
        self,
        name: str,
        nbytes: int,
        *,
        reserve: bool = True,
        shared: bool = True,
        into: _core.Descriptor | None = None,
    ) -> _core.Descriptor:
        """Makes a file of zeros and returns what owns it; directories on the way are made too.

        ``shared``: the group may read it, if it may read `beneath.PRIVATE`.
        """
        file, root = into or _core.Descriptor(), self._root()
        if nbytes < 0:
            raise ValueError(f"{self.path / name}: a file cannot have {nbytes} bytes")
        with self._within(name, make=True, needed=nbytes) as (folder, last):
            mode = beneath.new_modes(root, self.path)[0] if shared else 0o600
            try:
                fd = file.take(
                    os.open, last, _FILE | os.O_CREAT | os.O_EXCL | os.O_RDWR, mode, dir_fd=folder
                )
                _core.reached("file.made")
                os.fchmod(fd, mode)
                _core.reached("file.mode")
                filesystem.allocate(fd, nbytes, reserve=reserve, free=self.free_bytes())
            except BaseException:
                if file.fd >= 0:  # else what is there is not ours
                    file.close()
                    with suppress(OSError):
                        os.unlink(last, dir_fd=folder)
                        _core.reached("file.unlinked")
                raise
        return file

    def open_file(
        self,
        name: str,
        *,
        nbytes: int | None = None,
        writable: bool = True,
        into: _core.Descriptor | None = None,
    ) -> _core.Descriptor:
        """Opens a file that has to be there, and returns what owns it."""
        where, file = self.path / name, into or _core.Descriptor()
        flags = _FILE | (os.O_RDWR if writable else os.O_RDONLY)
        require = require_one_name if self.foreign else require_own_file
        with self._within(name, write=writable) as (folder, last):
            try:
                while True:
                    found = os.fstat(file.take(os.open, last, flags, dir_fd=folder))
                    if found.st_nlink > 0:
                        require(found, where)
                        if nbytes is not None and found.st_size != nbytes:
                            raise wrong_size(where, str(nbytes), nbytes, found.st_size)
                        return file
                    file.close()  # replaced or removed since: look again
            except BaseException:
                file.close()
                raise

    def open_lock(self, name: str, *, into: _core.Descriptor | None = None) -> _core.Descriptor:
        """Open a lock file, and make it if it is not there; what it contains is of no interest."""
        while True:
            try:
                return self.open_file(name, into=into)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    return self.create(name, 0, shared=False, into=into)

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns the content of a file that has `limit` bytes at most."""
        with self.open_file(name, writable=False) as file, explained(self.path / name):
            fd, data = file.fd, bytearray()
            while len(data) <= limit and (more := os.read(fd, min(limit + 1, _CHUNK_BYTES))):
                data += more
            if len(data) > limit:
                size = os.fstat(fd).st_size
                raise wrong_size(self.path / name, f"at most {limit}", limit, size)
            return bytes(data)

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replaces a file atomically, even in a power cut; the last of two callers wins."""
        beneath.parts(name, self.path)  # "a/" is no name, though "a/.5f02.tmp" is one
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        with self.create(temporary, 0) as file:
            try:
                with explained(self.path / name, needed=len(data), free=self.free_bytes):
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(file.fd, rest) :]
                        _core.reached("file.written")
                self.sync_file(file.fd)
                self.rename(temporary, name)
            except BaseException:
                with suppress(OSError):
                    self.unlink(temporary)
                raise
        self.sync(name.rpartition("/")[0] or ".")

    def leftovers(self, name: str) -> list[str]:
        """Temporary files of killed `write_atomic` calls; to be asked for under their lock."""
        folder, slash, last = name.rpartition("/")
        pattern = re.compile(re.escape(last) + r"\.[0-9a-f]{16}\.tmp")
        found = filter(pattern.fullmatch, self.listdir(folder or "."))
        return [folder + slash + entry for entry in found]

    def stat(self, name: str) -> os.stat_result:
        """Looks at a name without opening or following it."""
        with self._within(name) as (folder, last):
            return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def exists(self, name: str) -> bool:
        """True if anything is there, be it a broken link."""
        with suppress(FileNotFoundError):
            self.stat(name)
            return True
        return False

    def listdir(self, name: str = ".") -> list[str]:
        """Returns the names in a directory, sorted."""
        with self._folder(name) as folder:
            return sorted(os.listdir(folder))

    def rename(self, old: str, new: str, *, into: Directory | None = None) -> None:
        """Move a file to `new` (in `into`), over what is there; make the directories on the way."""
        with (
            self._within(old, write=True) as (source, old_last),
            (into or self)._within(new, make=True) as (target, new_last),
            explained(self.path / old),
        ):
            os.rename(old_last, new_last, src_dir_fd=source, dst_dir_fd=target)
            _core.reached("file.renamed")

    def unlink(self, name: str) -> bool:
        """Removes a file, or a link itself, and returns whether it was there."""
        with suppress(FileNotFoundError), self._within(name, write=True) as (folder, last):
            os.unlink(last, dir_fd=folder)
            _core.reached("file.unlinked")
            return True
        return False

    def rmdir(self, name: str) -> bool:
        """Removes a directory if it is there and empty, and returns whether that was done."""
        try:
            with self._within(name, write=True, wanted="a directory") as (folder, last):
                os.rmdir(last, dir_fd=folder)
                _core.reached("folder.removed")
        except OSError as error:
            if error.errno != errno.ENOTEMPTY and not isinstance(error, FileNotFoundError):
                raise
            return False
        return True

    def free_bytes(self) -> int:
        """Returns the free bytes reported by statvfs, which ignores quotas."""
        with explained(self.path):
            return filesystem.free_bytes(self._root())

    @property
    def in_memory(self) -> bool:
        """True if the file system has no disk below it."""
        with explained(self.path):
            return filesystem.filesystem_type(self._root()) in filesystem.IN_MEMORY

    @staticmethod
    def sync_file(fd: int) -> None:
        """Brings a file to the disk; after a DurabilityError a second sync would prove nothing."""
        try:
            os.fsync(fd)
        except OSError as error:
            raise not_durable(name_of(fd), error) from error

    def sync(self, name: str = ".") -> None:
        """Brings the names in a directory to the disk, as `sync_file` does with a file."""
        with self._folder(name) as folder:
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that does not sync directories
                    raise not_durable(str(self.path / name), error) from error

    def still_there(self) -> bool:
        """True if the path still leads to this directory."""
        if not self._has_a_name():
            return False
        try:
            with explained(self.path, wanted="a directory"):
                found = os.stat(self.path, follow_symlinks=False)
        except (BufferNotFoundError, UnsafePathError):  # gone; or no directory above it any more
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def close(self) -> None:
        """Lets go of the directory; the files that were opened in it stay open. Idempotent."""
        self.file.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _root(self) -> int:
        if self.file.fd < 0:
            raise BufferClosedError(f"{self.path}: was closed; open it again", path=self.path)
        return self.file.fd

    def _has_a_name(self) -> bool:
        with explained(self.path, wanted="a directory"):
            return os.fstat(self._root()).st_nlink > 0

    @contextmanager
    def _within(
        self,
        name: str,
        *,
        make: bool = False,
        write: bool = False,
        wanted: str = "a regular file",
        needed: int = 0,
    ) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory of `name`, and its last part; see `explained`."""
        root = self._root()
        *folders, last = beneath.parts(name, self.path)
        if self.foreign and (make or write):
            require_owner(os.fstat(root), self.path)
        if make and not self._has_a_name():
            raise BufferUnlinkedError(
                f"{self.path}: was removed while it was in use; close it, and create it again",
                path=self.path,
            )
        where = self.path / name
        mode = beneath.new_modes(root, self.path)[1] if make else None
        with (
            beneath.walk(root, self.path, folders, make=mode, foreign=self.foreign) as folder,
            explained(
                where, wanted=wanted, needed=needed, free=self.free_bytes, reading=self.foreign
            ),
        ):
            yield folder, last

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """A descriptor of a directory with an offset of its own, which `listdir` moves."""
        folders = [] if name == "." else beneath.parts(name, self.path)
        with (
            _core.Descriptor() as opened,
            beneath.walk(self._root(), self.path, folders, foreign=self.foreign) as folder,
            explained(self.path / name, wanted="a directory", reading=self.foreign),
        ):
            yield opened.take(os.open, ".", beneath.FOLDER, dir_fd=folder)
