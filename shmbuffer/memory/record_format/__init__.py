"""The format of record bodies, which store items of any size without pickle.

A record is a header of 24 bytes, which the ring fills (`records`), and a body.
``docs/format/records.md`` describes the bytes of both, and the grammar of the form.

The form is a tree in the grammar of `grammar`, in binary. Its sizes are stored separately, as the
numbers of the record. The leaves of the tree are chunks, numbered from 0 in the order of the form.
A chunk is stored raw, compressed, or joined to an earlier chunk, whose frame then also contains its
bytes.

No value in a body is trusted. Counts, sizes and their products are compared with the available
bytes before anything is allocated for them.

The modules, lowest first:

    bounds                              limits of sizes; the error for an impossible row
    chunks, grammar, numbers            leaves; tags of the binary form; places of the numbers
    form_writer, record_forms           forms and their code
    pieces, headers                     sizes and places; first bytes
    assembling, locating                from pieces to records, and back; the core (`locating.c`)
                                        does both if all records have the same form
"""

from __future__ import annotations

from shmbuffer.memory.record_format.assembling import LARGE_BYTES, Layout, assemble, assemble_one
from shmbuffer.memory.record_format.chunks import Chunk, Codec
from shmbuffer.memory.record_format.locating import Located, locate
from shmbuffer.memory.record_format.pieces import move, volumes
from shmbuffer.memory.record_format.record_forms import Form, encode_form

__all__ = [
    "LARGE_BYTES",
    "Chunk",
    "Codec",
    "Form",
    "Layout",
    "Located",
    "assemble",
    "assemble_one",
    "encode_form",
    "locate",
    "move",
    "volumes",
]
