"""Creates, opens, syncs and removes the files of a directory.

    path ──open──▶ Directory ──create──────▶ descriptor of a new file, with its space allocated
                   (one fd)  ──open_file───▶ descriptor of an existing file, checked
                             ──read, write_atomic──▶ the content of small files
                             ──rename, unlink, rmdir, sync──▶ names

A `Directory` holds one descriptor and opens all files relative to it, component by component and
without following links (beneath.py). A file name may contain directories, such as
"next/obs.memmap". This module does not interpret the content of files.

Always true
  1. A descriptor from `open_file` refers to a regular file that this user owns. The file has one
     name (hard link) and exactly the requested size. A file of another size is refused and never
     extended: truncated data would become zeros, or a SIGBUS if the disk is full.
  2. The space of a new file is allocated before another process maps it. If the space cannot be
     allocated, the file is removed.
  3. New files have mode 0600 and new directories have mode 0700, whatever the umask. A directory is
     setgid if its parent is. If the group can read `beneath.PRIVATE`, the modes are 0640 and 0750.
     Lock files always have mode 0600, so that other users cannot lock them.
  4. Only names that the caller passes are removed. Nothing is removed recursively.
  5. In another user's directory (``reading``), nothing is written, mapped or locked. Its files may
     have any owner. The other conditions of 1 apply.
If a process dies here: `create` may leave a file that is too short. Files that must be complete are
therefore created under a temporary name and then renamed. `write_atomic` leaves either the old or
the new file, and possibly a temporary file, which `leftovers` finds.
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
# O_NONBLOCK, because opening a FIFO would otherwise wait until another process opens it.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Directory:
    """An open directory, usually the scratch directory of a buffer.

    Every method can raise these errors:
        BufferNotFoundError: The path does not exist. Also a FileNotFoundError.
        BufferExistsError: The path exists already. Also a FileExistsError.
        BufferUnlinkedError: The directory was removed, so nothing can be created in it.
        UnsafePathError: The path leads to a link or to the wrong type of file, belongs to another
            user, or is a directory that all users can write to.
        ReadOnlyError: The user does not have the necessary permission.
        SpaceError: The disk or the quota is full. A file that was being created is removed.
        BufferClosedError: The directory was closed.
    """

    def __init__(
        self, path: Path, file: _core.Descriptor, *, created: bool, reading: bool = False
    ) -> None:
        # the absolute path that was opened; parent directories may be links, which stay unresolved
        self.path = path
        # True if `open` created this directory; directories created above it do not count
        self.created = created
        found = os.fstat(file.fd)
        self.identity = (found.st_dev, found.st_ino)  # device and inode
        self.file = file  # owns the descriptor
        # True if the directory belongs to another user and is only read
        self.foreign = reading and found.st_uid != os.geteuid()
        # True if files are copied instead of mapped, because this process cannot write here
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

        Args:
            path: Path of the directory.
            create: Creates the directory and its parents if they do not exist.
            allow_unsafe_fs: Accepts file systems that `filesystem.require_safe` refuses.
            any_owner: Accepts a directory of any user, opened with O_PATH, on any file system.
            reading: The caller does not write to the directory, so it may belong to another user or
                be on a read-only file system.
        """
        if not os.fspath(path):
            raise ValueError(f"the path of a directory must not be empty, but is {path!r}")
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
        """Creates a subdirectory. Returns False if it existed already.

        A new subdirectory has exactly the permissions ``mode``. None means the default of rule 3 in
        the module docstring.
        """
        with self._open_parent(name, make=True) as (folder, last):
            if mode is None:
                mode = beneath.new_modes(self._root(), self.path)[1]
            return beneath.make_folder(last, mode, dir_fd=folder)

    def folder(self, name: str) -> Directory:
        """Opens a subdirectory. Raises UnsafePathError unless this user owns it."""
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
        """Creates a file of zeros and the missing directories above it.

        Args:
            name: Name of the file, relative to this directory.
            nbytes: Size of the file in bytes.
            reserve: Whether the disk space is allocated. Otherwise the file is sparse.
            shared: Whether the group can read the file if it can read `beneath.PRIVATE`.
            into: Object that takes ownership of the descriptor. If None, creates one.

        Returns:
            The owner of the descriptor, which is open for reading and writing.
        """
        file, root = into or _core.Descriptor(), self._root()
        if nbytes < 0:
            raise ValueError(
                f"{self.path / name}: the file size must not be negative, but is {nbytes} bytes"
            )
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
                if file.fd >= 0:  # otherwise an existing file has this name
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
        """Opens an existing file and returns the owner of its descriptor.

        Args:
            name: Name of the file, relative to this directory.
            nbytes: Size in bytes that the file must have, or None to accept any size.
            writable: Whether the file is opened for writing, too.
            into: Object that takes ownership of the descriptor. If None, creates one.
        """
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
                    # Another process has replaced or removed the file since it was opened.
                    file.close()
            except BaseException:
                file.close()
                raise

    def open_lock(self, name: str, *, into: _core.Descriptor | None = None) -> _core.Descriptor:
        """Opens a lock file, or creates it if it does not exist. The content is not checked."""
        while True:
            try:
                return self.open_file(name, into=into)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    return self.create(name, 0, shared=False, into=into)

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns the content of a file.

        Raises:
            CorruptBufferError: The file has more than ``limit`` bytes.
        """
        with self.open_file(name, writable=False) as file, explain_errors(self.path / name):
            fd, data = file.fd, bytearray()
            while len(data) <= limit and (more := os.read(fd, min(limit + 1, _CHUNK_BYTES))):
                data += more
            if len(data) > limit:
                size = os.fstat(fd).st_size
                raise wrong_size(self.path / name, f"at most {limit}", limit, size)
            return bytes(data)

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replaces the content of a file atomically, even if the power fails.

        If two callers replace the same file, the later rename takes effect.
        """
        # "a/" must be refused here, because "a/.5f02.tmp" would be a valid name.
        beneath.parts(name, self.path)
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
        """Returns the names of temporary files that killed `write_atomic` calls for ``name`` left.

        The caller must hold the lock that serializes these calls.
        """
        folder, slash, last = name.rpartition("/")
        pattern = re.compile(re.escape(last) + r"\.[0-9a-f]{16}\.tmp")
        found = filter(pattern.fullmatch, self.listdir(folder or "."))
        return [folder + slash + entry for entry in found]

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a file. The file is not opened, and a link is not followed."""
        with self._open_parent(name) as (folder, last):
            return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def exists(self, name: str) -> bool:
        """True if the name exists, even if it is a broken link."""
        with suppress(FileNotFoundError):
            self.stat(name)
            return True
        return False

    def listdir(self, name: str = ".") -> list[str]:
        """Returns the sorted names of all entries of a directory."""
        with self._folder(name) as folder:
            return sorted(os.listdir(folder))

    def rename(self, old: str, new: str, *, into: Directory | None = None) -> None:
        """Renames a file to ``new`` in the directory ``into``, by default this directory.

        An existing file is replaced. Missing directories above ``new`` are created.
        """
        with (
            self._open_parent(old, write=True) as (source, old_last),
            (into or self)._open_parent(new, make=True) as (target, new_last),
            explain_errors(self.path / old),
        ):
            os.rename(old_last, new_last, src_dir_fd=source, dst_dir_fd=target)
            _core.reached("file.renamed")

    def unlink(self, name: str) -> bool:
        """Removes a file, or a link without its target. Returns False if it did not exist."""
        with suppress(FileNotFoundError), self._open_parent(name, write=True) as (folder, last):
            os.unlink(last, dir_fd=folder)
            _core.reached("file.unlinked")
            return True
        return False

    def rmdir(self, name: str) -> bool:
        """Removes an empty directory. Returns False if it does not exist or is not empty."""
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
        """Returns the free bytes of the file system. Quotas are not taken into account."""
        with explain_errors(self.path):
            return filesystem.free_bytes(self._root())

    @property
    def in_memory(self) -> bool:
        """True if the directory is on a file system in memory, such as tmpfs."""
        with explain_errors(self.path):
            return filesystem.filesystem_type(self._root()) in filesystem.IN_MEMORY

    @staticmethod
    def sync_file(fd: int) -> None:
        """Syncs an open file to the disk.

        Raises:
            DurabilityError: The sync failed. A second sync could succeed although the data are not
                on the disk, so do not retry.
        """
        try:
            os.fsync(fd)
        except OSError as error:
            raise not_durable(name_of(fd), error) from error

    def sync(self, name: str = ".") -> None:
        """Syncs the entries of a directory to the disk: created, renamed and removed names."""
        with self._folder(name) as folder:
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that cannot sync directories
                    raise not_durable(str(self.path / name), error) from error

    def still_there(self) -> bool:
        """True if the path still leads to the directory that was opened."""
        if not self._has_a_name():
            return False
        try:
            with explain_errors(self.path, wanted="a directory"):
                found = os.stat(self.path, follow_symlinks=False)
        # the directory or one of its parents was removed or replaced
        except (BufferNotFoundError, UnsafePathError):
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def close(self) -> None:
        """Closes the descriptor of the directory. Files opened from it stay open. Idempotent."""
        self.file.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _root(self) -> int:
        """Returns the descriptor of the directory. Raises BufferClosedError if it was closed."""
        if self.file.fd < 0:
            raise BufferClosedError(
                f"{self.path}: the directory was closed; open it again", path=self.path
            )
        return self.file.fd

    def _has_a_name(self) -> bool:
        """True if the directory was not removed."""
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
        """Yields the descriptor of the directory that contains ``name``, and the last component.

        Args:
            name: Name of a file, relative to this directory.
            make: Creates missing directories on the way.
            write: The caller changes the file or its name, which requires an own directory.
            wanted: Expected type of the file, for error messages.
            needed: Bytes that the caller allocates, for error messages.
        """
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
        """Yields a new descriptor of a directory. Reading its entries moves only its own offset."""
        folders = [] if name == "." else beneath.parts(name, self.path)
        with (
            _core.Descriptor() as opened,
            beneath.walk(self._root(), self.path, folders, foreign=self.foreign) as folder,
            explain_errors(self.path / name, wanted="a directory", reading=self.foreign),
        ):
            yield opened.take(os.open, ".", beneath.FOLDER, dir_fd=folder)
