"""Random kills of processes that use the whole library with torch, as user programs do.

    python -m tests.torture.full_kills --seconds 60 --seed 1

Collectors and learners join with `attach`. A round also has a coordinator, a process that forks
while another of its threads samples, and a process that is interrupted, also in saves and loads. A
case is one round for each storage: rows, compressed records and ragged records. The rules and the
events are those of tests/torture/kills.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from shmbuffer import attach
from tests.torture import items
from tests.torture.arena import Arena
from tests.torture.command import Figures, Say, added, main
from tests.torture.copies import Copies
from tests.torture.full_roles import CAPACITY, ITEM_BYTES, STORAGES, batch_of, made, read, roles
from tests.torture.full_visitor import FullVisitor
from tests.torture.history import History, Log
from tests.torture.image import Image
from tests.torture.kills import containers_of, counted, fight, require_drawn_from, rounds, settle
from tests.torture.mixed import visit
from tests.torture.rules import violations

#: Number of kills in each round.
KILLS = 34
CHAIRS = ["writer", "writer", "learner", "coordinator", "forker", "visitor"]


def case(folder: Path, seed: int) -> Figures:
    """Plays one round for each storage."""
    figures: Figures = {}
    for storage in STORAGES:
        added(figures, round_of_kills(folder / storage, seed, storage))
    return figures


def round_of_kills(folder: Path, seed: int, storage: str, *, kills: int = KILLS) -> Figures:
    """Plays a round in one directory with about ``kills`` kills; returns what was checked."""
    folder.mkdir()
    path = folder / "buffer"
    rng = np.random.default_rng(seed)
    apart = containers_of(folder, CHAIRS, rng)
    playing = {
        **roles(path, storage),
        "visitor": lambda who: visit(who, FullVisitor(who, path, storage)),
    }
    with Arena(folder / "logs", playing, CHAIRS, seed, containers=apart) as arena:
        who = items.who_of(len(CHAIRS) + 1, 1)
        with made(path, storage) as buffer, Log(arena.logs, len(CHAIRS) + 1, who) as first:
            first.invoked(0, 1)
            buffer.extend(batch_of(items.keys_of(first.who, 0, 1), storage))
            first.written(0, 1, 0)
        copies = Copies(path, arena.logs, CAPACITY)

        def look() -> Figures:
            return audit(path, arena.logs, storage, copies, boots=1 + bool(apart))

        return fight(arena, rng, kills, copies, look, lambda: attach(path))


def audit(path: Path, logs: Path, storage: str, copies: Copies, *, boots: int) -> Figures:
    """Checks the contents by the buffer and by the files on disk, and compares the two."""
    with attach(path) as buffer:
        engine = buffer.storage.engine()
        settle(engine)
        copies.recovered(engine.ring().head, engine.ring().write_count)
        there = read(buffer, storage)
        image, history = Image(path), History.read(logs)
        broken = violations(history, image, contents=there, item_bytes=ITEM_BYTES, boots=boots)
        assert not broken, "\n".join(["rules are broken", *broken])
        report = engine.check()
        assert report.ok, str(report)
        if there:
            batch = buffer.sample()
            index, tickets = batch["index"].numpy(), batch["index_generation"].numpy()
            weights = torch.as_tensor(batch["_weight"]).numpy()
            require_drawn_from(image, index, tickets, weights)
        return counted(history, len(there))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Plays cases for about ``seconds`` seconds, and at least one."""
    torch.set_num_threads(1)
    return rounds(__spec__.name, case, seconds, seed, say)


if __name__ == "__main__":
    sys.exit(main(campaign))
