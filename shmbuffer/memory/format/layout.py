"""The layout of all bytes that processes share.

The control file has a fixed size. It exists as soon as the directory is a buffer:

    offset   bytes   content
    0        4096    superblock, copy 0        identity, life cycle and settings; the copies are
    4096     4096    superblock, copy 1        written alternately
    8192     4096    runtime page              the mutex and the values that it guards; at the end
                                               of the page, the report of the last recovery
    12288    131072  registry                  256 entries of 512 bytes, one for each open handle

The slots file is created when the schema is known. It contains the slot words, checksums, sources,
raw priorities and the priority tree, at the offsets from ``_core.sections``. The module `ledger`
describes the ledger. The offsets of structures that the C core uses, too, come from
``_native/core/layout.h``. ``docs/format/directory.md`` has tables of the whole layout, and
``tests/memory/format/test_layout.py`` compares them with this module.
"""

from __future__ import annotations

import platform
from enum import IntEnum, IntFlag

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory.system import beneath

MAGIC = b"SHMBUF\x00\x01"
FORMAT_MAJOR = 1
FORMAT_MINOR = 0
ENDIAN_TAG = 0x01020304

PAGE = 4096
SUPERBLOCK_BYTES = PAGE
RUNTIME_OFFSET = 2 * PAGE
REGISTRY_OFFSET = 3 * PAGE
ENTRIES = 256
ENTRY_BYTES = 512
CONTROL_BYTES = REGISTRY_OFFSET + ENTRIES * ENTRY_BYTES
FANOUT = 16

# Processor architectures on which the mutex and the byte order are known to work.
ARCHITECTURES = {"x86_64": 0x8664, "aarch64": 0xAA64}
ARCHITECTURE = ARCHITECTURES.get(platform.machine(), 0)

# Upper bound on the number of clients that a buffer has during its existence. A larger incarnation
# is damaged, or is the number of a load, which identifies the writer of a loaded item.
INCARNATIONS = 2**38
# Number of different streams per client.
STREAMS = 2**24
# Upper bound on the version of a policy. Differences between versions therefore fit into 64 bits.
VERSIONS = 2**62
# Number of different writers in a source: the clients, followed by the loads.
WRITERS = 2 * INCARNATIONS
_STREAM_SHIFT, _WRITER = np.uint64(39), np.uint64(WRITERS - 1)

# Upper bound on the number of slots and of own rows with `share_next`. The number that a slot
# stores for its next observations has 31 bits for each.
NEXT_LIMIT = 2**31

_CORE = _core.layout()

# The header of a record in the byte ring, and the entry of a slot with the location of its record.
RECORD = np.dtype([("ticket", "<u8"), ("position", "<u8"), ("bytes", "<u8")])
EXTENT = np.dtype([("position", "<u8"), ("bytes", "<u8")])


def source_of(writers: NDArray[np.uint64], streams: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Combines writers and streams into sources, which slots store (``layout.h``)."""
    return streams << _STREAM_SHIFT | writers


def writer_of(sources: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the writer in each source: an incarnation, or the number of a load."""
    return sources & _WRITER


def stream_of(sources: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the stream in each source."""
    return sources >> _STREAM_SHIFT


class SlotState(IntEnum):
    """The state of a slot: the two lowest bits of its word."""

    EMPTY = 0
    WRITING = 1
    COMMITTED = 2
    ABORTED = 3


class Phase(IntEnum):
    """The phase of a claim. All phases except IDLE and PAYLOAD begin and end under the mutex."""

    IDLE = 0
    MARKING = 1
    PAYLOAD = 2
    COMMITTING = 3
    EMPTYING = 4


class EntryState(IntEnum):
    """The state of a registry entry."""

    FREE = 0
    LIVE = 1


class BufferState(IntEnum):
    """The state of a buffer, which is stored in the runtime page and in the superblock."""

    NO_SCHEMA = 0
    READY = 1
    RECOVERING = 2
    CLOSING = 3
    READ_ONLY = 4  # a private map of a save; this state is never stored in a file


class Role(IntEnum):
    """The role of a client. It is only displayed and has no effect."""

    CLIENT = 0
    COLLECTOR = 1
    LEARNER = 2
    COORDINATOR = 3


class Limit(IntFlag):
    """The set of limits that a rate limiter applies."""

    RATIO = 1  # samples per insert
    QUEUE = 2  # samples per item, first in, first out
    QUOTA = 8  # elements that can be written
    AGES = 16  # policy versions by which an item is older than the learners' version


class Alone(IntEnum):
    """The behavior of a call that has to wait while no client is on the other side."""

    PASS = 0
    WAIT = 1
    ERROR = 2
    QUEUE = 3  # the default of a queue: wait, unless all collectors have died


class Side(IntFlag):
    """The side that a waiting client waits for: calls that sample, or calls that insert."""

    SAMPLES = 1
    INSERTS = 2


class Why(IntEnum):
    """The reason why a call has to wait."""

    AHEAD = 1  # the write would exceed the ratio
    BEHIND = 2  # the sample would exceed the ratio
    FEW = 3  # the buffer has fewer than `min_size` items
    FULL = 4  # the queue is full
    SHORT = 5  # the queue has too few items
    QUOTA = 6  # the quota is used up
    VERSION = 7  # the items would be too old for the learners
    HELD = 8  # a consumer has not completed the items that would be overwritten
    SCARCE = 9  # too few items are left to deliver to the consumer


def name_of(kind: type[IntEnum], number: int) -> str:
    """Returns the name of an enumeration's value, or "UNKNOWN N" if the number is not defined."""
    return next((one.name for one in kind if one == number), f"UNKNOWN {number}")


class Flag(IntFlag):
    """The flags in the superblock."""

    CHECKSUM = 1
    RESERVE = 2
    TEMPORARY = 4
    AUTO_CLEANUP = 8
    CREATED_DIRECTORY = 16
    SAVE = 32  # a snapshot that `dumps` wrote, and that no process has opened for writing since
    STEPS = 64  # space is allocated in steps before it is needed (`growth`)


def make_dtype(*fields: tuple[str, str, int], itemsize: int) -> np.dtype[np.void]:
    """Returns a structured dtype of ``itemsize`` bytes.

    Args:
        fields: The name, the type and the offset in bytes of each field.
        itemsize: Size of the structure in bytes.
    """
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype(
        {
            "names": list(names),
            "formats": list(formats),
            "offsets": list(offsets),
            "itemsize": itemsize,
        }
    )


def make_core_dtype(
    struct: str, itemsize: int, *, u4: str = "", f8: str = "", **others: str
) -> np.dtype[np.void]:
    """Returns the dtype of a struct in the C core, with the offsets that the core reports.

    Args:
        struct: Name of the struct.
        itemsize: Size of the struct in bytes.
        u4: Names of the fields of type uint32, separated by spaces.
        f8: Names of the fields of type float64, separated by spaces.
        others: Types of fields by name. All fields that are not mentioned are uint64.
    """
    prefix = f"{struct}."
    at = {name.removeprefix(prefix): n for name, n in _CORE.items() if name.startswith(prefix)}
    types = dict.fromkeys(at, "<u8") | dict.fromkeys(u4.split(), "<u4")
    types |= dict.fromkeys(f8.split(), "<f8") | others
    fields = [(name, types[name], at[name]) for name in sorted(at, key=lambda name: at[name])]
    return make_dtype(*fields, itemsize=itemsize)


SUPERBLOCK = make_dtype(
    ("magic", "V8", 0),
    ("format_major", "<u2", 8),
    ("format_minor", "<u2", 10),
    ("endian", "<u4", 12),
    ("sequence", "<u8", 16),
    ("uuid", "V16", 24),
    ("boot_id", "V16", 40),
    ("epoch", "<u8", 56),
    ("state", "<u4", 64),
    ("flags", "<u4", 68),
    ("capacity", "<u8", 72),
    ("lanes", "<u8", 80),
    ("leaves", "<u4", 88),
    ("entries", "<u4", 92),
    ("schema_sha256", "V32", 96),
    ("slots_bytes", "<u8", 128),
    ("device", "<u8", 136),
    ("inode", "<u8", 144),
    ("durable_ticket", "<u8", 152),
    ("durable_epoch", "<u8", 160),
    ("owner_pid", "<u8", 168),
    ("owner_start_time", "<u8", 176),
    ("owner_pid_namespace", "<u8", 184),
    ("owner_boot_id", "V16", 192),
    ("architecture", "<u4", 208),
    ("mutex_bytes", "<u2", 212),
    ("mutex_align", "<u2", 214),
    ("page", "<u4", 216),
    ("salt", "<u4", 220),
    ("created_ns", "<u8", 224),
    ("settings_bytes", "<u4", 232),
    ("settings", "V3840", 240),
    ("crc32c", "<u4", 4092),
    itemsize=SUPERBLOCK_BYTES,
)

# A rate limiter. The field `limiters` of the runtime page has two of them.
LIMITER = make_core_dtype(
    "limiter", 64, u4="when_no_peer limits", f8="samples_per_insert error_buffer"
)

RUNTIME = make_core_dtype(
    "runtime",
    PAGE,
    u4="state prioritized waiters progress limiter_version limited consumers",
    f8="max_priority alpha eps offline_base offline_fraction",
    mutex="V64",
    limiters="V128",
    ages="V64",
    spare="(3296,)u1",
)

# The report of the last recovery, at the end of the runtime page. The C core only reserves space
# for it.
RECOVERY_BYTES = 256
RECOVERY_OFFSET = REGISTRY_OFFSET - RECOVERY_BYTES
RECOVERY = make_dtype(
    ("epoch", "<u8", 0),
    ("at_ns", "<u8", 8),
    ("duration_ns", "<u8", 16),
    ("pid", "<u8", 24),
    ("reason", "S16", 32),
    ("items", "<u8", 48),
    ("rolled_back", "<u8", 56),
    ("rolled_forward", "<u8", 64),
    ("clients_retired", "<u8", 72),
    ("priorities_repaired", "<u8", 80),
    ("words_refused", "<u8", 88),
    ("checksum_failed", "<u8", 96),
    ("unverified", "<u8", 104),
    ("crc32c", "<u4", 252),
    itemsize=RECOVERY_BYTES,
)

ENTRY = make_core_dtype(
    "entry",
    ENTRY_BYTES,
    u4="state role phase kind waits_for waits_why inserts_wanted samples_wanted",
    boot_id="V16",
    spare="(248,)u1",
)

# The header of one of the two copies of the weights.
STAMP = make_core_dtype("stamp", 64, u4="crc32c", step="<i8")
STAMP_SIGNED_BYTES = 32

# The beginning of the weights file. The rest of the first page is zero.
WEIGHTS_HEAD = make_core_dtype(
    "weights",
    256,
    u4="endian form_bytes crc32c",
    magic="V8",
    format="<u2",
    pad="<u2",
    stamps="V128",
)

# The counters in a registry entry. The totals of the buffer are the sums over all entries, because
# the counters of a client stay in its entry when it ends.
COUNTERS = (
    "inserts",
    "aborts",
    "batches_sampled",
    "items_sampled",
    "redraws",
    "age_sum",
    "updates_applied",
    "updates_stale",
    "waits",
)

OBJECTS = "objects"
"""The ``kind`` of a schema for items that are Python objects. Only saves have this kind."""

# Reserved names in the scratch directory.
PRIVATE = beneath.PRIVATE
CONTROL = f"{PRIVATE}/control"
SLOTS = f"{PRIVATE}/slots"
SCHEMA = f"{PRIVATE}/schema.json"
RECORDS = f"{PRIVATE}/records"
LEDGER = f"{PRIVATE}/ledger"
DICTIONARY = f"{PRIVATE}/dictionary"
HISTORY, WEIGHTS = f"{PRIVATE}/history", f"{PRIVATE}/weights"
PARTS = f"{PRIVATE}/parts"
PARTIALS = f"{PRIVATE}/partials"
COORDINATOR_LOCK = f"{PRIVATE}/coordinator.lock"
SPAWNED = f"{PRIVATE}/spawned"
SCHEMA_LIMIT = 16 * 1024 * 1024
