"""Creates, opens, syncs and removes the files of a directory.

    path ──open──▶ Directory ──create──────▶ descriptor of a new file, with its space allocated
                   (one fd)  ──open_file───▶ descriptor of an existing file, checked
                             ──read, write_atomic──▶ the content of small files
                             ──rename, unlink, rmdir, sync──▶ names

A `Directory` holds one descriptor and reaches all files from there, component by component and
never through a link (beneath.py). A name may be nested, such as "next/obs.memmap". This module does
not know the content of files.

Always true
  1. A descriptor from `open_file` refers to a regular file that this user owns, with one name and
     exactly the requested size. A file of another size is refused and never extended, because
     truncated data would become zeros, or SIGBUS if the disk is full.
  2. The space of a new file is allocated before any process can map it, or the file does not exist.
  3. New files have mode 0600 and new directories 0700, whatever the umask. A directory is setgid if
     its parent is. If the group may read `beneath.PRIVATE`, the modes are 0640 and 0750, except for
     lock files, which other users could lock.
  4. Only names given by the caller are removed. Nothing is removed recursively.
  5. In a directory of another user (``reading``), nothing is written, mapped or locked. Its files
     may have any owner. The other conditions of 1 hold.
If a process dies here: `create` may leave a file that is too short. Files that must be complete are
therefore built under a temporary name and renamed. `write_atomic` leaves the old file or the new
one, and possibly one of its `leftovers`.
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
    explain_errors,
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
    """An open directory, usually the scratch directory of a buffer.

    Every method may raise:
        BufferNotFoundError, BufferExistsError: Also a FileNotFoundError, a FileExistsError.
        BufferUnlinkedError: The directory was removed, so nothing can be created in it.
        UnsafePathError: The path is a link or another kind of file, belongs to another user, or is
            writable by all users.
        ReadOnlyError: The user has no permission.
        SpaceError: The disk or quota is full. Nothing is left behind.
        BufferClosedError: The directory was closed.
    """

    def __init__(
        self, path: Path, file: _core.Descriptor, *, created: bool, reading: bool = False
    ) -> None:
        # the absolute path that was opened; links in its parents are allowed and not resolved
        self.path = path
        # whether `open` created the directory itself; created parents do not count
        self.created = created
        found = os.fstat(file.fd)
        self.identity = (found.st_dev, found.st_ino)  # device and inode
        self.file = file  # owns the descriptor
        # whether the directory belongs to another user and is only read
        self.foreign = reading and found.st_uid != os.geteuid()
        # whether files are copied instead of mapped, because this process cannot write here
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
        any_owner: bool = False,
        reading: bool = False,
    ) -> Directory:
        """Opens the directory of a buffer.

        ``reading``: nothing will be written, so the directory may belong to another user or be on a
        read-only file system. ``any_owner``: the directory may belong to any user.
        """
        if not os.fspath(path):
            raise ValueError(f"the path of a directory cannot be empty, but is {path!r}")
        where, file, created = Path(path).absolute(), _core.Descriptor(), False
        try:
            with explain_errors(where, wanted="a directory", reading=reading):
                created = create and beneath.make_with_parents(where)
                fd = file.take(os.open, where, beneath.FOLDER | (os.O_PATH if any_owner else 0))
                found = os.fstat(fd)
                if not (any_owner or (reading and found.st_uid != os.geteuid())):
                    require_own_directory(found, where)
                if not (allow_unsafe_fs or any_owner):
                    filesystem.require_safe(fd, where)
                return cls(where, file, created=created, reading=reading)
        except BaseException:
            file.close()
            if created:
                beneath.remove_if_empty(where)
            raise

    def make(self, name: str, *, mode: int | None = None) -> bool:
        """Creates a directory, and returns whether it is new.

        It gets exactly ``mode``, or the default mode of new directories.
        """
        with self._open_parent(name, make=True) as (folder, last):
            if mode is None:
                mode = beneath.new_modes(self._root(), self.path)[1]
            return beneath.make_folder(last, mode, dir_fd=folder)

    def folder(self, name: str) -> Directory:
        """Opens a subdirectory, which this user must own."""
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
        """Creates a file of zeros, and its missing parents; returns the owner of its descriptor.

        ``shared``: the group may read it, if it may read `beneath.PRIVATE`.
        """
        file, root = into or _core.Descriptor(), self._root()
        if nbytes < 0:
            raise ValueError(f"{self.path / name}: the size of a file cannot be {nbytes} bytes")
        with self._open_parent(name, make=True, needed=nbytes) as (folder, last):
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
                if file.fd >= 0:  # otherwise the existing file is not ours
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
        """Opens an existing file and returns the owner of its descriptor."""
        where, file = self.path / name, into or _core.Descriptor()
        flags = _FILE | (os.O_RDWR if writable else os.O_RDONLY)
        require = require_one_name if self.foreign else require_own_file
        with self._open_parent(name, write=writable) as (folder, last):
            try:
                while True:
                    found = os.fstat(file.take(os.open, last, flags, dir_fd=folder))
                    if found.st_nlink > 0:
                        require(found, where)
                        if nbytes is not None and found.st_size != nbytes:
                            raise wrong_size(where, str(nbytes), nbytes, found.st_size)
                        return file
                    file.close()  # the file was replaced or removed meanwhile: open the name again
            except BaseException:
                file.close()
                raise

    def open_lock(self, name: str, *, into: _core.Descriptor | None = None) -> _core.Descriptor:
        """Opens a lock file, and creates it if it does not exist. Its content is ignored."""
        while True:
            try:
                return self.open_file(name, into=into)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    return self.create(name, 0, shared=False, into=into)

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns the content of a file of at most ``limit`` bytes."""
        with self.open_file(name, writable=False) as file, explain_errors(self.path / name):
            fd, data = file.fd, bytearray()
            while len(data) <= limit and (more := os.read(fd, min(limit + 1, _CHUNK_BYTES))):
                data += more
            if len(data) > limit:
                size = os.fstat(fd).st_size
                raise wrong_size(self.path / name, f"at most {limit}", limit, size)
            return bytes(data)

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replaces a file atomically, even in a power cut; the last of two callers wins."""
        beneath.parts(name, self.path)  # "a/" is not a valid name, although "a/.5f02.tmp" is
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        with self.create(temporary, 0) as file:
            try:
                with explain_errors(self.path / name, needed=len(data), free=self.free_bytes):
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
        """Returns temporary files of killed `write_atomic` calls; the caller holds their lock."""
        folder, slash, last = name.rpartition("/")
        pattern = re.compile(re.escape(last) + r"\.[0-9a-f]{16}\.tmp")
        found = filter(pattern.fullmatch, self.listdir(folder or "."))
        return [folder + slash + entry for entry in found]

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a name without opening it or following a link."""
        with self._open_parent(name) as (folder, last):
            return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def exists(self, name: str) -> bool:
        """True if the name exists, even as a broken link."""
        with suppress(FileNotFoundError):
            self.stat(name)
            return True
        return False

    def listdir(self, name: str = ".") -> list[str]:
        """Returns the names in a directory, sorted."""
        with self._folder(name) as folder:
            return sorted(os.listdir(folder))

    def rename(self, old: str, new: str, *, into: Directory | None = None) -> None:
        """Renames a file to ``new`` in ``into``, over an existing file; creates missing parents."""
        with (
            self._open_parent(old, write=True) as (source, old_last),
            (into or self)._open_parent(new, make=True) as (target, new_last),
            explain_errors(self.path / old),
        ):
            os.rename(old_last, new_last, src_dir_fd=source, dst_dir_fd=target)
            _core.reached("file.renamed")

    def unlink(self, name: str) -> bool:
        """Removes a file, or a link itself; returns whether it existed."""
        with suppress(FileNotFoundError), self._open_parent(name, write=True) as (folder, last):
            os.unlink(last, dir_fd=folder)
            _core.reached("file.unlinked")
            return True
        return False

    def rmdir(self, name: str) -> bool:
        """Removes an empty directory; returns whether it was removed."""
        try:
            with self._open_parent(name, write=True, wanted="a directory") as (folder, last):
                os.rmdir(last, dir_fd=folder)
                _core.reached("folder.removed")
        except OSError as error:
            if error.errno != errno.ENOTEMPTY and not isinstance(error, FileNotFoundError):
                raise
            return False
        return True

    def free_bytes(self) -> int:
        """Returns the free bytes reported by statvfs, which ignores quotas."""
        with explain_errors(self.path):
            return filesystem.free_bytes(self._root())

    @property
    def in_memory(self) -> bool:
        """True if the file system has no disk below it."""
        with explain_errors(self.path):
            return filesystem.filesystem_type(self._root()) in filesystem.IN_MEMORY

    @staticmethod
    def sync_file(fd: int) -> None:
        """Syncs a file to the disk. After a DurabilityError, a second sync would prove nothing."""
        try:
            os.fsync(fd)
        except OSError as error:
            raise not_durable(name_of(fd), error) from error

    def sync(self, name: str = ".") -> None:
        """Syncs the names in a directory to the disk, as `sync_file` does for a file."""
        with self._folder(name) as folder:
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that cannot sync directories
                    raise not_durable(str(self.path / name), error) from error

    def still_there(self) -> bool:
        """True if the path still leads to this directory."""
        if not self._has_a_name():
            return False
        try:
            with explain_errors(self.path, wanted="a directory"):
                found = os.stat(self.path, follow_symlinks=False)
        # the directory, or a parent, is gone or was replaced
        except (BufferNotFoundError, UnsafePathError):
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def close(self) -> None:
        """Closes the directory. Files that were opened in it stay open. Idempotent."""
        self.file.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _root(self) -> int:
        if self.file.fd < 0:
            raise BufferClosedError(
                f"{self.path}: the directory was closed; open it again", path=self.path
            )
        return self.file.fd

    def _has_a_name(self) -> bool:
        with explain_errors(self.path, wanted="a directory"):
            return os.fstat(self._root()).st_nlink > 0

    @contextmanager
    def _open_parent(
        self,
        name: str,
        *,
        make: bool = False,
        write: bool = False,
        wanted: str = "a regular file",
        needed: int = 0,
    ) -> Iterator[tuple[int, str]]:
        """Yields the descriptor of the parent of ``name``, and the last part of ``name``."""
        root = self._root()
        *folders, last = beneath.parts(name, self.path)
        if self.foreign and (make or write):
            require_owner(os.fstat(root), self.path)
        if make and not self._has_a_name():
            raise BufferUnlinkedError(
                f"{self.path}: the directory was removed while it was in use; close the buffer,"
                " and create it again",
                path=self.path,
            )
        where = self.path / name
        mode = beneath.new_modes(root, self.path)[1] if make else None
        with (
            beneath.walk(root, self.path, folders, make=mode, foreign=self.foreign) as folder,
            explain_errors(
                where, wanted=wanted, needed=needed, free=self.free_bytes, reading=self.foreign
            ),
        ):
            yield folder, last

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """Yields a descriptor of a directory with its own offset, which `listdir` moves."""
        folders = [] if name == "." else beneath.parts(name, self.path)
        with (
            _core.Descriptor() as opened,
            beneath.walk(self._root(), self.path, folders, foreign=self.foreign) as folder,
            explain_errors(self.path / name, wanted="a directory", reading=self.foreign),
        ):
            yield opened.take(os.open, ".", beneath.FOLDER, dir_fd=folder)
