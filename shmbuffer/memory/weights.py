"""Publishes a learner's weights in the directory of the buffer, from which collectors load them.

    learner                     .shmbuffer/weights                        collectors
    publish ──lock, write──▶ the copy that is not the newest
                             newest = version ◀──read, copy, validate── newest

A publisher waits only for other publishers, and a reader never waits. The first publish creates the
file. A handle maps the file when it first finds it. If the file is removed and the next publish
creates a new one, readers switch to the new file within a second. This module does not import
torch: publishers pass addresses of tensors, and readers receive bytes.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.errors import BufferNotFoundError, CorruptBufferError, FormatError, ShmBufferError
from shmbuffer.memory import consumer_version
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.status import require_linked
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.mapped import weights_file
from shmbuffer.memory.mapped.weights_file import WeightsCopy, WeightsFile
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

TIMEOUT_S = 5.0
"""Default for the seconds to wait for another publisher. A publish takes milliseconds."""

_STEPS = 2**63
_CHECK_INTERVAL_S = 1.0  # interval of the checks that the mapped file still has its name


class Weights(NamedTuple):
    """Published weights.

    Attributes:
        version: Version of the weights. Each publish increases it by 1, or by more after a power
            cut.
        step: Training step, as given by the publisher.
        state_dict: Private copies of the tensors or arrays, by name.
    """

    version: int
    step: int
    state_dict: dict[str, Any]


def publish(
    seat: Seat,
    leaves: Sequence[Leaf],
    addresses: Sequence[int],
    step: int,
    timeout: float = TIMEOUT_S,
) -> int:
    """Publishes weights (`ReplayBuffer.publish`).

    Args:
        seat: The seat of the handle.
        leaves: Name, dtype and shape of each tensor.
        addresses: Address of each tensor, contiguous in C order. No thread must change the tensors
            during the call.
        step: Training step, which readers receive with the weights.
        timeout: Seconds to wait for another publisher.

    Returns:
        The version of the weights.
    """
    seat.require_open()
    directory = _directory_of(seat)
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(f"publish: step must be a whole number, but is {step!r}") from None
    if not -_STEPS <= step < _STEPS:
        raise ValueError(f"publish: step must fit into 64 bits, but is {step}")
    try:
        lock = _open_locked(directory, timeout)
    except BufferNotFoundError:
        with seat.backing.lock(timeout):
            seat.require_there()
            if not directory.exists(layout.WEIGHTS):
                # Items may contain versions from a file that was removed. New versions must be
                # higher than these.
                weights_file.create_weights(directory, leaves, consumer_version.read(seat))
        lock = _open_locked(directory, timeout)
    file, where = seat.weights, directory.path / layout.WEIGHTS
    with lock:
        with explain_errors(where):
            found = os.fstat(lock.fd)
        if file is None or file.identity != (found.st_dev, found.st_ino):
            # The file is opened again for the map, because a map keeps its descriptor open, and a
            # descriptor in a forked child would keep the lock.
            file = seat.weights = weights_file.open_weights(directory)
            if file is None:
                raise BufferNotFoundError(
                    f"{where}: the file was removed during the call; publish again"
                )
        version = file.publish(file.form.sort_addresses(leaves, addresses, file.where), step)
        consumer_version.raise_to(seat, version)
    return version


def newest(seat: Seat, than: int | None = None) -> WeightsCopy | None:
    """Returns a copy of the newest weights if their version is newer than ``than``.

    Otherwise, or before the first publish, returns None. ``than=None`` accepts every version.
    """
    file = _file_of(seat)
    require_linked(seat)
    return None if file is None else file.copy(0 if than is None else than)


def stats(seat: Seat) -> dict[str, int | float]:
    """Returns ``weights_version`` and ``weights_age_s`` of the newest weights.

    Both are 0 if no weights were published or the file is damaged.
    """
    file, found = None, {"version": 0, "at_s": 0.0}
    try:
        if seat.backing.directory is not None:
            file = _file_of(seat)
        if file is not None:
            found = file.stamp()
    except (FormatError, CorruptBufferError):  # `inspect` reports the damage
        pass
    age_s = max(0.0, time.time() - found["at_s"]) if found["version"] else 0.0
    return {"weights_version": found["version"], "weights_age_s": age_s}


def flatten(state_dict: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Converts nested mappings to a dict of their values by path.

    Raises:
        TypeError: The argument is not a mapping, or a key is not a string.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"publish: a state_dict must be a mapping, but is a {type(state_dict).__name__}"
        )
    found: dict[tuple[str, ...], Any] = {}
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"publish: the name of a tensor must be a string, but is {key!r}")
        if isinstance(value, Mapping):
            found |= {(key, *path): inner for path, inner in flatten(value).items()}
        else:
            found |= {(key,): value}
    return found


def nest(leaves: Iterable[Leaf], values: Iterable[Any]) -> dict[str, Any]:
    """Builds nested dicts with one value at the path of each leaf. The inverse of `flatten`."""
    root: dict[str, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        folder = root
        for key in leaf.path[:-1]:
            folder = folder.setdefault(key, {})
        folder[leaf.path[-1]] = value
    return root


Named = tuple[str, NDArray[Any]]
"""Torch's name of a dtype and an array, which contains only the bits if NumPy lacks the dtype."""


def publish_arrays(
    seat: Seat,
    state_dict: Mapping[str, Any],
    step: int,
    timeout: float = TIMEOUT_S,
    named: Callable[[Any], Named] = lambda value: (np.asarray(value).dtype.name, np.asarray(value)),
) -> int:
    """Publishes NumPy arrays, like `publish`.

    Args:
        seat: The seat of the handle.
        state_dict: The arrays by name, possibly in nested mappings.
        step: Training step, which readers receive with the weights.
        timeout: Seconds to wait for another publisher.
        named: Function that converts a value to an array and the name of its dtype.

    Returns:
        The version of the weights.
    """
    file = _file_of(seat)
    known = {} if file is None else {leaf.path: leaf.dtype for leaf in file.form.leaves}
    leaves, arrays = [], []
    for path, value in flatten(state_dict).items():
        dtype, array = _array(path, value, named)
        wanted = DTYPES[known.get(path, dtype)]
        # `newest_arrays` returns the bits of a dtype that NumPy lacks as unsigned integers.
        if not wanted.in_numpy and wanted.array == array.dtype:
            dtype = wanted.name
        leaves.append(Leaf(path, dtype, array.shape))
        arrays.append(array)
    return publish(seat, leaves, [array.ctypes.data for array in arrays], step, timeout)


def newest_arrays(seat: Seat, than: int | None = None) -> Weights | None:
    """Returns the newest weights as NumPy arrays, with the condition of `newest`.

    If NumPy lacks a dtype, its bits are returned as unsigned integers.
    """
    found = newest(seat, than)
    if found is None:
        return None
    leaves = found.form.leaves
    arrays = [
        part.view(DTYPES[leaf.dtype].array).reshape(leaf.shape)
        for leaf, part in zip(leaves, found.parts(), strict=True)
    ]
    return Weights(found.version, found.step, nest(leaves, arrays))


def _array(path: tuple[str, ...], value: Any, named: Callable[[Any], Named]) -> Named:
    """Converts a value to the name of its dtype and a contiguous little-endian array.

    Raises:
        TypeError: The value cannot be converted, or its dtype cannot be stored.
    """
    try:
        dtype, array = named(value)
        if dtype not in DTYPES:
            raise TypeError(f"its dtype is {dtype}")
    except (TypeError, ValueError, RuntimeError, OverflowError, BufferError) as error:
        raise TypeError(
            f"publish: '{'.'.join(path)}' is a {type(value).__name__} that cannot be stored "
            f"({error}); leave it out, or convert it"
        ) from error
    if not DTYPES[dtype].in_numpy:
        array = array.view(DTYPES[dtype].array)
    return dtype, np.asarray(array, array.dtype.newbyteorder("<"), "C")


def _file_of(seat: Seat) -> WeightsFile | None:
    """Returns the mapped file of the weights, or None before the first publish.

    Once a second, checks whether the file was replaced.
    """
    file, now_s = seat.weights, time.monotonic()
    if file is not None and now_s - file.checked_s < _CHECK_INTERVAL_S:
        return file
    seat.require_open()
    directory = _directory_of(seat)
    if file is None or not file.has_its_name(directory):
        is_there = os.access(layout.WEIGHTS, os.F_OK, dir_fd=directory.file.fd)
        file = seat.weights = weights_file.open_weights(directory) if is_there else None
    if file is not None:
        file.checked_s = now_s
    return file


def _directory_of(seat: Seat) -> Directory:
    """Returns the directory of a buffer. Raises ShmBufferError if it has none."""
    directory = seat.backing.directory
    if directory is None:
        raise no_directory_error(seat.where)
    return directory


def no_directory_error(where: str) -> ShmBufferError:
    """Returns the error for a publish to a buffer without a directory."""
    return ShmBufferError(
        f"{where}: weights are published in the directory of a buffer, but this buffer has none; "
        "create the buffer with LazyMemmapStorage(..., scratch_dir=...) or a Coordinator"
    )


def _open_locked(directory: Directory, timeout: float) -> Lock:
    """Opens and locks the file of the weights. Raises BufferNotFoundError if there is none."""
    return Lock().hold(
        directory, layout.WEIGHTS, timeout=timeout, purpose="publishes weights", make=False
    )
