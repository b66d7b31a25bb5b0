"""The output of `top`, `inspect` and `ps` about flow control."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from shmbuffer import RateLimiter
from shmbuffer.cli import main
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.upkeep.inspect import inspect
from tests.service import items


def lines(capsys: pytest.CaptureFixture[str], verb: str, path: Path) -> dict[str, str]:
    """Returns the pairs of the first table, by name."""
    assert main([verb, str(path), *(["--once"] if verb == "top" else [])]) == 0
    words = [line.strip().split("  ", maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {pair[0]: pair[1].lstrip() for pair in reversed(words) if len(pair) == 2}


@pytest.mark.parametrize("verb", ["top", "inspect"])
def test_it_says_how_far_each_side_is_and_who_waits_for_which_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path = tmp_path / "rb"
    with items.create(path, 8) as collector, Engine.open(path, None, role="learner") as learner:
        collector.set_limiter(
            RateLimiter(samples_per_insert=2, error_buffer=4, when_no_peer="wait")
        )
        items.write(collector, [1, 2, 3])
        assert (
            lines(capsys, verb, path)["rate limiter"]
            == "2 samples per insert; inserts are ahead by 4 of 4"
        )
        writer = threading.Thread(target=items.write, args=(collector, [4]), daemon=True)
        writer.start()
        while not inspect(path)["waits"]:
            time.sleep(0.001)
        said = lines(capsys, verb, path)["waits"]
        assert "extend waits: 2 samples per insert are required, but so far there were 0" in said
        assert main(["ps", str(path)]) == 0
        assert "extend waits: 2 samples per insert are required" in capsys.readouterr().out
        assert learner.ring() is not None
        learner.ring().admission.admit(2)
        writer.join(10)
        assert not writer.is_alive()
        assert items.read(collector) == [1, 2, 3, 4]
        assert "extend waits" not in str(lines(capsys, verb, path))


def test_a_queue_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rb"
    with Engine.open(path, Settings(capacity=8)) as engine:
        engine.set_limiter(RateLimiter(max_times_sampled=1))
        items.write(engine, [1, 2, 3])
        assert lines(capsys, "inspect", path)["rate limiter"] == "queue with 3 items"
