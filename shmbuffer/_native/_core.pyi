"""Types of the C core's extension module."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

BLOCKED: int
FORKED: int
CLOSED: int
LOCK_TIMEOUT: int
INTERRUPTED: int
UNRECOVERABLE: int
FENCED: int
NOTHING: int
NO_MEMORY: int
NO_CLAIM: int
OTHER_SETTINGS: int
LEFT: int
BAD_ALPHA: int
REENTERED: int
NO_TICKETS: int
TOO_LARGE: int
BAD_BATCH: int
NO_ROOM: int
LIMITED: int
IN_QUEUE: int
CONSUMED: int
CONSUMER_GONE: int
NO_LEASE: int
DAMAGED: int
UNLINKED: int
LAPPED: int
NO_OWN_ROWS: int
NO_RESERVATION: int
OVER_RESERVED: int
ALL_RESERVED: int
TOO_OLD: int
UNALLOCATED: int
BAD_PRIORITY: int
BAD_INDEX: int

class Descriptor:
    def __init__(self, *, inherited: bool = ...) -> None: ...
    @property
    def fd(self) -> int: ...
    def fileno(self) -> int: ...
    def take(self, open: Callable[..., int], /, *args: Any, **kwargs: Any) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class Map:
    def __init__(
        self,
        fd: int,
        nbytes: int,
        writable: bool = ...,
        offset: int = ...,
        twice: bool = ...,
        aligned: bool = ...,
        private: bool = ...,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def sync(self) -> None: ...
    def populate(self, start: int, nbytes: int, memory: bool, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Ring:
    def __init__(
        self,
        control: Map,
        slots: Map,
        leaves: tuple[tuple[Any, ...], ...],
        capacity: int,
        lanes: int,
        entry: int,
        checksum: bool,
        salt: int,
        records: Map | None = ...,
        file: tuple[int, str, int, int] | None = ...,
        own_rows: int = ...,
        ledger: Map | None = ...,
    ) -> None: ...
    def write(
        self,
        addresses: tuple[int, ...],
        count: int,
        priorities: int,
        streams: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def write_loaded(
        self,
        addresses: tuple[int, ...],
        count: int,
        priorities: int,
        sources: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def fill(self, addresses: tuple[int, ...], /) -> int: ...
    def repair_links(self) -> int: ...
    def place(
        self,
        slots: int,
        count: int,
        addresses: tuple[int, ...],
        priorities: int,
        in_place: bool,
        timeout_ns: int,
        /,
    ) -> int: ...
    def claim(self, count: int, streams: int, timeout_ns: int, /) -> int: ...
    def claim_slots(
        self,
        slots: int,
        count: int,
        in_place: int,
        tickets: int,
        accepted: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def restore(
        self, slot: int, write_count: int, max_priority: float, timeout_ns: int, /
    ) -> int: ...
    def copy_slots(self, first: int, count: int, out: tuple[int, ...], tickets: int, /) -> int: ...
    def finish_snapshot(
        self, out: tuple[int, ...], tickets: int, sources: int, raw: int, timeout_ns: int, /
    ) -> tuple[int, int, float] | int: ...
    def commit(self, priorities: int, skip_rows: int, timeout_ns: int, /) -> int: ...
    def abort(self, timeout_ns: int, /) -> int: ...
    def sample(
        self,
        count: int,
        key: int,
        out: tuple[int, ...] | None,
        index: int,
        tickets: int,
        weights: int,
        beta: float,
        prioritized: bool,
        timeout_ns: int,
        /,
    ) -> int: ...
    def read(
        self, index: int, count: int, out: tuple[int, ...], tickets: int, timeout_ns: int, /
    ) -> int: ...
    def update(
        self, index: int, tickets: int, priorities: int, count: int, timeout_ns: int, /
    ) -> int: ...
    def update_arrays(
        self, index: Any, priorities: Any, tickets: Any, timeout_ns: int, /
    ) -> tuple[int, int] | int | None: ...
    def read_totals(self, timeout_ns: int, /) -> tuple[float, float, float, int] | int: ...
    def raise_max_priority(self, value: float, timeout_ns: int, /) -> int: ...
    def empty(self, keep_write_count: bool, timeout_ns: int, /) -> int: ...
    def set_alpha(
        self, alpha: float | None, eps: float | None, bind: bool, timeout_ns: int, /
    ) -> int: ...
    def reap(self, entry: int, incarnation: int, timeout_ns: int, /) -> int: ...
    def forfeit(self, entry: int, turn: int, timeout_ns: int, /) -> int: ...
    def leave(self, timeout_ns: int, /) -> int: ...
    def check(
        self, alive: bool, slots: int, timeout_ns: int, /
    ) -> tuple[int, int, int, int, int, int, int, int, int] | int: ...
    def wait(self, timeout_ns: int, /) -> None: ...
    def snapshot(self, timeout_ns: int, /) -> bytes | int: ...
    def open_consumer(
        self,
        which: int,
        name: int,
        times: int,
        holds: bool,
        newest: bool,
        seed: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def remove_consumer(self, which: int, number: int, timeout_ns: int, /) -> int: ...
    def deliver(
        self,
        which: int,
        number: int,
        count: int,
        least: int,
        lease_ns: int,
        slots: int,
        tickets: int,
        lease: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def claim_groups(
        self,
        which: int,
        number: int,
        slots: int,
        tickets: int,
        sizes: int,
        groups: int,
        lease_ns: int,
        accepted: int,
        lease: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def drop_items(
        self, which: int, number: int, slots: int, tickets: int, count: int, timeout_ns: int, /
    ) -> int: ...
    def acknowledge(
        self,
        which: int,
        number: int,
        leases: int,
        slots: int,
        tickets: int,
        count: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def return_lease(self, which: int, number: int, lease: int, timeout_ns: int, /) -> int: ...
    def is_stuck(self, which: int, number: int, missing: int, timeout_ns: int, /) -> int: ...
    def await_items(
        self, which: int, number: int, wanted: int, since: int, timeout_ns: int, /
    ) -> int: ...
    def count_deliverable(
        self, which: int, number: int, wanted: int, timeout_ns: int, /
    ) -> int: ...
    def list_returned(
        self,
        which: int,
        number: int,
        known: int,
        slots: int,
        tickets: int,
        room: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def find_oldest(self, which: int, number: int, oldest: int, timeout_ns: int, /) -> int: ...
    def read_item_states(
        self, which: int, number: int, states: int, tickets: int, leases: int, timeout_ns: int, /
    ) -> int: ...
    def check_directory(self) -> int: ...
    def bypass(self, calls: int, /) -> None: ...
    def admit_sample(self, count: int, min_size: int, chosen: bool, timeout_ns: int, /) -> int: ...
    def cancel_draw(self, count: int, version: int, timeout_ns: int, /) -> int: ...
    def dequeue(self, count: int, index: int, tickets: int, timeout_ns: int, /) -> int: ...
    def release(self, timeout_ns: int, /) -> int: ...
    def set_limits(
        self,
        limits: int,
        samples_per_insert: float,
        error_buffer: float,
        min_size: int,
        max_times_sampled: int,
        when_no_peer: int,
        max_staleness: int,
        items_per_version: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def reserve(
        self, rows: int, nbytes: int, expires_ns: int, id_: int, name: int, timeout_ns: int, /
    ) -> int: ...
    def select_reservation(self, name: int, versions: int, young: int, count: int, /) -> None: ...
    def cancel_reservation(self, name: int, timeout_ns: int, /) -> int: ...
    def note_partial(self, name: int, timeout_ns: int, /) -> int: ...
    def partial_is_done(self, id_: int, forget: bool, timeout_ns: int, /) -> int: ...
    def count_refused(self, elements: int, /) -> None: ...
    def find_queue_reason(self, entry: int, side: int, timeout_ns: int, /) -> int: ...
    def stop_waiting(self, timeout_ns: int, /) -> int: ...
    def write_records(
        self,
        data: int,
        nbytes: int,
        starts: int,
        sizes: int,
        count: int,
        outside: int,
        each: int,
        priorities: int,
        streams: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def place_records(
        self,
        slots: int,
        data: int,
        nbytes: int,
        starts: int,
        sizes: int,
        count: int,
        outside: int,
        each: int,
        priorities: int,
        in_place: bool,
        tickets: int,
        accepted: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def sample_records(
        self,
        count: int,
        key: int,
        data: int,
        room: int,
        starts: int,
        sizes: int,
        positions: int,
        index: int,
        tickets: int,
        weights: int,
        beta: float,
        prioritized: bool,
        timeout_ns: int,
        /,
    ) -> int: ...
    def read_records(
        self,
        index: int,
        count: int,
        data: int,
        room: int,
        starts: int,
        sizes: int,
        positions: int,
        tickets: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def read_span(self, timeout_ns: int, /) -> tuple[int, int, int] | int: ...
    def finish_records_snapshot(
        self,
        start: int,
        data: int,
        room: int,
        tickets: int,
        extents: int,
        sources: int,
        raw: int,
        timeout_ns: int,
        /,
    ) -> tuple[int, int, float, int, int] | int: ...
    def relink(self, slots: int, count: int, /) -> int: ...
    def compute_checksum(self, slot: int, ticket: int, /) -> int: ...
    def verify(self, first: int, count: int, /) -> list[int]: ...
    def seal(self, first: int, count: int, /) -> None: ...
    def rebuild(self) -> None: ...
    blocker: tuple[int, int, int, bool]
    head: int
    write_count: int
    length: int
    state: int
    prioritized: int
    incarnation: int
    limits: int
    queued: int
    waits_for: int
    why: int
    last_writer: int
    bad_at: int
    needed: int
    drawn_from: tuple[float, float, float, int] | None
    byte_head: int
    byte_tail: int
    max_priority: float
    alpha: float
    eps: float
    total: float
    least: float

def split_planes(
    from_: int, sizes: int, planes: int, to: int, count: int, base: int = ..., /
) -> None: ...
def join_planes(
    from_: int, sizes: int, planes: int, to: int, count: int, base: int = ..., /
) -> None: ...
def move_pieces(from_: int, sizes: int, to: int, count: int, base: int = ..., /) -> None: ...
def measure_records(
    steps: int,
    code: int,
    code_bytes: int,
    numbers: int,
    sizes: int,
    count: int,
    offsets: int,
    starts: int,
    ends: int,
    stored: int,
    /,
) -> int: ...
def lay_out_records(
    steps: int,
    code: int,
    code_bytes: int,
    numbers: int,
    sizes: int,
    count: int,
    offsets: int,
    starts: int,
    ends: int,
    outside: int,
    addresses: int,
    data: int,
    /,
) -> None: ...
def build_record(
    steps: int, code: bytes, dims: list[int], pieces: list[Any], /
) -> tuple[bytearray, int] | None: ...
def distribute_pieces(
    base: int,
    held: int,
    pieces: int,
    numbers: int,
    width: int,
    offsets: int,
    stored: int,
    expanded: int,
    count: int,
    to: int,
    of_each: bool,
    out: int,
    room: int,
    frames: int,
    parts: int,
    /,
) -> tuple[int, int]: ...
def group_frames(
    whole: int,
    frames: int,
    frame: int,
    before: int,
    nbytes: int,
    to: int,
    planes: int,
    parts: int,
    most: int,
    woven: int,
    at: int,
    out: int,
    /,
) -> int: ...
def deinterleave(into: int, other: int, half: int, frames: int, /) -> None: ...
def check_frames(at: int, stored: int, count: int, whole: int, dictionary: int, /) -> bool: ...
def join_pieces(at: int, sizes: int, first: int, end: int, step: int, /) -> bytes: ...
def make_views(addresses: int, sizes: int, count: int, /) -> list[memoryview]: ...
def locate_buffers(found: Sequence[Any], addresses: int, sizes: int, /) -> None: ...
def address(one: Any, /) -> int: ...
def register_arrays(single: Any, wide: Any, integer: Any, /) -> None: ...
def register_tensors(kind: type, /) -> None: ...
def fence() -> None: ...
def limiter(runtime: Any, /) -> bytes | None: ...
def compare_pieces(one: int, other: int, nbytes: int, count: int, out: int, /) -> None: ...
def locate_pieces(
    data: int,
    nbytes: int,
    starts: int,
    sizes: int,
    count: int,
    steps: int,
    code: int,
    code_bytes: int,
    numbers: int,
    offsets: int,
    stored: int,
    expanded: int,
    /,
) -> bool | None: ...
def tree_update(tree: int, size: int, whole: bool, elements: int, count: int, /) -> None: ...
def tree_query(
    tree: int, size: int, least: bool, first: int, end: int, out: int, count: int, /
) -> None: ...
def tree_lower_bound(tree: int, size: int, sums: int, out: int, count: int, /) -> None: ...
def crc32c(data: Any, crc: int = ...) -> int: ...
def powers(raw: Any, eps: float, alpha: float, out: Any) -> None: ...
def format_mutex(control: Map, /) -> None: ...
def mutex_owner(control: Map, /) -> int: ...
def consumer_version(control: Map, change: int, value: int, /) -> int: ...
def arm(
    name: str, action: str = ..., after: int = ..., notify_fd: int = ..., wait_fd: int = ...
) -> None: ...
def disarm() -> None: ...
def threads() -> int: ...
def set_threads(threads: int, /) -> None: ...
def reached(name: str, /) -> None: ...
def crash_points() -> list[str]: ...
def layout() -> dict[str, int]: ...
def sections(
    capacity: int, lanes: int, records: bool = ..., wholes: int = ..., /
) -> dict[str, int]: ...
def parts(capacity: int, /) -> dict[str, int]: ...
def publish(
    weights: Map, copies: int, nbytes: int, pieces: int, count: int, step: int, /
) -> int: ...
def read_newest(
    weights: Map, copies: int, nbytes: int, than: int, out: Any, /
) -> tuple[int, int, int, int] | int: ...
def close_in_child() -> None: ...
def begin_process() -> int: ...
def set_boot_offset(ns: int, /) -> None: ...
def boot_ns() -> int: ...

class Intake:
    def __init__(
        self,
        ring: Ring,
        tree: Any,
        forms: tuple[tuple[tuple[int, ...], Any, Any, Any], ...],
        tensors: bool,
        box: type,
        inside: str,
        priority: int | str | None,
        timeout_ns: int,
    ) -> None: ...
    def add(self, item: Any, streams: Any, /) -> int | None: ...
    def extend(self, batch: Any, streams: Any, /) -> Any: ...

class Outtake:
    def __init__(
        self,
        ring: Ring,
        examples: tuple[Any, ...],
        tensors: type,
        steps: int = 1,
        stacks: tuple[int, ...] = ...,
    ) -> None: ...
    def sample(self, count: int, key: int, beta: float | None, timeout_ns: int, /) -> Any: ...
    def copy(self, index: int, tickets: int, count: int, timeout_ns: int, /) -> Any: ...
    def draw(
        self,
        count: int,
        key: int,
        beta: float | None,
        timeout_ns: int,
        trajectories: Trajectories,
        follower: Follower,
        addresses: tuple[int, ...] = ...,
        /,
    ) -> Any: ...
    def fill(
        self, index: int, tickets: int, count: int, timeout_ns: int, addresses: tuple[int, ...], /
    ) -> Any: ...

class Follower:
    def __init__(self, ring: Ring, /) -> None: ...
    def poll(self) -> tuple[bool, bytes, bytes] | None: ...
    def next(self, slots: int, reach: int, room: int, /) -> int: ...
    def read_flags(
        self, elements: int, count: int, steps: int, shown: int, n_shown: int, tickets: int, /
    ) -> bool: ...
    def read_reach(self, slots: int, count: int, reach: int, /) -> None: ...
    def forget(self) -> None: ...
    seen: int
    settled: int
    overwritten: int
    pending: int
    def report_in_order(self) -> None: ...

class Labels:
    def __init__(self, elements: int, limit: int, by_age: bool, /) -> None: ...
    def clear(self) -> None: ...
    def drop(self, elements: int, count: int, /) -> None: ...
    def mark_absent(self, elements: int, count: int, /) -> None: ...
    def put(self, elements: int, labels: int, count: int, first: int, now: int, /) -> None: ...
    def settle(self, follower: Follower | None, /) -> None: ...
    def follow(
        self,
        follower: Follower,
        labels: int,
        nbytes: int,
        kind: str,
        values: int,
        count: int,
        value_bytes: int,
        value_kind: str,
        means: int,
        steps: bytes,
        code: bytes,
        piece: int,
        now: int,
        /,
    ) -> int | None: ...
    def give_up(self, before: int, /) -> None: ...
    def count_missing(self, element: int, /) -> int: ...
    def give_up_one(self, element: int, /) -> None: ...
    def mark_claimed(self, elements: int, count: int, claimed: int, /) -> None: ...
    def order(self) -> tuple[bytes, bytes]: ...
    def draw(self, weights: int, key: int, count: int, again: int, out: int, /) -> None: ...
    def draw_fresh(
        self,
        follower: Follower,
        version: int,
        most: int,
        key: int,
        count: int,
        out: int,
        staleness: int,
        tickets: int,
        /,
    ) -> bool | None: ...
    def list_freshest(self, weights: int, count: int, out: int, /) -> int: ...
    def read(self, elements: int, count: int, out: int, /) -> None: ...
    def read_groups(self, elements: int, count: int, out: int, /) -> None: ...
    def choose(self, key: int, of: int, count: int, out: int, /) -> None: ...
    def read_sizes(self, numbers: int, count: int, out: int, /) -> None: ...
    def read_members(self, numbers: int, count: int, width: int, out: int, /) -> None: ...
    def choose_members(
        self, numbers: int, count: int, width: int, key: int, out: int, /
    ) -> int: ...
    def read_tickets(self, follower: Follower, elements: int, count: int, out: int, /) -> bool: ...
    def take_lost(self) -> bytes: ...
    def record_lost(self) -> None: ...
    items: int
    marked: int
    open: int
    withdrawn: int
    given_up: int

class Trajectories:
    def __init__(self, slots: int, width: int, /) -> None: ...
    def clear(self) -> None: ...
    def drop(self, slots: int, count: int, /) -> None: ...
    def find_predecessors(
        self, slots: int, sources: int, reach: int, count: int, out: int, /
    ) -> None: ...
    def append(self, slots: int, sources: int, cuts: int, count: int, settled: int, /) -> None: ...
    def insert(
        self, elements: int, sources: int, ids: int, steps: int, count: int, /
    ) -> tuple[int, int] | None: ...
    def list_neighbours(
        self, slots: int, sources: int, count: int, items: int, before: int, /
    ) -> int | None: ...
    def cut(self, slots: int, cuts: int, count: int, /) -> None: ...
    def count_long(self, least: int, /) -> int: ...
    def list_firsts(self, numbers: int, count: int, out: int, from_: int, /) -> None: ...
    def list_items(self, numbers: int, count: int, out: int, from_: int, /) -> None: ...
    def find_rows(self, elements: int, count: int, out: int, /) -> None: ...
    def find_elements(self, rows: int, count: int, out: int, /) -> None: ...
    def read_lengths(self, trajectories: int, count: int, out: int, /) -> None: ...
    count: int
    items: int
    moved: int
    longest: int
    def cut_by(self, windows: Windows, /) -> None: ...
    def claim_windows(self, count: int, newest: int, firsts: int, /) -> int: ...
    def follow(
        self, follower: Follower, cuts: int, n_cuts: int, /
    ) -> int | tuple[bool, bytes, bytes] | None: ...
    def read_windows(self, count: int, newest: int, out: int, /) -> int: ...
    def draw_slices(
        self, which: int, begins: int, count: int, steps: int, from_: int, out: int, /
    ) -> bool: ...
    def read_histories(
        self,
        follower: Follower | None,
        elements: int,
        drawn: int,
        count: int,
        steps: int,
        out: int,
        tickets: int,
        /,
    ) -> bool: ...
    def list_used(self, tickets: int, waiting: bool, /) -> None: ...

class Windows:
    position: tuple[int, int]
    waiting: int
    seen: int
    def __init__(self, ring: Ring, steps: int, /) -> None: ...
    def take_back(self, next_: int, lost: int, /) -> None: ...
    def mark_used(self, elements: int, count: int, below: int, /) -> None: ...
