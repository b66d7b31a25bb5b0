"""``consumers`` lists consumers with their progress and leases, and removes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shmbuffer.cli import main
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.watch import words
from tests.memory.rows import schema, write


def test_consumers_are_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "buffer"
    assert main(["consumers", str(path)]) != 0
    capsys.readouterr()
    with Engine.open(path, Settings(capacity=8)) as engine:
        ring = engine.define(schema(8))
        write(ring, range(6))
        taken = ring.consumers.open("learner").take(4)
        ring.consumers.open("learner").ack(taken.lease, taken.slots[:1], taken.tickets[:1])
        ring.consumers.open("eval")
        assert main(["consumers", str(path), "--json"]) == 0
        learner, other = json.loads(capsys.readouterr().out)["consumers"]
        assert (learner["name"], learner["behind"], learner["delivered"]) == ("learner", 5, 4)
        assert (learner["acked"], learner["held"]) == (1, 3)
        assert [lease["pid"] for lease in learner["leases"]] == [os.getpid()]
        assert (other["name"], other["behind"], other["leases"]) == ("eval", 6, [])
        assert words.consumers(inspect(path)) == (
            f"learner is 5 items behind, 3 leased by pid {os.getpid()}; eval is 6 items behind"
        )
        assert main(["consumers", str(path), "--remove", "eval"]) == 0
        shown = capsys.readouterr().out
        assert "behind   delivered   acknowledged   redelivered   late   leased  by pid" in shown
        assert "learner" in shown
        assert "eval" not in shown
        assert main(["consumers", str(path), "--remove", "eval"]) != 0
        assert "there is no consumer 'eval'" in capsys.readouterr().err
        stats = engine.stats()
        assert (stats["consumers"], stats["consumers_behind"], stats["leased"]) == (1, 5, 3)
        assert main(["inspect", str(path)]) == 0
        assert "learner is 5 items behind" in capsys.readouterr().out
