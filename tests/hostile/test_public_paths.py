"""Every public call that takes a path, in directories that another user has prepared.

The traps are links, FIFOs, sockets, devices, other kinds of files, other owners, names of other
programs, and permissions. They take the place of the path, and of each name that the call uses.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage.trials import failures, require_all
from tests.hostile import traps
from tests.hostile.calls import ROWS, TABLE, Call, missing
from tests.hostile.campaign import campaign, drawn
from tests.hostile.discovery import path_parameters, unannotated
from tests.hostile.trial import Trap, Trial, judge, places
from tests.kit.programs import needs_root

FILE = "tests/hostile/test_public_paths.py"
TRAPS = (
    *traps.IN_PLACE,
    *traps.AROUND,
    *(pytest.param(name, marks=needs_root) for name in traps.ROOT_IN_PLACE),
    *(pytest.param(name, marks=needs_root) for name in traps.ROOT_AROUND),
)


@pytest.fixture(autouse=True)
def _scenes_are_removed(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hostile.trial.scenes", fast_path)


def test_every_public_path_has_a_row_that_says_how_to_call_it() -> None:
    found = {str(parameter) for parameter in path_parameters()}
    rows = {row.partition(",")[0] for row in ROWS}
    assert not found - rows, "add a row to tests/hostile/calls.py"
    unknown = {row for row in rows - found if "stable_baselines3" not in missing(row)}
    assert not unknown, "these rows are of nothing that is public"


def test_every_row_can_be_called_here() -> None:
    if packages := set[str]().union(*map(missing, ROWS)):
        pytest.skip(f"rows are left out, because these are not installed: {sorted(packages)}")
    assert TABLE == ROWS


def test_every_parameter_that_is_a_path_is_annotated_as_one() -> None:
    assert not [str(parameter) for parameter in unannotated()]


def _removes_names_of_its_own_kind(path: Path) -> None:
    for each in path.parent.iterdir():
        shutil.rmtree(each)


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "writes through a link": ("a link", lambda path: path.write_text("x"), "a victim was changed"),
    "writes through a guessed name": (
        "dangling links beside",
        lambda path: path.with_name(f"{path.name}.tmp").write_text("x"),
        "created outside",
    ),
    "reads a FIFO": ("a FIFO", lambda path: path.read_bytes(), "it never ends"),
    "fails without a word for its user": (
        "a link",
        lambda path: {False: 0}[path.is_symlink()],
        "no clear error",
    ),
    "goes by the umask": ("umask 0", lambda path: path.mkdir(), "all users can write"),
    "removes what it did not make": (
        "directories beside",
        _removes_names_of_its_own_kind,
        "a file of another program was changed",
    ),
    "leaves a temporary file": (
        "nothing around",
        lambda path: path.with_name("x").touch(),
        "left beside the path",
    ),
}


@pytest.mark.parametrize(("trap", "run", "said"), BAD.values(), ids=BAD)
def test_a_call_that_is_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, trap: str, run: Callable[[Path], object], said: str
) -> None:
    # A shorter limit is enough for a call that never ends.
    monkeypatch.setattr("tests.damage.trials.WATCHDOG_S", 2)
    monkeypatch.setitem(TABLE, "wrong", Call(run))
    (failure,) = failures([Trial("wrong", (Trap(trap),))], judge)
    assert said in failure


def test_a_campaign_draws_its_trials_by_their_seed() -> None:
    said: list[str] = []
    figures = campaign(0, 1, said.append)
    assert figures["trials"] > figures["with_two_traps"] > 0
    assert said == [f"hostile: seed 1, {figures['trials']} trials"]
    assert drawn(random.Random(7)) == drawn(random.Random(7))


@pytest.mark.slow
@pytest.mark.timeout(0)  # each call has a limit of its own
@pytest.mark.parametrize("trap", TRAPS)
def test_a_call_changes_nothing_of_others_and_ends(trap: str, full: bool) -> None:
    """``--full`` tries every row in every place. Otherwise each row gets one trap in one place."""
    names = [getattr(each, "values", (each,))[0] for each in TRAPS]
    at, draws = names.index(trap), random.Random(trap)
    trials = []
    for number, row in enumerate(TABLE):
        if full:
            trials += [Trial(row, (Trap(trap, place),)) for place in places(row, trap)]
        elif number % len(TRAPS) == at:
            trials.append(Trial(row, (Trap(trap, draws.choice(places(row, trap))),)))
    assert trials
    require_all(trials, judge, f'pytest {FILE} -k "{trap}"{" --full" * full}')
