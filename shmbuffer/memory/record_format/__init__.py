"""The body of a record: what an item of any size is made of, without pickle.

A record is a header of 32 bytes, which is the ring's (`records`), and a body, which is told here.
Offsets count from the start of the header; integers are little-endian.

    32  u8   version: 1
    33  u8   0
    34  u16  numbers: how many there are
    36  u32  form_bytes
    40  u64  0
    48  numbers   u32 each
    ..  form      what the item is made of; the same bytes for all items of one kind
    ..  pieces    the bytes of each leaf, in order

The form is a tree in the grammar of `grammar`, in binary, with the sizes taken out of it: they are
the numbers. Its leaves are chunks, numbered from 0 in the order of the form. First
come the numbers of all batch sizes, in the order of the form. Then a chunk has its dims, and

    raw           nothing: its size follows from the dims
    compressed    its size
    joined        nothing: its bytes are in the frame of a chunk before it

A chunk that zstd has compressed may have others joined to it: what its frame expands to is its own
bytes, and behind them those of the chunks that are joined to it, in their order.

The bytes of a planar chunk are compressed with the last of its dims first: plane by plane, where
frames were stacked along it. A byte is an item of its dtype, and it has two dims or more. It is
read into the same array.

Text, bytes and integers are chunks of one dim, their length in bytes (integers in two's
complement, little-endian); a float is 8 bytes, a bool 1 byte, None nothing.

A raw piece starts at a multiple of its alignment, the largest power of two that divides its
itemsize, 8 at most. Gaps are zeros. A record ends where the last of its pieces does.

The binary form. There is one way to write each tree:

    count  = u8...             7 bits each, lowest first; the top bit says that more follow; < 2**32
    text   = count utf-8       lone surrogates as 3 bytes each
    rank   = u8                at most 32

    node   = 01 rank marks count (text node)...   tensordict; entries
           | 02 text node                         tensorclass: its class, its tensordict
           | 03 stack_dim count node...           lazy stack
           | 04 stack_dim count node...           NonTensorStack ("objects"); stack_dim: u8
           | 05 rank node                         NonTensorData ("object")
           | 06 count (key node)...               dict
           | 07 count (key node)...               OrderedDict ("ordered")
           | 08 count node...                     list
           | 09 count node...                     tuple
           | 0a text count node...                namedtuple: its class
           | 10 flags text rank [how]             tensor of torch's dtype
           | 11 flags text rank [how]             numpy array of numpy's dtype
           | 12 flags text [how]                  numpy scalar
           | 13 flags [how]                       bytes
           | 14 flags [how]                       str, utf-8
           | 15 flags [how]                       int
           | 16 flags [how]                       float
           | 17 flags [how]                       bool
           | 18 flags [how]                       None
    flags  = u8                bits 0-1 codec (0 raw, 1 zstd, 2 own, 3 joined), bit 3 planar
    how    = count             joined: the number of the chunk
    marks  = u8 [name...]      bit 0: the dims have names, which follow; bit 1: it had a device
    name   = 00 | 01 text      none, or this
    key    = 00 | 01 | 02      None, False, True
           | 03 count bytes    int in two's complement, as short as it can be
           | 04 f64            float, finite
           | 05 text           str
           | 06 count key...   tuple

Entries of a tensordict are tensors and 01 to 05, a lazy stack and a tensorclass hold 01 to 03, a
NonTensorStack 04 and 05.

Nothing in a body is believed: counts, sizes and their products are compared with the bytes that
are there before anything is allocated for them. Shapes must agree too: the batch size of a
tensordict leads the shapes of all tensors and tensordicts in it, and a stack has as many parts as
its dim is long.

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
from shmbuffer.memory.record_format.forms import Form, encode_form
from shmbuffer.memory.record_format.locating import Located, locate
from shmbuffer.memory.record_format.pieces import move, volumes

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
