"""The simulation notices an engine that omits a single step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shmbuffer.memory.directory import made
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import slots
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import flush, recovery
from tests.power import scripts
from tests.power.simulation import Simulation, apart

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a step that is left out."""


def no_item_is_verified(patch: pytest.MonkeyPatch) -> None:
    def trust(repair: Any, *_: object) -> tuple[int, int]:
        words = repair.live.words
        tickets = slots.tickets(words[words != 0]).tolist()
        head = repair.control.runtime["head"]
        head[0] = max([int(head[0]), *(ticket + 1 for ticket in tickets)])
        return 0, 0

    patch.setattr(recovery.Repair, "_verify", trust)


def the_superblock_is_written_first(patch: pytest.MonkeyPatch) -> None:
    right = flush._raise

    def wrong(seat: Seat, snapshot: bytes) -> None:
        assert seat.mapped is not None
        right(with_maps(seat, SimpleNamespace(sync=nothing), []), snapshot)
        for mapping in seat.mapped.maps:
            mapping.sync()

    patch.setattr(flush, "_raise", wrong)


def leaves_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    right = flush._raise

    def wrong(seat: Seat, snapshot: bytes) -> None:
        assert seat.mapped is not None
        right(with_maps(seat, seat.mapped.slots, []), snapshot)

    patch.setattr(flush, "_raise", wrong)


def with_maps(seat: Seat, slots_map: Any, leaves: list[Any]) -> Seat:
    """Returns a copy of the seat with these maps, for a flush."""
    assert seat.mapped is not None
    other = copy.copy(seat)
    other.mapped = seat.mapped._replace(slots=slots_map, leaves=leaves)
    return other


def directories_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "sync", nothing)


def contents_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "sync_file", nothing)


def superblocks_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Overwrites a copy of the superblock although the other one may not be on the disk yet."""
    right = Control.write

    def write(control: Control, superblock: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Control, "sync", nothing)
            return right(control, superblock)

    patch.setattr(Control, "write", write)


def sizes_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Files, "_sync_sizes", nothing)


def claims_of_an_older_page_are_finished(patch: pytest.MonkeyPatch) -> None:
    right = recovery.Repair._reap_all
    patch.setattr(recovery.Repair, "_reap_all", lambda repair, **_: right(repair, finishing=True))


def names_are_not_synced_in_time(patch: pytest.MonkeyPatch) -> None:
    """Files that made.json lists may come back after made.json was removed."""
    right = made.remove

    def remove(directory: Directory) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Directory, "sync", nothing)
            right(directory)

    patch.setattr(made, "remove", remove)


Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    ("mutant", "script", "kind", "at", "found"),
    [
        (no_item_is_verified, scripts.writes, "rows", "write.commit$", "torn|never written"),
        (no_item_is_verified, scripts.writes, "records", "write.commit$", "torn|the record of"),
        (the_superblock_is_written_first, scripts.writes, "rows", "superblock", "are missing"),
        (leaves_are_not_synced, scripts.writes, "records", "mark", "covered items are missing"),
        (directories_are_not_synced, scripts.writes, "rows", "mark", "missing|gone|already"),
        (contents_are_not_synced, scripts.writes, "rows", "rename", "the file has"),
        (superblocks_are_not_synced, scripts.changes, "rows", "superblock", "both copies"),
        (sizes_are_not_synced, scripts.writes, "rows", "superblock", "the file has 0 bytes"),
        (claims_of_an_older_page_are_finished, scripts.changes, "rows", "empty", "missing|dropped"),
        (names_are_not_synced_in_time, scripts.removed, "rows", "unlink", "is there already"),
    ],
)
def test_an_engine_that_leaves_out_a_step_is_found_out(
    mutant: Mutant, script: scripts.Script, kind: str, at: str, found: str
) -> None:
    def run() -> dict[str, int]:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            return dict(Simulation(kind, 1, images=6, worst=8, used=0.5, at=at).run(script))

    with pytest.raises(AssertionError, match=rf"step \d+.*image.*({found})"):
        apart(run)
