"""Between two stores to shared memory there is a crash point, on each path in the sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import shmbuffer
from shmbuffer._native import _core
from tests.crash.sources import c, python
from tests.crash.sources.flow import Reading, Step, points_of, without

PACKAGE = Path(shmbuffer.__file__).parent
MEMORY = PACKAGE / "memory"
#: Modules that store only to private memory, or to a directory that no other process opens.
PRIVATE_STORES = {
    *MEMORY.glob("record_format/*.py"),
    MEMORY / "system/private_copy.py",
    MEMORY / "upkeep/copied_buffer.py",
    MEMORY / "upkeep/snapshot.py",
}
CORE = c.read(sorted((PACKAGE / "_native").glob("*/*.c")))
FLOOR = python.read(
    [
        *sorted({*MEMORY.rglob("*.py")} - PRIVATE_STORES),
        PACKAGE / "saves/file_tree.py",
        PACKAGE / "saves/publication.py",
        PACKAGE / "saves/work_directory.py",
    ]
)
SOURCES = pytest.mark.parametrize("functions", [CORE, FLOOR], ids=["C", "Python"])

#: Points that mark the end of a step. Every store before them has a point of its own.
MILESTONES = {
    *("abort_locked", "empty_locked", "write_locked", "write_relocked", "update_locked"),
    *("reap_locked", "sample_locked", "write_claim_parents", "write_commit_parents"),
    *("update_parents", "alpha_leaves", "alpha_parents", "empty_parents", "reap_parents"),
    *("repair_claims", "repair_leaves", "repair_parents", "reap_leaf", "empty_leaf"),
    *("write_claimed", "write_done", "update_unlocked", "reap_unlocked", "empty_unlocked"),
    *("sample_drawn", "sample_unlocked", "sample_copy", "sample_validate", "leave_claim"),
    *("weights_looked", "weights_taken"),
}


#: Variables and members that point to private memory.
PRIVATE = """
AT NUMBERS absent_elements acked action addresses all applied arena armed at available b before
book bool branch buffer by_age bytes c call candidate capacity changed choice claimed_slots
classes code const copy count counted counted_draw counters counts d delivered dense done double
draw draws dropped elements end entry entry_index existing expected_sizes expires_ns f failed
faults file find_entry first first_capacity flags float form frames freed from front gate group
half head holes id index info input int64_t item items key label labels lane last lease_id leaves
ledger limit locks loose lost map marked marks mask me means memory missing more n n_equal
n_numbers n_pieces nbytes next note now number numbers object offsets oldest one order out owner
pair pairs parsed part parts passes place plan pool powers presence priorities python random
record records redrawn release request reservation restarted result ring root rounded rows run
runs same_dims second seen self serial sets shmb_follower_in shmb_labels_in shmb_refusal
shmb_selected_reservation since sizes slot slots sorted source stacks status step step_tickets
steps stored streams struct stuck sums swapped table target tensor ticket tickets to token_page
touched tree uint64_t upto values version w wanted was_delivered where why width windows_of with
word words x
"""


def gaps(functions: Mapping[str, Step]) -> list[str]:
    return sorted(map(str, Reading(functions).everything().gaps))


@SOURCES
def test_between_two_stores_to_shared_memory_there_is_a_crash_point(
    functions: Mapping[str, Step],
) -> None:
    assert gaps(functions) == []


@SOURCES
def test_a_crash_point_that_is_removed_is_missed(functions: Mapping[str, Step]) -> None:
    missed, unnoticed, reading = set[str](), set[str](), Reading(functions).everything()
    for name, steps in functions.items():
        for number, point in enumerate(points_of(steps)):
            found = reading.changed(name, without(steps, number)).gaps
            (missed if found else unnoticed).add(point)
    if functions is CORE:
        assert unnoticed == MILESTONES
    else:
        assert {"superblock.half", "superblock.stored", "join.identity", "file.made"} <= missed
        assert len(missed) >= 54


def test_the_reader_sees_every_kind_of_store() -> None:
    reading = Reading(CORE).everything()
    stored = {store.what for store in reading.stores}
    assert stored >= {
        "me->kind",
        "&me->phase (atomic_store_explicit)",
        "&ring->runtime->waiters (atomic_fetch_sub)",
        "ring->tree.mass[e]",
        "arrays.node_sums[node]",
        "*header_at(ring,position)",
        "ring->extents[slot]",
        "memcpy to base+slot*bytes",
        "runtime->max_priority",
        "pthread_mutex_unlock",
        "the mutex is taken",
    }
    assert len(reading.stores) >= 115
    assert {name.replace(".", "_") for name in _core.crash_points()} == reading.points


def test_what_the_reader_takes_for_private_is_private() -> None:
    """A new name in this list needs a decision: is the memory behind it shared?"""
    assert c.private_targets(sorted((PACKAGE / "_native").glob("*/*.c"))) == set(PRIVATE.split())


def test_the_reader_of_python_sees_every_kind_of_store() -> None:
    reading = Reading(FLOOR).everything()
    stored = "\n".join(store.what for store in reading.stores)
    for one in (
        "self._bytes[at:at + half]",
        "control.runtime['state']",
        "self.live.words[piece][which]",
        "self.live.raw[where][wrong]",
        "own_entry[name]",
        "os.mkdir",
        "os.rename",
        "os.unlink",
        "posix_fallocate",
        "os.pwrite",
        "_core.format_mutex",
        "self.native.rebuild()",
    ):
        assert one in stored, one
    assert len(reading.stores) >= 80


C_SNIPPETS = {
    "one after the other": "me->kind = 1; CP(a); runtime->alpha = 2; me->kind = 3;",
    "in a loop": "for (int i = 0; i < 3; i++) ring->words[i] = 0;",
    "on one of two ways": "me->kind = 1; if (x) CP(a); runtime->eps = 1;",
    "before a call": "me->kind = 1; other(ring);",
    "in an operand": "CP(a); x = x && atomic_fetch_add(&runtime->head, 1) && lock(ring);",
    "at the end": "me->kind = 1;",
    "over a jump": "me->kind = 1; if (x) goto out; CP(a); out: me->kind = 2;",
    "through a local": "double *p = ring->raw; p[0] = 1; p[1] = 2;",
    "through a local, in a loop": "double *p = ring->raw; for (int i = 0; i < 3; i++) p[i] = 0;",
    "by an increment": "me->kind++; me->kind++;",
    "after a lock": "lock(ring); me->kind = 2;",
    "in a switch": "switch (x) { case 1: me->kind = 1; case 2: me->kind = 2; }",
    "after a break": "while (x) { me->kind = 1; if (y) break; CP(a); } me->kind = 3;",
}


@pytest.mark.parametrize("name", C_SNIPPETS)
def test_a_store_without_a_point_is_found_in_c(name: str) -> None:
    body = C_SNIPPETS[name]
    known = "void other(struct shmb_ring *ring) { CP(b); ring->me->kind = 9; CP(b); } int lock() {}"
    head = "void f(struct shmb_entry *me, struct shmb_runtime *runtime, struct shmb_ring *ring)"
    if name == "before a call":
        known = known.replace("CP(b); ring", "ring")
    assert gaps(c.read_texts({"f.c": f"{known}\n{head} {{ {body} }}"}))


def test_points_between_all_stores_are_enough_in_c() -> None:
    text = """
    static int other(struct shmb_ring *ring) { ring->me->kind = 9; CP(b); return 0; }
    int f(struct shmb_entry *me, struct shmb_ring *ring) {
        int x = 0, local[3]; /* me->kind = 1; me->kind = 2; */
        local[0] = 1, local[1] = 2;
        for (int i = 0; i < 3; i++) {
            if (i == 1) continue;
            ring->words[i] = 0;
            CP(a);
        }
        do { me->kind = 1; CP(c); } while (other(ring));
        ring->claimed = true; ring->needed = 1;
        if (x) return other(ring);
        memcpy(local, me, sizeof local);
        return x ? other(ring) : 0;
    }"""
    assert gaps(c.read_texts({"f.c": text})) == []


def test_a_pointer_into_shared_memory_that_is_handed_on_is_refused() -> None:
    text = "void g(double *p) { *p = 1; } void f(struct shmb_ring *ring) { g(ring->raw); }"
    with pytest.raises(NotImplementedError, match=r"f\.c:1: ring->raw is handed to g"):
        c.read_texts({"f.c": text})


PYTHON_SNIPPETS = {
    "one after the other": "runtime['a'] = 1; runtime['b'] = 2",
    "in a loop": "for name in names:\n    runtime[name] = 1",
    "on one of two ways": "runtime['a'] = 1\nif x:\n    _core.reached('a')\nos.unlink(x)",
    "of the core": "os.rename(a, b); native.rebuild()",
    "at the end": "os.mkdir(a)",
    "in an augmented assignment": "self.words |= 3; _core.reached('a'); self.words[x] = 1",
    "in a with": "with suppress(OSError):\n    path.unlink()\nos.rmdir(x)",
    "after a break": "while 1:\n    os.unlink(x)\n    if y:\n        break\n    _core.reached('a')",
    "by a fill": "self.raw.fill(0)",
}


@pytest.mark.parametrize("name", PYTHON_SNIPPETS)
def test_a_store_without_a_point_is_found_in_python(name: str) -> None:
    body = PYTHON_SNIPPETS[name].replace("\n", "\n    ")
    assert gaps(python.read_texts({"m": f"def f():\n    {body}\n"}))


def test_the_points_of_a_function_are_found_where_it_is_called() -> None:
    text = "def g():\n    os.mkdir(x)\n    _core.reached('a')\ndef f():\n    g()\n    g()\n"
    functions = python.read_texts({"m": text})
    assert gaps(functions) == []
    assert gaps({**functions, "m.g": without(functions["m.g"], 0)})
    assert points_of(functions["m.g"]) == ["a"]
