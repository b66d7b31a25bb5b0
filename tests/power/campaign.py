"""Plays power cuts with every script and kind in turn, each time with other images.

python -m tests.power.campaign --seconds 60 --seed 1
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from tests.power import scripts
from tests.power.contents import RECORD_BYTES
from tests.power.simulation import Simulation, apart
from tests.torture.command import main

SCRIPTS = (
    scripts.writes,
    scripts.changes,
    scripts.writers,
    scripts.restarts,
    scripts.removed,
    scripts.trained,
)
CASES = [(script, kind) for script in SCRIPTS for kind in RECORD_BYTES]
#: Arguments of `Simulation` for each seed. All designed images would take too long.
AMOUNT = {"images": 6, "worst": 8, "again": 4, "lives": 2, "used": 0.05}


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Plays power cuts for about ``seconds`` seconds; a failure says how to repeat it.

    The case depends on the seed, and each seed is derived from the one before.
    """
    end, figures = time.monotonic() + seconds, Counter[str]()
    while True:
        random = np.random.default_rng(seed)
        script, kind = CASES[int(random.integers(len(CASES)))]
        try:
            figures += apart(lambda: Simulation(kind, seed, **AMOUNT).run(script))  # noqa: B023
        except AssertionError as error:
            raise AssertionError(
                f"{script.__name__} of {kind}: {error}\n"
                f"seed {seed}; to repeat: python -m tests.power.campaign --seconds 1 --seed {seed}"
            ) from error
        figures["cases"] += 1
        say(f"power: {figures['cases']} cases, {figures['images']} images, seed {seed}")
        if time.monotonic() > end:
            return dict(figures)
        seed = int(random.integers(2**48))


if __name__ == "__main__":
    sys.exit(main(campaign))
