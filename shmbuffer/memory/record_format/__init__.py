"""The format of records, which store items of any structure and size without pickle.

A record consists of a header of 24 bytes, which the ring writes (`records`), and a body.
``docs/format/records.md`` describes the bytes of both. The body has three sections:

    numbers    all sizes: batch sizes, shapes of leaves, and sizes of compressed leaves
    form       the structure of the item without its sizes, in a binary code (`grammar`)
    pieces     the bytes of the leaves

The form is a tree. Its leaves are called chunks, and are numbered from 0 in the order of the form.
The bytes of a chunk, as they are stored, are called a piece. A chunk is stored raw or compressed,
or it is joined to an earlier chunk. The compressed frame of that chunk then contains the bytes of
both.

Readers do not trust the values in a body. Counts, sizes and their products are compared with the
number of available bytes before memory is allocated for them.

The modules, from the lowest layer to the highest:

    bounds                     limits of sizes; the error for an invalid record of a batch
    chunks, grammar, numbers   leaves; tags of the binary code; the order of the numbers
    form_writer, record_forms  encoding and parsing of forms
    pieces, headers            sizes and offsets of pieces; the first bytes of a body
    assembling, locating       build records from pieces, and find the pieces in records; the C core
                               (`locating.c`) does both if all records have the same form
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
