"""Makes public calls among random traps for hours, with one trap or two, in any place.

python -m tests.hostile.campaign --seconds 60 --seed 1
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

from tests import holdings
from tests.damage.trials import require_all
from tests.hostile import traps, trial
from tests.hostile.calls import TABLE
from tests.hostile.trial import Trap, Trial, judge, places
from tests.torture.command import Figures, Say, main, repeatable, seeds

MODULE = "tests.hostile.campaign"
_TRIALS = 20
"""Number of trials with one seed, which run in one child."""
_TWO = 0.3
"""Share of the trials that have two traps."""


def drawn(rng: random.Random) -> Trial:
    """Draws a row, and one or two traps in its way."""
    row = rng.choice(list(TABLE))
    names = [*traps.IN_PLACE, *traps.AROUND]
    if os.geteuid() == 0:
        names += [*traps.ROOT_IN_PLACE, *traps.ROOT_AROUND]
    chosen = [rng.choice(list(traps.IN_PLACE))] if rng.random() < _TWO else []
    chosen.append(rng.choice(names))
    return Trial(row, tuple(Trap(name, rng.choice(places(row, name))) for name in chosen))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Runs trials for about ``seconds`` seconds.

    Raises:
        AssertionError: a call hung, failed without a clear error, or changed files of others. The
            message has the seed and the command that repeats the trial.
    """
    gc.collect()
    gc.freeze()  # so that no child collects older objects
    base = holdings.IN_MEMORY if os.access(holdings.IN_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory("", "shmbuffer-hostile-", base) as folder,
        mock.patch.object(trial, "scenes", Path(folder)),
    ):
        return _tried(seconds, seed, say)


def _tried(seconds: float, seed: int, say: Say) -> Figures:
    figures: Figures = {"trials": 0, "with_two_traps": 0}
    for round_seed in seeds(seed, seconds):
        rng = random.Random(round_seed)
        trials = [drawn(rng) for _ in range(_TRIALS)]
        with repeatable(MODULE, round_seed):
            require_all(trials, judge, f"python -m {MODULE} --seconds 1 --seed {round_seed}")
        figures["trials"] += len(trials)
        figures["with_two_traps"] += sum(len(each.traps) == 2 for each in trials)
        say(f"hostile: seed {round_seed}, {figures['trials']} trials")
    return figures


if __name__ == "__main__":
    sys.exit(main(campaign))
