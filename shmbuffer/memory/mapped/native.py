"""The mapped files of a defined buffer, and the creation of the C core's ring on them."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control


class Mapped(NamedTuple):
    """The mapped files of a buffer whose schema is defined."""

    schema: Schema
    slots: _core.Map
    leaves: list[_core.Map]
    """The map of each leaf, or only the map of the byte ring if items are records."""
    ledger: _core.Map
    """The map of the ledger. It is longer than the file, so it is never prefaulted."""

    @property
    def maps(self) -> list[_core.Map]:
        """The maps that contain the items: the slots, followed by the leaves."""
        return [self.slots, *self.leaves]

    @property
    def nbytes(self) -> int:
        """Total size of the maps in `maps`, in bytes."""
        return sum(mapped.nbytes for mapped in self.maps)

    def ring(self, control: Control, *, entry: int, folder: int | None = None) -> _core.Ring:
        """Creates the C core's ring on these maps.

        Args:
            control: The control file.
            entry: Registry entry of the client. If no client has registered in this entry, the ring
                can only take the mutex, verify and reap under init.lock. It cannot claim slots.
            folder: Descriptor of the directory, or None. With a descriptor, writes and samples fail
                when the directory has been removed.
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
    """Returns the arguments for a leaf of the C core's ring.

    Args:
        mapped: Map of the leaf's file.
        nbytes: Size of an element in bytes.
        root: Index of the leaf with the same bytes (`Sharing.roots`), or None if the leaf has a
            column.
    """
    return (mapped, nbytes) if root is None else (mapped, nbytes, root)
