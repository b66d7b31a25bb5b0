"""The file of published weights: their names, dtypes and shapes, and two copies of their values.

    first page  identification, the newest version, and a stamp (header) for each copy
    form        names, dtypes and shapes of the tensors at the first publish, as JSON
    two copies  all tensors, each at a multiple of 64 bytes; version n is stored in copy n mod 2

Always true
  1. The first page, the form and the size of the file never change, except for `newest` and the
     stamps. A process changes these under the file's lock, in the order described in ``weights.c``.
  2. The space of the file is allocated, and its form is written, before the file gets its name.
  3. Weights are returned only if they match the checksum in their stamp.
If the publisher dies: the previous version remains the newest one, and the next publisher
overwrites the incomplete copy. After a power cut, or in a directory that was copied while it was in
use, a copy of the weights may be incomplete. Its checksum is then wrong. Recovery removes this
copy, and the previous version is used if it is intact.
"""

from __future__ import annotations

import errno
import json
import logging
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferNotFoundError,
    CorruptBufferError,
    FormatError,
    IncompatibleVersionError,
    SchemaMismatchError,
    ShmBufferError,
)
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Bytes
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.format.schema import MAX_LEAVES, difference_of
from shmbuffer.memory.system.filesystem import free_memory_bytes
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.private_copy import map_file
from shmbuffer.memory.system.region import Directory

MAGIC = b"SHMWTS\x00\x01"
FORMAT = 1
_ALIGN = 64
_HEAD = layout.WEIGHTS_HEAD

_log = logging.getLogger(__name__)


class WeightsForm:
    """The names, dtypes and shapes of weights.

    Args:
        leaves: Name, dtype and shape of each tensor.

    Raises:
        ValueError: There are too few or too many tensors, or a name occurs twice.
        SchemaMismatchError: A dtype is not supported.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        if not 0 < len(leaves) <= MAX_LEAVES:
            raise ValueError(
                f"weights must have from 1 to {MAX_LEAVES} tensors, but {len(leaves)} were given"
            )
        self.leaves = tuple(leaves)
        self.places: list[int] = []  # offset of each tensor in a copy
        self.nbytes = 0  # size of a copy
        for leaf in self.leaves:
            if leaf.dtype not in DTYPES:
                raise SchemaMismatchError(
                    f"'{leaf.name}' has dtype {leaf.dtype}, which cannot be stored; convert it",
                    leaf=leaf.name,
                )
            self.places.append(self.nbytes)
            self.nbytes += -(-leaf.nbytes // _ALIGN) * _ALIGN
        if len({leaf.path for leaf in self.leaves}) < len(self.leaves):
            raise ValueError("weights contain two tensors with the same name; rename one of them")

    def sort_addresses(
        self, leaves: Sequence[Leaf], addresses: Sequence[int], where: Path
    ) -> Sequence[int]:
        """Sorts the addresses of tensors into the order of the tensors in the file.

        Args:
            leaves: Name, dtype and shape of each tensor.
            addresses: Address of each tensor.
            where: Path of the file, for the message.

        Raises:
            SchemaMismatchError: The tensors do not match those in the file.
        """
        if tuple(leaves) == self.leaves:
            return addresses
        difference = difference_of(self.leaves, leaves, "these weights", "this publish")
        if difference is not None:
            raise SchemaMismatchError(
                f"{where}: {difference}; the first call to publish() has fixed the names, dtypes "
                "and shapes of the weights. Publish tensors with these names, dtypes and shapes, "
                "or remove this file; readers then have no weights until the next call",
                path=str(where),
            )
        by_path = {leaf.path: at for leaf, at in zip(leaves, addresses, strict=True)}
        return [by_path[leaf.path] for leaf in self.leaves]

    def to_json(self) -> bytes:
        """Returns the form as JSON in UTF-8. Equal forms have equal bytes."""
        return json.dumps([leaf.to_json() for leaf in self.leaves], separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightsForm:
        """Parses the output of `to_json`.

        Raises:
            ValueError, KeyError, TypeError, SchemaMismatchError: The JSON is not a valid form.
        """
        return cls([Leaf.from_json(leaf) for leaf in json.loads(data)])


class WeightsCopy(NamedTuple):
    """A private copy of published weights."""

    version: int  # version of the weights
    step: int  # training step, as given by the publisher
    time_ns: int  # wall-clock time of the publish
    form: WeightsForm  # names, dtypes and shapes of the tensors
    data: Bytes  # bytes of all tensors

    def parts(self) -> list[Bytes]:
        """Returns a view of each tensor's bytes, in the order of the form."""
        pairs = zip(self.form.leaves, self.form.places, strict=True)
        return [self.data[at : at + leaf.nbytes] for leaf, at in pairs]


class WeightsFile:
    """The mapped file of the weights.

    If this process can only read the directory, only the first page and the form are mapped.
    """

    def __init__(
        self, directory: Directory, file: _core.Descriptor, *, writable: bool = True
    ) -> None:
        self.where = where = directory.path / layout.WEIGHTS
        with explain_errors(where):
            found = os.fstat(file.fd)
        if found.st_size < layout.PAGE:
            raise _not_weights(where)
        self.identity = (found.st_dev, found.st_ino)
        # time of the last check that the file still has its name, in seconds of `time.monotonic`
        self.checked_s = 0.0
        with explain_errors(where, needed=found.st_size, free=free_memory_bytes):
            size, parts = found.st_size, [(0, layout.PAGE + layout.SCHEMA_LIMIT)]
            mapped: Any = map_file(
                directory, layout.WEIGHTS, file, size, writable=writable, parts=parts
            )
        head, self.form = _parse_head(memoryview(mapped), where)
        self._copies, self._bytes = int(head["copies"]), self.form.nbytes
        self._map = mapped
        page = np.frombuffer(mapped, np.uint8)[: _HEAD.itemsize].view(_HEAD)
        self._newest: memoryview = page["newest"].data
        self._stamps = page["stamps"].view(layout.STAMP)

    def has_its_name(self, directory: Directory) -> bool:
        """True if the file name in the directory still leads to this file."""
        try:
            found = directory.stat(layout.WEIGHTS)
        except BufferNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    @property
    def newest(self) -> int:
        """The newest version, or 0 if no weights were published. Costs 40 ns."""
        return self._newest[0]

    def stamp(self) -> dict[str, Any]:
        """Returns version, step and time (``at_s``) of the newest weights, and the publisher's pid.

        The values are read without a lock. During a publication, they may belong to different
        versions.
        """
        newest = self.newest
        stamp = self._stamps[newest & 1]
        step, time_ns, pid = (int(stamp[name]) for name in ("step", "time_ns", "pid"))
        return {"version": newest, "step": step, "at_s": time_ns / 1e9, "pid": pid}

    def publish(self, addresses: Sequence[int], step: int) -> int:
        """Writes the next version of the weights, and returns its number.

        The caller must hold the lock of the file.

        Args:
            addresses: Address of each tensor, in the order of the form.
            step: Training step, which readers receive with the weights.
        """
        sizes = [leaf.nbytes for leaf in self.form.leaves]
        pieces = np.array([addresses, sizes, self.form.places], np.uint64)
        return _core.publish(
            self._map, self._copies, self._bytes, pieces.ctypes.data, len(sizes), step
        )

    def copy(self, than: int) -> WeightsCopy | None:
        """Returns a validated copy of the newest weights if their version is newer than ``than``.

        Otherwise returns None.

        Raises:
            CorruptBufferError: The weights do not match their checksum.
            ShmBufferError: The weights were overwritten during every attempt to copy them.
        """
        if self.newest <= than:
            return None
        data = np.empty(self._bytes, np.uint8)
        # A reader that has no weights yet may pass a negative version.
        known = max(0, operator.index(than))
        found = _core.read_newest(self._map, self._copies, self._bytes, known, data)
        if isinstance(found, tuple):
            version, step, time_ns, _ = found
            return WeightsCopy(version, step, time_ns, self.form, data)
        if found == _core.NOTHING:
            return None
        if found == _core.LAPPED:
            raise ShmBufferError(
                f"{self.where}: the weights were overwritten each time this process copied them, "
                "because they are published faster than this process can copy them; publish less"
                " often"
            )
        raise CorruptBufferError(
            f"{self.where}: the newest weights do not match their checksum, because another "
            "program wrote to the file; publish the weights again",
            path=str(self.where),
        )

    def drop_damaged(self) -> list[int]:
        """Removes the newest version while it does not match its checksum.

        Returns:
            The removed versions, from the newest to the oldest.
        """
        dropped = []
        for version in range(self.newest, max(0, self.newest - 2), -1):
            if self._is_intact(version):
                break
            self._stamps["version"][version & 1] = 0
            _core.reached("recover.weights")
            dropped.append(version)
        return dropped

    def _is_intact(self, version: int) -> bool:
        """True if the copy of a version matches the checksum in its stamp."""
        stamp, at = self._stamps[version & 1], self._copies + (version & 1) * self._bytes
        signed = _core.crc32c(stamp.tobytes()[: layout.STAMP_SIGNED_BYTES])
        found = _core.crc32c(memoryview(self._map)[at : at + self._bytes], signed)
        return bool(stamp["version"] == version and stamp["crc32c"] == found)


def open_weights(directory: Directory, *, writable: bool = True) -> WeightsFile | None:
    """Opens the file of the weights in a directory. Returns None before the first publish."""
    try:
        file = directory.open_file(layout.WEIGHTS, writable=writable)
    except BufferNotFoundError:
        return None
    with file:
        return WeightsFile(directory, file, writable=writable)


def create_weights(directory: Directory, leaves: Sequence[Leaf], newest: int) -> None:
    """Creates the file of the weights. The caller must hold init.lock.

    Args:
        directory: The directory of the buffer.
        leaves: Name, dtype and shape of each tensor.
        newest: Version before the first one that will be published.
    """
    form, new = WeightsForm(leaves), f"{layout.WEIGHTS}.new"
    encoded = form.to_json()
    copies = layout.PAGE + -(-len(encoded) // layout.PAGE) * layout.PAGE
    directory.unlink(new)
    with directory.create(new, copies + 2 * form.nbytes) as file:
        head = _encode_head(form, encoded, copies, newest)
        with explain_errors(directory.path / new, needed=len(head)):
            if os.pwrite(file.fd, head, 0) != len(head):
                raise OSError(errno.EIO, "the header could not be written completely")
        _core.reached("weights.head")
    directory.rename(new, layout.WEIGHTS)
    _core.reached("weights.named")


def recover(directory: Directory) -> None:
    """Removes weights that a power cut or a copy of the directory has damaged.

    The caller must hold init.lock.
    """
    where = directory.path / layout.WEIGHTS
    try:
        found = open_weights(directory)
        for version in [] if found is None else found.drop_damaged():
            _log.warning(
                "%s: version %d of the weights was incomplete and was removed; publish again",
                where,
                version,
            )
    except (FormatError, CorruptBufferError) as error:
        # Only the text is logged, because a log handler that stores the error would keep the maps
        # alive.
        why = str(error)
        _log.warning("%s; the file is removed: publish the weights again", why)
        directory.unlink(layout.WEIGHTS)


def _encode_head(form: WeightsForm, encoded: bytes, copies: int, newest: int) -> bytes:
    """Encodes the first page and the form of a new file.

    Args:
        form: The form of the weights.
        encoded: The form as JSON.
        copies: Offset of the first copy.
        newest: Version before the first one that will be published.
    """
    page = np.zeros((), _HEAD)
    page["magic"] = np.void(MAGIC)
    page["format"], page["endian"] = FORMAT, layout.ENDIAN_TAG
    page["copy_bytes"], page["copies"], page["form_bytes"] = form.nbytes, copies, len(encoded)
    page["crc32c"] = _core.crc32c(encoded, _core.crc32c(page.tobytes()[:_SIGNED]))
    page["newest"] = newest
    return page.tobytes().ljust(layout.PAGE, b"\0") + encoded


_SIGNED: int = _HEAD.fields["crc32c"][1]  # type: ignore[index]


def _not_weights(where: Path) -> FormatError:
    """Returns the error for a file that does not contain weights."""
    return FormatError(
        f"{where}: this file does not contain weights; check the path. Nothing was changed",
        path=str(where),
    )


def _parse_head(data: memoryview, where: Path) -> tuple[Any, WeightsForm]:
    """Checks and returns the first page and the form of a mapped file.

    Raises:
        FormatError: The file does not contain weights.
        IncompatibleVersionError: The version or byte order of the file is not supported.
        CorruptBufferError: The file is damaged.
    """
    page = bytes(data[: _HEAD.itemsize])
    if not page.startswith(MAGIC):
        raise _not_weights(where)
    head = np.frombuffer(page, _HEAD, 1)[0]
    if head["format"] != FORMAT or head["endian"] != layout.ENDIAN_TAG:
        raise IncompatibleVersionError(
            f"{where}: the format version is {int(head['format'])}, but this build needs {FORMAT}; "
            "open the buffer with the version that wrote this file, or remove this file while no"
            " process has the buffer open",
            path=str(where),
            field="format",
            found=int(head["format"]),
            expected=FORMAT,
        )
    encoded = bytes(data[layout.PAGE : layout.PAGE + int(head["form_bytes"])])
    try:
        if _core.crc32c(encoded, _core.crc32c(page[:_SIGNED])) != head["crc32c"]:
            raise ValueError("its checksum is wrong")
        form = WeightsForm.from_json(encoded)
        if len(data) != int(head["copies"]) + 2 * form.nbytes or form.nbytes != head["copy_bytes"]:
            raise ValueError(f"it has {len(data)} bytes")
    except (ValueError, KeyError, TypeError, RecursionError, SchemaMismatchError) as error:
        raise CorruptBufferError(
            f"{where}: the file of the weights is damaged ({error}); remove it while no process "
            "has the buffer open, and publish again",
            path=str(where),
        ) from error
    return head, form
