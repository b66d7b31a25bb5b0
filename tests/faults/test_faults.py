"""Any failing libc call on a buffer's files gives a clear error, without a leak or data loss.

The default run plays some faults of each scenario, drawn with a fixed seed, and more with `--full`.
campaign.py plays all of them. The invariants are in runner.py and in the scenarios.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer import SpaceError
from tests.faults.broken_scenarios import SCENARIOS as BROKEN
from tests.faults.injector import Call, Fault, faults_at
from tests.faults.runner import what_is_wrong_with
from tests.faults.scenarios import SCENARIOS
from tests.faults.sweep import destination, is_of_no_consequence
from tests.faults.sweeper import Sweeper
from tests.faults.upkeep import Sweep

SEED = 1
CASES, MORE_CASES = 1, 6


@pytest.fixture(scope="module")
def sweeper() -> Iterator[Sweeper]:
    with Sweeper("--broken") as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_is_an_error_that_says_where_and_nothing_is_lost(
    sweeper: Sweeper, name: str, full: bool
) -> None:
    sweeper.sweep(name, "rows", count=MORE_CASES if full else CASES, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Define", "Attach", "Recover", "Dictionary", "Inspect"])
def test_it_is_the_same_where_items_are_records(sweeper: Sweeper, name: str, full: bool) -> None:
    sweeper.sweep(name, "records", count=MORE_CASES if full else CASES, seed=SEED)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("kind", ["rows", "records"])
def test_an_allocation_that_fails_in_the_hot_calls_leaves_the_buffer_whole(
    sweeper: Sweeper, kind: str
) -> None:
    found = sweeper.sweep("Use", kind)
    assert found.kinds == ["malloc"], "the hot calls touch files"
    assert found.refused == found.cases


# Faults that once had a wrong effect, by the calls on which they were injected.


@pytest.mark.full
@pytest.mark.slow
def test_a_boot_id_that_cannot_be_read_loses_nothing(sweeper: Sweeper) -> None:
    """A buffer in use was once recovered because its boot id could not be read."""
    sweeper.sweep("Recover", "rows", on=r"^(open|read) /proc/sys/kernel/random/boot_id")


@pytest.mark.full
@pytest.mark.slow
def test_a_definition_that_cannot_be_synced_is_undone(sweeper: Sweeper) -> None:
    """Files that the superblock still named were once removed when a process died here."""
    sweeper.sweep("DefineAndDie", "rows", on="^msync")


@pytest.mark.slow
def test_a_dictionary_that_was_being_written_is_removed_with_the_buffer(sweeper: Sweeper) -> None:
    """The temporary file of the dictionary once stayed, so the directory was not removed."""
    sweeper.sweep("Dictionary", "records", on=r"^rename .*/dictionary\.\w+\.tmp", count=8)


@pytest.mark.full
@pytest.mark.slow
def test_an_error_of_close_loses_no_descriptor_and_closes_none_twice(sweeper: Sweeper) -> None:
    sweeper.sweep("Attach", "rows", on=r"^close .*/(slots|next)$", count=8)
    sweeper.sweep("Anonymous", "rows", on="^close /memfd")


@pytest.mark.full
@pytest.mark.slow
def test_a_temporary_directory_that_cannot_be_listed_keeps_no_buffer_from_starting(
    sweeper: Sweeper,
) -> None:
    sweeper.sweep("Create", "rows", on="^opendir .*/tmp$")


@pytest.mark.full
@pytest.mark.slow
def test_a_file_that_cannot_be_looked_at_is_closed_again(sweeper: Sweeper) -> None:
    sweeper.sweep("Attach", "rows", on=r"^fstat .*/(init\.lock|slots)$", count=8)


@pytest.mark.slow
def test_a_recovery_that_cannot_look_at_its_slots_says_so(sweeper: Sweeper) -> None:
    """The error about the unknown size of the slots file once did not name the file."""
    sweeper.sweep("RecoverCopy", "rows", on=r"^fstat .*/slots$", only=".*ESTALE once, dies")


# The checks


@pytest.mark.parametrize(("name", "said"), [(one.__name__, said) for one, said in BROKEN.items()])
def test_a_run_that_misbehaves_after_a_fault_is_caught(
    sweeper: Sweeper, name: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        sweeper.sweep(name, "rows", on=r"^create .*/init\.lock", only=r"call \d+: EIO once, stays")


def test_an_error_has_to_be_one_of_ours_or_say_where() -> None:
    folder = Path("/dev/shm/somewhere")
    assert what_is_wrong_with(SpaceError("the disk is full"), folder) is None
    assert what_is_wrong_with(OSError(5, "broken", f"{folder}/control"), folder) is None
    assert what_is_wrong_with(OSError(5, "broken"), folder) is not None
    assert what_is_wrong_with(OSError(5, "broken", "control"), folder) is not None
    for foreign in (ValueError("x"), TypeError("x"), KeyError("x"), RuntimeError("x")):
        assert what_is_wrong_with(foreign, folder) is not None


def test_a_fault_without_an_error_changes_nothing() -> None:
    here = "/dev/shm/shmbuffer-faulted-abcdefgh"
    broken, again = Fault(0, errno.EIO, sticky=False), Fault(0, errno.EINTR, sticky=False)
    create = SCENARIOS["Create"]
    for kind, path in (("fsync", "buffer/control"), ("open", "buffer"), ("flock", "buffer/x.lock")):
        call = Call(kind, f"{here}/{path}")
        assert not is_of_no_consequence(broken, call, call.path, create)
        assert is_of_no_consequence(again, call, call.path, create)
    assert is_of_no_consequence(broken, Call("fsync", here), here, create)
    removed = Call("unlink", f"{here}/tmp/x")
    assert is_of_no_consequence(broken, removed, removed.path, Sweep)
    assert not is_of_no_consequence(broken, removed, removed.path, create)


def test_a_step_on_the_way_to_a_file_counts_for_the_file() -> None:
    folder, lock = "/buffer/.shmbuffer", "/buffer/.shmbuffer/procs/000.lock"
    calls = [Call("open", folder), Call("fstat", folder), Call("open", lock), Call("close", folder)]
    assert [destination(calls, at) for at in range(4)] == [lock, lock, lock, folder]
    step = Call("open", folder)
    broken = Fault(0, errno.EIO, sticky=False)
    assert is_of_no_consequence(broken, step, lock, SCENARIOS["Create"])
    assert not is_of_no_consequence(broken, step, f"{folder}/slots", SCENARIOS["Create"])


def test_nothing_waits_for_ever_for_a_fault_that_goes_on() -> None:
    sticky = {fault.error for fault in faults_at(0, Call("flock", "lock")) if fault.sticky}
    assert errno.ENOLCK in sticky
    assert not sticky & {errno.EINTR, errno.EAGAIN}
