"""Encodes items as records, in which each leaf is either raw or compressed.

items ──split, or as the rows of a batch──▶ Columns ──compressed──▶ pieces
──laid out──▶ RecordBatch
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.kept import Kept
from shmbuffer.items.records.columns import Columns, of_described, of_items
from shmbuffer.items.records.compression import Buffer, Zstd
from shmbuffer.items.records.encoding_plan import EncodingPlan, Unit
from shmbuffer.items.records.forms import Walk, describe, kind_of
from shmbuffer.items.records.memory import lent
from shmbuffer.items.records.planes import as_planes, turned, turned_one
from shmbuffer.items.records.views import readable
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.mapped.record_batch import RecordBatch, gather
from shmbuffer.memory.record_format import LARGE_BYTES, Codec, assemble, assemble_one, move

_KEPT_PLANS = 4096
_LOOKED_ROWS = slice(16)  # rows of a batch that are used to compare forms of storage
_ALL = slice(None)


class Encoder:
    """Encodes items as records. Several threads can use it at the same time.

    Raises:
        TypeError: ``keys`` is a string instead of a list of keys.
    """

    own: Callable[[Any], Any] | None = None
    """A function that replaces zstd. It converts the value of a leaf to an array of bytes."""

    def __init__(
        self,
        *,
        # Compressor, or None to compress nothing with zstd. The attribute can be replaced at any
        # time, by a compressor with a dictionary.
        zstd: Zstd | None = None,
        # Keys or tuples of keys of the entries to compress, including all leaves below them. None
        # selects tensors, arrays, bytes and text of at least 64 bytes that become smaller.
        keys: Iterable[Any] | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise TypeError(f"keys must be a list; for the single key {keys!r} pass [{keys!r}]")
        self.zstd = zstd
        self.keys = (
            None
            if keys is None
            else frozenset(key if isinstance(key, tuple) else (key,) for key in keys)
        )
        self._plans = Kept(self._plan_of, _KEPT_PLANS)

    def encode(self, data: Any, single: bool = False) -> RecordBatch:
        """Encodes one item if ``single`` is True, otherwise a batch in the order of its items.

        Cost: a batch takes 10 µs per leaf and the time to copy its bytes. A list takes 2 µs per
        item and 1 µs per leaf. A single item takes 3 µs, 1 µs per leaf, and the time to copy its
        bytes. Compression takes 2 µs per piece in addition to zstd. With `own`, a single item takes
        100 µs more.
        """
        if not single and len(data := self.listed(data)) == 1:
            (data,), single = self.items(data), True
        if single:
            return self._one(describe(data))
        groups = self.columns(data)
        if len(groups) == 1:
            return self._encode(groups[0][1])
        return _in_order([(at, self._encode(columns)) for at, columns in groups])

    def samples(self, data: Any, single: bool = False) -> list[bytes]:
        """Returns the pieces of the items that zstd would compress, to train a dictionary."""
        found: list[bytes] = []
        for _, columns in of_items([data]) if single else self.columns(data):
            plan = self._plans[columns.kind.key]
            columns = as_planes(columns, self._planar(plan, columns))
            for leaf in plan.compressible:
                sizes = columns.sizes[:, leaf]
                if plan.tried(leaf, int(sizes.max())):
                    found += map(bytes, _views(columns.addresses[:, leaf], sizes))
        return found

    def listed(self, data: Any) -> Any:
        """Returns a batch as an object that has a length and can be iterated several times."""
        return list(data)

    def items(self, data: Any) -> list[Any]:
        """Returns the items of a batch as a list."""
        return list(data)

    def columns(self, data: Any) -> list[tuple[Ints, Columns]]:
        """Groups the items of a batch by kind. Returns the positions and columns of each group."""
        return of_items(self.items(data))

    def _plan_of(self, key: tuple[Any, ...]) -> EncodingPlan:
        kind, codec = kind_of(key), Codec.RAW if self.zstd is None else Codec.ZSTD
        codec = codec if self.own is None else Codec.OWN
        plan = EncodingPlan(kind, codec, self.keys)
        if self.keys and not (plan.compressible or self._plans):
            warnings.warn(
                "nothing is compressed, because the first item has no leaf under the keys "
                f"{sorted(self.keys, key=repr)}; its leaves are {list(kind.paths)}",
                stacklevel=3,
            )
        return plan

    def _measured(self, addresses: Ints, sizes: Ints) -> int:
        """Compresses each piece, and returns the total compressed size in bytes."""
        assert self.zstd is not None  # otherwise no leaf is compressible
        return sum(map(len, self.zstd.compress(_views(addresses, sizes))))

    def _one(self, one: Walk) -> RecordBatch:
        """Encodes a single item, faster than `_encode`."""
        plan = self._plans[one.kind.key]
        sizes = [len(leaf) if type(leaf) is bytes else leaf.nbytes for leaf in one.leaves]
        tried = [leaf for leaf in plan.compressible if plan.tried(leaf, sizes[leaf])]
        looked_at = {*tried, *plan.planes.leaves}
        if not tried and sum(sizes) >= LARGE_BYTES:
            return self._encode(of_described([one]))
        pieces = _pieces(one.leaves, sizes, looked_at) if self.own is None else None
        planar = () if pieces is None else self._turn(plan, one, pieces)
        if pieces is not None:
            units = self._compress(plan, pieces, sizes, tried)
            stored, raw = _planar_in(units, planar)
            for leaf in raw:
                pieces[leaf] = one.leaves[leaf]
            form = plan.form(units, stored)
            record = assemble_one(form, one.batch_dims + one.dims, pieces)
            if record is not None:
                return record
        return self._encode(of_described([one]))

    def _turn(self, plan: EncodingPlan, one: Walk, pieces: list[Any]) -> Unit:
        """Replaces leaves in ``pieces`` by their planes if zstd then compresses them better.

        Returns the numbers of the replaced leaves.
        """
        zstd, found = self.zstd, []
        for leaf in plan.planes.leaves if zstd is not None else ():
            size, planes = len(pieces[leaf]), int(one.leaves[leaf].shape[-1])
            turn = partial(turned_one, address(one.leaves[leaf]), size, planes)
            piece = pieces[leaf]

            def measure(turn: Any = turn, piece: Buffer = piece) -> tuple[int, int, int]:
                assert zstd is not None
                as_is, turned = map(len, zstd.compress([piece, turn().data]))
                return 1, as_is, turned

            if plan.planes.pays(leaf, planes, size, measure):
                pieces[leaf] = turn().data
                found.append(leaf)
        return tuple(found)

    def _planar(self, plan: EncodingPlan, columns: Columns) -> Unit:
        """Returns the numbers of the leaves that are stored plane by plane in these items."""
        found = []
        for leaf in plan.planes.leaves if self.zstd is not None else ():
            dims, sizes = columns.dims[leaf], columns.sizes[_LOOKED_ROWS, leaf]
            if (dims != dims[0]).any():
                continue
            addresses, planes = columns.addresses[_LOOKED_ROWS, leaf], int(dims[0, -1])

            def measure(
                addresses: Ints = addresses, sizes: Ints = sizes, planes: int = planes
            ) -> tuple[int, int, int]:
                keep, to = turned(addresses[:, None], sizes[:, None], [planes])
                as_is, after = self._measured(addresses, sizes), self._measured(to, sizes)
                del keep
                return len(sizes), as_is, after

            if plan.planes.pays(leaf, planes, int(sizes[0]), measure):
                found.append(leaf)
        return tuple(found)

    def _compress(
        self, plan: EncodingPlan, pieces: list[Any], sizes: list[int], tried: list[int]
    ) -> tuple[Unit, ...]:
        """Replaces leaves in ``pieces`` by their compressed bytes if these are smaller.

        Returns the units that were compressed.
        """
        zstd = self.zstd
        if zstd is None or not tried:
            return ()

        def compared(unit: Unit) -> tuple[int, int, int]:
            parts = [pieces[leaf] for leaf in unit]
            *apart, together = map(len, zstd.compress([*parts, b"".join(parts)]))
            return 1, sum(apart), together

        units = plan.units.of(tried, sizes, compared)
        frames = zstd.compress(
            [
                pieces[unit[0]] if len(unit) == 1 else b"".join([pieces[leaf] for leaf in unit])
                for unit in units
            ]
        )
        compressed = []
        for unit, frame in zip(units, map(bytes, frames), strict=True):
            if plan.learn(unit, sum([sizes[leaf] for leaf in unit]) - len(frame), 1):
                for leaf in unit:
                    pieces[leaf] = b""
                pieces[unit[0]] = frame
                compressed.append(unit)
        return tuple(compressed)

    def _encode(self, columns: Columns) -> RecordBatch:
        plan = self._plans[columns.kind.key]
        if columns.shapes is not None and self.own is None and not self._tried(plan, columns):
            return plan.layouts[columns.shapes].batch(columns.addresses, columns)
        planar = self._planar(plan, columns)
        turned = as_planes(columns, planar)
        keeps: list[Any] = []
        compress = self._by_zstd if self.own is None else self._by_own
        addresses, sizes, units = compress(plan, turned, keeps)
        stored, raw = _planar_in(units, planar)
        if raw:
            addresses = addresses.copy()
            addresses[:, raw] = columns.addresses[:, raw]
        return assemble(
            plan.form(units, stored),
            columns.batch_dims,
            columns.dims,
            addresses,
            sizes,
            (columns, turned, keeps),
        )

    def _tried(self, plan: EncodingPlan, columns: Columns) -> list[int]:
        """Returns the numbers of the leaves that the encoder tries to compress."""
        largest = columns.sizes.max(axis=0).tolist() if plan.compressible else []
        return [leaf for leaf in plan.compressible if plan.tried(leaf, largest[leaf])]

    def _by_zstd(
        self, plan: EncodingPlan, columns: Columns, keeps: list[Any]
    ) -> tuple[Ints, Ints, list[Unit]]:
        """Compresses leaves with zstd if they become smaller.

        Returns the addresses and sizes of all leaves, and the units that were compressed. The
        compressed bytes are added to ``keeps``, which keeps their memory alive.
        """
        addresses, sizes = columns.addresses, columns.sizes
        tried = self._tried(plan, columns)
        if self.zstd is None or not tried:
            return addresses, sizes, []

        def parts(unit: Unit, rows: slice = _ALL) -> tuple[Ints, Ints]:
            return addresses[rows, list(unit)], sizes[rows, list(unit)]

        def compared(unit: Unit) -> tuple[int, int, int]:
            at, nbytes = parts(unit, _LOOKED_ROWS)
            keep, starts, whole = _side_by_side(at, nbytes)
            apart, together = (
                self._measured(at.ravel(), nbytes.ravel()),
                self._measured(starts, whole),
            )
            del keep  # it owned the memory at the addresses
            return len(whole), apart, together

        units = plan.units.of(tried, sizes[0].tolist(), compared)
        views: list[memoryview] = []
        wholes = []
        for unit in units:
            keep, at, whole = _side_by_side(*parts(unit))
            keeps.append(keep)
            views += _views(at, whole)
            wholes.append(whole)
        keeps.append(frames := self.zstd.compress(views))
        at, found = np.empty((2, len(frames)), np.int64)
        _core.locate_buffers(frames, address(at), address(found))
        addresses, sizes = addresses.copy(), sizes.copy()
        compressed, end = [], 0
        for unit, whole in zip(units, wholes, strict=True):
            start, end = end, end + len(whole)
            if plan.learn(unit, int((whole - found[start:end]).sum()), len(whole)):
                sizes[:, unit[1:]] = 0
                addresses[:, unit[0]] = at[start:end]
                sizes[:, unit[0]] = found[start:end]
                compressed.append(unit)
        return addresses, sizes, compressed

    def _by_own(
        self, plan: EncodingPlan, columns: Columns, keeps: list[Any]
    ) -> tuple[Ints, Ints, list[Unit]]:
        """Compresses leaves with `own`. The result is that of `_by_zstd`."""
        assert self.own is not None
        assert columns.leaves is not None  # the items were not a batch
        addresses, sizes = columns.addresses.copy(), columns.sizes.copy()
        for leaf in plan.compressible:
            for row in np.flatnonzero(sizes[:, leaf]).tolist():
                keeps.append(made := self.own(columns.leaves[leaf][row]))
                addresses[row, leaf], sizes[row, leaf] = address(made), made.nbytes
        return addresses, sizes, [(leaf,) for leaf in plan.compressible]


def _pieces(leaves: list[Any], sizes: list[int], looked_at: Iterable[int]) -> list[Any] | None:
    """Returns the leaves of an item, with those in ``looked_at`` as buffers of bytes.

    Returns None if a leaf has no memory.
    """
    pieces = list(leaves)
    for at in looked_at:
        if type(leaf := leaves[at]) is not bytes:
            if not (place := address(leaf)) and sizes[at]:
                return None
            pieces[at] = readable(place, sizes[at]) if sizes[at] else b""
    return pieces


def _planar_in(units: Iterable[Unit], planar: Unit) -> tuple[Unit, list[int]]:
    """Splits the planar leaves into those that are compressed and those that are not.

    Leaves that are not compressed are stored in the original order of their bytes.
    """
    compressed = {leaf for unit in units for leaf in unit}
    stored = tuple(leaf for leaf in planar if leaf in compressed)
    return stored, [leaf for leaf in planar if leaf not in compressed]


def _side_by_side(addresses: Ints, sizes: Ints) -> tuple[Any, Ints, Ints]:
    """Makes the pieces of each row adjacent, by copying them if necessary.

    Returns the owner of the copied memory or None, and the addresses and sizes of the joined rows.
    """
    if sizes.shape[1] == 1:
        return None, addresses[:, 0], sizes[:, 0]
    if (addresses[:, 1:] - addresses[:, :-1] == sizes[:, :-1]).all():  # already adjacent
        return None, addresses[:, 0], sizes.sum(axis=1)
    ends = np.cumsum(sizes.ravel()).reshape(sizes.shape)
    memory = lent(int(ends[-1, -1]))
    to = ends - sizes + address(memory)
    move(addresses, sizes, to)
    return memory, to[:, 0], sizes.sum(axis=1)


def _views(addresses: Ints, sizes: Ints) -> list[memoryview]:
    """Returns views of the memory at the addresses. The owner must outlive the views."""
    addresses, sizes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
    return _core.make_views(address(addresses), address(sizes), len(sizes))


def _in_order(groups: list[tuple[Ints, RecordBatch]]) -> RecordBatch:
    """Merges batches into one. Each batch comes with the positions of its records in the result."""
    wholes = [(rows, batch.consolidate()) for rows, batch in groups]
    count = sum(len(batch) for _, batch in wholes)
    sizes, origins = np.empty(count, np.int64), np.empty(count, np.int64)
    for rows, batch in wholes:
        sizes[rows] = batch.sizes
        origins[rows] = address(batch.data) + batch.starts
    return gather(origins, sizes)
