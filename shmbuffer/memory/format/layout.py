"""The layout of all bytes that processes share.

The control file (fixed size, exists as soon as the directory is a buffer):

    offset   bytes   what
    0        4096    superblock, copy 0        identity, life cycle, settings; the copies are
    4096     4096    superblock, copy 1        written in turn
    8192     4096    runtime page              the mutex and everything that it guards; at its
                                               end the report of the last recovery
    12288    131072  registry                  256 entries of 512 bytes, one for each handle

The slots file exists once the schema is known. It has the slot words, checksums, sources, raw
priorities and the tree, at the offsets of ``_core.sections``. The ledger is described in `ledger`.
Structures that the C core also uses have the offsets of ``_native/core/layout.h``.
``docs/format/directory.md`` has the tables, and ``tests/memory/format/test_layout.py`` compares
them.
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

# Processor architectures on which the lock and the byte order are known to work.
ARCHITECTURES = {"x86_64": 0x8664, "aarch64": 0xAA64}
ARCHITECTURE = ARCHITECTURES.get(platform.machine(), 0)

# A buffer has fewer clients than this in its life. A larger number is damage, or the writer of a
# loaded item.
INCARNATIONS = 2**38
# The number of streams of each client.
STREAMS = 2**24
# Versions of the policy are smaller, so that a difference of two versions fits into 64 bits.
VERSIONS = 2**62
# The number of writers that a source can name: clients first, then those of loads.
WRITERS = 2 * INCARNATIONS
_STREAM_SHIFT, _WRITER = np.uint64(39), np.uint64(WRITERS - 1)

# The limit of slots, and of own rows, if observations are stored once. A slot's word has 31 bits
# for each.
NEXT_LIMIT = 2**31

_CORE = _core.layout()

# The header of a record in the byte ring, and the entry of a slot with the place of its record.
RECORD = np.dtype([("ticket", "<u8"), ("position", "<u8"), ("bytes", "<u8")])
EXTENT = np.dtype([("position", "<u8"), ("bytes", "<u8")])


def source_of(writers: NDArray[np.uint64], streams: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the source words of slots, as ``layout.h`` defines them."""
    return streams << _STREAM_SHIFT | writers


def writer_of(sources: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the writer of each slot: an incarnation, or the number of a load above them."""
    return sources & _WRITER


def stream_of(sources: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the stream of each slot."""
    return sources >> _STREAM_SHIFT


class SlotState(IntEnum):
    """The low two bits of a slot word."""

    EMPTY = 0
    WRITING = 1
    COMMITTED = 2
    ABORTED = 3


class Phase(IntEnum):
    """The phase of a claim; all but IDLE and PAYLOAD exist only while the mutex is held."""

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
    """The life cycle of the buffer, in the runtime page and in the superblock."""

    NO_SCHEMA = 0
    READY = 1
    RECOVERING = 2
    CLOSING = 3
    READ_ONLY = 4  # a private map of a save; never in a file


class Role(IntEnum):
    """The role of a client, for display only."""

    CLIENT = 0
    COLLECTOR = 1
    LEARNER = 2
    COORDINATOR = 3


class Limit(IntFlag):
    """The limits of a rate limiter."""

    RATIO = 1
    QUEUE = 2
    QUOTA = 8
    AGES = 16


class Alone(IntEnum):
    """The behaviour of a limited call while the other side has no client."""

    PASS = 0
    WAIT = 1
    ERROR = 2
    QUEUE = 3  # the default of a queue: wait, unless all collectors have died


class Side(IntFlag):
    """The side that a client waits for."""

    SAMPLES = 1
    INSERTS = 2


class Why(IntEnum):
    """The limit that stopped a call."""

    AHEAD = 1
    BEHIND = 2
    FEW = 3
    FULL = 4
    SHORT = 5
    QUOTA = 6
    VERSION = 7
    HELD = 8
    SCARCE = 9


def name_of(kind: type[IntEnum], number: int) -> str:
    """Returns the name of a number in shared memory, or the number if it is unknown."""
    return next((one.name for one in kind if one == number), f"UNKNOWN {number}")


class Flag(IntFlag):
    """Flags of the superblock."""

    CHECKSUM = 1
    RESERVE = 2
    TEMPORARY = 4
    AUTO_CLEANUP = 8
    CREATED_DIRECTORY = 16
    SAVE = 32  # a snapshot that `dumps` wrote, in which no process has continued
    STEPS = 64  # space is allocated in steps, ahead of the writes; see `growth`


def make_dtype(*fields: tuple[str, str, int], itemsize: int) -> np.dtype[np.void]:
    """Returns a structured dtype of fields with their types and offsets."""
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
    """Returns the dtype of a struct of the C core; fields that are not named are u8."""
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

# One of the two in the runtime page's ``limiters``.
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

# The report of the last recovery, at the end of the runtime page. The C core knows only its size.
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

# The stamp of one copy of the weights.
STAMP = make_core_dtype("stamp", 64, u4="crc32c", step="<i8")
STAMP_SIGNED_BYTES = 32

# The head of the file of the weights. The rest of its page is zero.
WEIGHTS_HEAD = make_core_dtype(
    "weights",
    256,
    u4="endian form_bytes crc32c",
    magic="V8",
    format="<u2",
    pad="<u2",
    stamps="V128",
)

# Counters of an entry. The totals of the buffer are their sums over all entries, including those of
# dead clients.
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

# Reserved names below the scratch directory.
OBJECTS = "objects"
"""The kind of a schema whose items are Python objects. Only saves have it."""

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
