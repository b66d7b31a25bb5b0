"""Holds the mapped files of a definition, and creates the ring of the C core."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control


class Mapped(NamedTuple):
    """The mapped files of a definition."""

    schema: Schema
    slots: _core.Map
    leaves: list[_core.Map]
    """The map of each leaf; for records, only that of the byte ring."""
    ledger: _core.Map
    """The ledger. Its map is longer than the file, so its pages are not created ahead of use."""

    @property
    def maps(self) -> list[_core.Map]:
        """The maps that contain items, with the slots first."""
        return [self.slots, *self.leaves]

    @property
    def nbytes(self) -> int:
        """The bytes of all maps."""
        return sum(mapped.nbytes for mapped in self.maps)

    def ring(self, control: Control, *, entry: int, folder: int | None = None) -> _core.Ring:
        """Returns the C core's ring on these maps, for the client of a registry entry.

        Without a client in that entry, the ring may lock, verify and reap under init.lock, but
        never claim. ``folder`` is the descriptor of the directory. If it is given, hot calls fail
        once the directory has been removed.
        """
        superblock, schema = control.superblock(), self.schema
        records = self.leaves[0] if schema.record_bytes else None
        rows = [] if schema.record_bytes else self.leaves
        sizes = zip(rows, (leaf.nbytes for leaf in schema.leaves), strict=True)
        roots = schema.sharing.roots(schema.leaves)
        return _core.Ring(
            control.map,
            self.slots,
            tuple(_describe_leaf(*leaf, roots.get(at)) for at, leaf in enumerate(sizes)),
            schema.capacity,
            schema.width,
            entry,
            bool(superblock.flags & Flag.CHECKSUM),
            superblock.salt,
            records,
            None
            if folder is None
            else (folder, layout.CONTROL, superblock.device, superblock.inode),
            schema.sharing.own_rows,
            self.ledger,
        )


def _describe_leaf(mapped: _core.Map, nbytes: int, root: int | None) -> tuple[Any, ...]:
    """Returns a leaf for the core, with the leaf that has its bytes if it has no column."""
    return (mapped, nbytes) if root is None else (mapped, nbytes, root)
