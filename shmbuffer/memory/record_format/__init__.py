"""The body of a record: what an item of any size is made of, without pickle.

A record is a header of 24 bytes, which the ring fills (`records`), and a body.
``docs/format/records.md`` has the bytes of both, and the grammar of the form.

The form is a tree in the grammar of `grammar`, in binary, with the sizes taken out of it: they are
the numbers of the record. Its leaves are chunks, numbered from 0 in the order of the form. A chunk
is stored raw, compressed, or joined to a chunk before it, whose frame then holds its bytes, too.

Nothing in a body is believed. Counts, sizes and their products are compared with the bytes that
are there before anything is allocated for them.

Here, from below:

    bounds                              how large what is said may be; a row that cannot be
    chunks, grammar, numbers            leaves; tags of the binary form; where the numbers are
    form_writer, forms                  a form, and its code
    pieces, headers                     sizes and places; first bytes
    assembling, locating                from pieces to records, and back, in the core
                                        (`locating.c`) where all have one form
"""

from __future__ import annotations

from shmbuffer.memory.record_format.assembling import assemble, assemble_one
from shmbuffer.memory.record_format.chunks import Chunk, Codec
from shmbuffer.memory.record_format.locating import Located, locate
from shmbuffer.memory.record_format.pieces import move, volumes
from shmbuffer.memory.record_format.record_forms import Form, encode_form

__all__ = [
    "Chunk",
    "Codec",
    "Form",
    "Located",
    "assemble",
    "assemble_one",
    "encode_form",
    "locate",
    "move",
    "volumes",
]
