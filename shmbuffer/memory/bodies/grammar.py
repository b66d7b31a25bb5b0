"""The binary code of a form: its tags, flags and marks."""

from __future__ import annotations

# Containers by their name in the tree; chunks follow, by their kind.
TAGS = {
    "tensordict": 0x01,
    "tensorclass": 0x02,
    "lazy": 0x03,
    "objects": 0x04,
    "object": 0x05,
    "dict": 0x06,
    "ordered": 0x07,
    "list": 0x08,
    "tuple": 0x09,
    "namedtuple": 0x0A,
}
NAMES = {tag: name for name, tag in TAGS.items()}
CHUNK_TAG = 0x10
# In the flags of a chunk, beside its codec; in the marks of a tensordict.
PLACED = 4
NAMED, ON_DEVICE = 1, 2
