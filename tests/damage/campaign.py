"""Damages buffers for hours: all bits, all cells, random combinations, and fuzzing of the core."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

from shmbuffer.memory.format import layout
from tests.damage.cells import Damage, payload_cells, several, shared_cells, single, text_cells
from tests.damage.fuzzing import CORPUS, built, missing, run
from tests.damage.judgement import require_looks_answer, require_mended_or_refused
from tests.damage.living import damage_under_a_handle
from tests.damage.specimen import Specimen
from tests.damage.superblocks import BITS, Copies
from tests.damage.trials import require_all
from tests.torture.command import main

_MODULE = "python -m tests.damage.campaign"
#: Number of inputs of the fuzzer in each round.
_INPUTS = 20_000
#: Seconds between two reports of the progress.
_NEWS_S = 60.0


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Damages buffers in every known way for about ``seconds`` seconds.

    Args:
        seconds: duration. A round that has begun is finished.
        seed: seed of the first round. Each later round has the next number.
        say: called with reports of the progress.

    Returns:
        ``bits`` and ``pairs`` of superblocks, ``dead`` and ``living`` cases, ``fuzz_inputs``,
        ``fuzz_edges``, and ``corpus_candidates`` (inputs that reached edges which the corpus does
        not reach).

    Raises:
        AssertionError: a case failed. The message has the command that repeats it.
    """
    end, figures, news = time.monotonic() + seconds, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shmbuffer-damage-", dir=_base()) as name:
        folder, edges = Path(name), 0
        specimens = [
            Specimen(folder / f"{kind}-{rebooted}", kind, rebooted=rebooted)
            for kind in ("rows", "records")
            for rebooted in (False, True)
        ]
        copies = Copies(specimens[0].files[layout.CONTROL], folder / "superblocks")
        for round_seed in count(seed):
            rng = random.Random(round_seed)
            repeat = f"{_MODULE} --seconds 1 --seed {round_seed}"
            figures.update(_superblocks(copies, rng))
            for specimen in specimens:
                cells = shared_cells(specimen) + payload_cells(specimen) + text_cells(specimen)
                cases = single(specimen, rng.sample(cells, 60), rng, 2)
                cases += several(specimen, cells, rng, 40)
                figures["dead"] += _dead(specimen, cases, repeat)
            for specimen in specimens[0], specimens[2]:
                cells = shared_cells(specimen)
                cases = single(specimen, rng.sample(cells, 20), rng, 1)
                cases += several(specimen, cells, rng, 20)
                figures["living"] += _living(specimen, cases, repeat)
            if not missing():
                (folder / "fuzz").mkdir(exist_ok=True)
                program = built(folder / "fuzz")
                found, inputs, reached = run(program, "fuzz", CORPUS, rng.getrandbits(63), _INPUTS)
                edges = max(edges, reached)
                figures.update(fuzz_inputs=inputs, corpus_candidates=len(found))
            if time.monotonic() >= end:
                break
            if time.monotonic() - news > _NEWS_S:
                news = time.monotonic()
                say(f"damage: seed {round_seed}, {dict(figures)}")
    if reason := missing():
        say(f"damage: the fuzzer was left out, {reason}")
    return {**figures, "fuzz_edges": edges}


def _superblocks(copies: Copies, rng: random.Random) -> dict[str, int]:
    for copy in (0, 1):
        for bit in range(BITS):
            copies.require_noticed(copy, bit)
        for bit in rng.sample(range(BITS), 500):
            copies.require_repaired(copy, bit)
    for _ in range(500):
        copies.require_refused(rng.randrange(BITS), rng.randrange(BITS))
    return {"bits": 2 * BITS, "pairs": 500}


def _dead(specimen: Specimen, cases: list[Damage], repeat: str) -> int:
    def trial(case: Damage) -> None:
        specimen.damage(*case.changes)
        require_looks_answer(specimen)
        require_mended_or_refused(specimen)

    require_all(cases, trial, repeat)
    return len(cases)


def _living(specimen: Specimen, cases: list[Damage], repeat: str) -> int:
    require_all(
        cases, lambda case: damage_under_a_handle(specimen, *case.changes), repeat, apart=True
    )
    return len(cases)


def _base() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main(campaign))
