"""Public calls among traps for hours: any trap, or two at once, in any place, drawn at random.

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
"""Of one seed, in one child."""
_TWO = 0.3
"""How many of them have two traps."""


def drawn(rng: random.Random) -> Trial:
    """A row, and one or two traps in its way."""
    row = rng.choice(list(TABLE))
    names = [*traps.IN_PLACE, *traps.AROUND]
    if os.geteuid() == 0:
        names += [*traps.ROOT_IN_PLACE, *traps.ROOT_AROUND]
    chosen = [rng.choice(list(traps.IN_PLACE))] if rng.random() < _TWO else []
    chosen.append(rng.choice(names))
    return Trial(row, tuple(Trap(name, rng.choice(places(row, name))) for name in chosen))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Trials for about ``seconds``.

    Raises:
        AssertionError: a call hung, failed without a word for its user, or changed what is not its
            own; with the seed, and the command that repeats it.
    """
    gc.collect()
    gc.freeze()  # of each child's garbage none is older
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
