"""Tries all mutants, in an order that depends on the seed, until the time is over.

python -m tests.mutants.campaign --seconds 60 --seed 1
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from tests.mutants.hunt import kill, require_that_they_pass
from tests.mutants.mutant import mutants
from tests.torture.command import main


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Tries each mutant at most once. A mutant that has begun is finished.

    Raises:
        AssertionError: a mutant survived. The message has its name.
    """
    deadline = time.monotonic() + seconds
    order = mutants()
    random.Random(seed).shuffle(order)
    passing = require_that_they_pass(name for mutant in order for name in mutant.caught_by)
    say(f"{passing} test cases pass where nothing is broken")
    killed = noticed = 0
    for mutant in order:
        if killed and time.monotonic() > deadline:
            break
        noticed += kill(mutant)
        killed += 1
        say(f"{mutant.path.stem} was noticed ({killed} of {len(order)})")
    return {"mutants": killed, "mutants_left_out": len(order) - killed, "cases_failed": noticed}


if __name__ == "__main__":
    sys.exit(main(campaign))
