"""The positions of the bytes of a buffer, by name, and the damage that they may get."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.slots_file import SlotsFile
from tests.damage.specimen import Change, Specimen, words

#: Values that replace a number when other data were written over it.
NUMBERS = (0, 1, 2, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**53)
LARGE = (2**62 - 1, 2**62, 2**62 + 8, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 8, 2**64 - 1)


@dataclass(frozen=True)
class Cell:
    """A field or an element, with its name in messages and its position."""

    name: str
    file: str
    offset: int
    nbytes: int

    def becomes(self, value: int) -> Change:
        """Returns the change that stores the low bytes of ``value``."""
        data = (value & (1 << 8 * self.nbytes) - 1).to_bytes(self.nbytes, "little")
        return Change(self.file, self.offset, data)

    def flipped(self, specimen: Specimen, bit: int) -> Change:
        data = specimen.files[self.file][self.offset : self.offset + self.nbytes]
        return self.becomes(int.from_bytes(data, "little") ^ 1 << bit)

    def is_float(self) -> bool:
        return any(part in self.name for part in ("raw", "mass", "sum", "min", "alpha", "eps"))


FLOATS = (np.nan, np.inf, -np.inf, -1.0, -0.0, 5e-324, 1e-300, 1e300, 1.7e308, 0.5, 1e9)


def runtime_cells() -> list[Cell]:
    """Returns the fields of the runtime page, and each 32-bit word of its mutex."""
    page = fields(layout.RUNTIME, "runtime", layout.RUNTIME_OFFSET)
    mutex = [
        Cell(f"runtime.mutex[{at}]", layout.CONTROL, layout.RUNTIME_OFFSET + 4 * at, 4)
        for at in range(16)
    ]
    return [*mutex, *(cell for cell in page if cell.name != "runtime.mutex")]


def entry_cells(entry: int) -> list[Cell]:
    """Returns the fields of a registry entry."""
    at = layout.REGISTRY_OFFSET + entry * layout.ENTRY_BYTES
    return fields(layout.ENTRY, f"entry[{entry}]", at)


def slots_cells(specimen: Specimen) -> list[Cell]:
    """Returns every number in the slots file, including the space after the end of each section."""
    sections = specimen.schema.sections
    starts = sorted((at, name) for name, at in sections.items() if name not in ("bytes", "depth"))
    starts = [(at, name) for at, name in starts if not name.startswith("nodes")]
    ends = [at for at, _ in starts[1:]] + [sections["bytes"]]
    return [
        Cell(f"{name}[{(place - at) // _size(name)}]", layout.SLOTS, place, _size(name))
        for (at, name), end in zip(starts, ends, strict=True)
        for place in range(at, end, _size(name))
    ]


def header_cells(specimen: Specimen) -> list[Cell]:
    """Returns the headers of all records that are items."""
    content = specimen.files[layout.SLOTS]
    extents = SlotsFile(content, specimen.schema).extents
    ring = specimen.schema.record_bytes
    return [
        Cell(
            f"record[{slot}].{name}", layout.RECORDS, int(extents["position"][slot]) % ring + at, 8
        )
        for slot in words(content)[0]
        for at, name in ((0, "ticket"), (8, "position"), (16, "bytes"))
    ]


def payload_cells(specimen: Specimen) -> list[Cell]:
    """Returns every eighth byte of the items, including headers."""
    names = [layout.RECORDS] if specimen.schema.record_bytes else []
    names += [leaf.file for leaf in specimen.schema.leaves]
    return [
        Cell(f"{name}[{at}]", name, at, 1)
        for name in names
        for at in range(0, len(specimen.files[name].rstrip(b"\0")), 8)
    ]


def text_cells(specimen: Specimen) -> list[Cell]:
    """Returns every byte of the small files that are read as a whole."""
    names = [name for name in specimen.files if name.endswith((".json", "dictionary"))]
    return [
        Cell(f"{name}[{at}]", name, at, 1)
        for name in names
        for at in range(len(specimen.files[name]))
    ]


def values(cell: Cell, specimen: Specimen, rng: random.Random, few: int) -> Iterator[Change]:
    """Yields some damaged values of a number: a flipped bit, an extreme, a neighbour's value."""
    choices = [cell.flipped(specimen, bit) for bit in range(8 * cell.nbytes)]
    choices += [cell.becomes(value) for value in (*NUMBERS, *LARGE)]
    if cell.nbytes == 8 and cell.is_float():
        choices += [Change(cell.file, cell.offset, np.float64(value).tobytes()) for value in FLOATS]
    content = specimen.files[cell.file]
    for step in (-2, -1, 1, 2):
        at = cell.offset + step * cell.nbytes
        if 0 <= at <= len(content) - cell.nbytes:
            choices.append(Change(cell.file, cell.offset, content[at : at + cell.nbytes]))
    changed = [change for change in choices if change.data != specimen.bytes_of(change)]
    yield from rng.sample(changed, min(few, len(changed)))


def shared_cells(specimen: Specimen) -> list[Cell]:
    """Returns all cells that processes share and that no checksum of a page covers."""
    records = header_cells(specimen) if specimen.schema.record_bytes else []
    entries = [cell for entry in (0, 1, 200) for cell in entry_cells(entry)]
    return [*runtime_cells(), *entries, *slots_cells(specimen), *records]


@dataclass(frozen=True)
class Damage:
    """Changes of a buffer that make up one case."""

    names: tuple[str, ...]
    changes: tuple[Change, ...]


def single(specimen: Specimen, cells: list[Cell], rng: random.Random, few: int) -> list[Damage]:
    """Returns cases in which one cell is damaged, with some values for each cell."""
    return [
        Damage((cell.name,), (change,))
        for cell in cells
        for change in values(cell, specimen, rng, few)
    ]


def several(specimen: Specimen, cells: list[Cell], rng: random.Random, count: int) -> list[Damage]:
    """Returns cases in which two to six cells are damaged at once."""
    found = []
    for _ in range(count):
        chosen = rng.sample(cells, rng.randint(2, 6))
        changes = [next(values(cell, specimen, rng, 1)) for cell in chosen]
        found.append(Damage(tuple(cell.name for cell in chosen), tuple(changes)))
    return found


def fields(
    dtype: np.dtype[np.void], name: str, start: int, file: str = layout.CONTROL
) -> list[Cell]:
    """Returns the fields of a struct in a file."""
    assert dtype.fields is not None
    return [
        Cell(f"{name}.{field}", file, start + int(of[1]), of[0].itemsize)
        for field, of in dtype.fields.items()
    ]


def _size(section: str) -> int:
    return 4 if section == "checksums" else 8
