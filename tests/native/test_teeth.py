"""The checks of the stress program find faults that are put into the core."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.native.conftest import Folder
from tests.native.program import FoundError, build, run
from tests.native.scenarios import SCENARIOS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """Edits of the core, and the checks that must find them."""

    flavour: str
    scenario: str
    shows_as: str
    edits: tuple[tuple[str, str, str], ...]


RACE = r"ThreadSanitizer: data race"

FAULTS = {
    "priorities are updated without the mutex": Fault(
        "thread",
        "rows",
        RACE,
        (
            (
                "priorities",
                "        status = shmb_lock(ring, call);\n"
                "        if (status != SHMB_OK) break;\n"
                "        CP(update_locked);",
                "",
            ),
            ("priorities", "        shmb_unlock(ring);\n        CP(update_unlocked);", ""),
        ),
    ),
    "a slot is claimed while its writer fills it": Fault(
        "thread",
        "rows",
        rf"{RACE}|FAILED",
        (
            (
                "slots",
                "if (__builtin_expect(SHMB_STATE(word) != SHMB_WRITING, 1)) return false;",
                "if (SHMB_STATE(word) <= SHMB_ABORTED) return false;",
            ),
        ),
    ),
    "an item is committed before its bytes are visible": Fault(
        "thread",
        "written once",
        RACE,
        (
            (
                "commit",
                "atomic_store_explicit(&words[row], committed, SYNC_SLOT_COMMIT_RELEASE);",
                "atomic_store_explicit(&words[row], committed, memory_order_relaxed);",
            ),
        ),
    ),
    "a reader looks at the word before the bytes only": Fault(
        "thread",
        "rows",
        "FAILED: .* is not what was written",
        (
            (
                "sample",
                "bool holds = shmb_still_holds(",
                "bool holds = true || shmb_still_holds(",
            ),
        ),
    ),
    "a half written item of the dead is committed": Fault(
        "thread",
        "rows and deaths",
        "FAILED: .* is not what was written",
        (
            (
                "repair",
                "(phase == SHMB_COMMITTING ? roll_forward : roll_back)",
                "(phase >= SHMB_PAYLOAD ? roll_forward : roll_back)",
            ),
        ),
    ),
    "a tree is left as its dead owner had it": Fault(
        "thread",
        "rows and deaths",
        "FAILED: .*check: ",
        (
            ("repair", "    shmb_ring_leaves(ring);\n", ""),
            (
                "repair",
                "    if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed)) "
                "shmb_ring_parents(ring);\n    CP(repair_parents);",
                "",
            ),
        ),
    ),
    "a gate that lets two threads through": Fault(
        "thread",
        "one handle",
        rf"{RACE}|FAILED",
        (
            (
                "gate",
                "    if (!atomic_compare_exchange_strong(&gate->thread, &inside, me)) {",
                "    if (atomic_exchange(&gate->thread, me) == me) {",
            ),
        ),
    ),
    "an acknowledgement is taken from one who has lost the item": Fault(
        "thread",
        "consumed, and deaths",
        "FAILED: .* is acknowledged by two|FAILED: .* is given again",
        (("ledger", "SHMB_LEASE_OF(what) != id || ", ""),),
    ),
    "items of the dead that are taken are left out of their lease": Fault(
        "thread",
        "consumed, and deaths",
        "FAILED: .* was given to nobody|FAILED: .* the floor stays behind|FAILED: .* of the ledger",
        (
            (
                "ledger",
                "            bool first = lease->left++ == 0;",
                "            bool first = true;",
            ),
        ),
    ),
    "weights are the newest before their bytes are visible": Fault(
        "thread",
        "weights, each copy once",
        RACE,
        (
            (
                "weights",
                "atomic_store_explicit(&page->newest, version, SYNC_WEIGHTS_SET_RELEASE);",
                "atomic_store_explicit(&page->newest, version, memory_order_relaxed);",
            ),
        ),
    ),
    "a reader of weights looks at their stamp before the bytes only": Fault(
        "thread",
        "weights",
        "FAILED: .*newest: status",
        (
            (
                "weights",
                "        CP(weights_taken);\n"
                "        atomic_thread_fence(SYNC_WEIGHTS_REUSE_ACQUIRE);\n"
                "        if (!holds(page, version)) continue;\n",
                "",
            ),
        ),
    ),
    "a priority is written beyond the last slot": Fault(
        "address",
        "rows and deaths",
        "AddressSanitizer|UndefinedBehavior|runtime error",
        (
            (
                "priorities",
                "        status = shmb_lock(ring, call);\n        if (status != SHMB_OK) break;",
                "        status = shmb_lock(ring, call);\n"
                "        ((volatile double *)masses)[LOCKED_UPDATES] = 0;",
            ),
        ),
    ),
}


@pytest.mark.product(few=2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_core_is_found(folder_of: Folder, name: str) -> None:
    fault = FAULTS[name]
    program = build(fault.flavour, folder_of(fault.flavour), fault.edits)
    with pytest.raises(FoundError) as found:
        run_with_seeds(fault, program)
    assert re.search(fault.shows_as, str(found.value))


def run_with_seeds(fault: Fault, program: Path) -> None:
    for seed in range(1, 25):
        run(fault.flavour, program, *SCENARIOS[fault.scenario], "--seed", str(seed))
