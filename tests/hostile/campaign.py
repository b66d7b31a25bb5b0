"""Public calls among traps for hours: any trap, or two at once, in any place, drawn at random.

python -m tests.hostile.campaign --seconds 60 --seed 1
"""

from __future__ import annotations

import gc
import os
import random
import sys

from tests.damage.trials import require_all
from tests.hostile import traps
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
    figures: Figures = {"trials": 0, "with_two_traps": 0}
    for each in seeds(seed, seconds):
        rng = random.Random(each)
        trials = [drawn(rng) for _ in range(_TRIALS)]
        with repeatable(MODULE, each):
            require_all(trials, judge, f"python -m {MODULE} --seconds 1 --seed {each}")
        figures["trials"] += len(trials)
        figures["with_two_traps"] += sum(len(trial.traps) == 2 for trial in trials)
        say(f"hostile: seed {each}, {figures['trials']} trials")
    return figures


if __name__ == "__main__":
    sys.exit(main(campaign))
