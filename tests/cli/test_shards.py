"""``inspect`` and ``top`` for the directory above the shards of a buffer over several nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmbuffer.cli import exits, main
from shmbuffer.cli.top import fill_screen
from shmbuffer.memory import Engine
from shmbuffer.watch.shards import ELSEWHERE, ShardsWatch
from tests.cli.contents import contents
from tests.service import items

SIZES = {"node-1": 6, "node-2": 2}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def engines(base: Path) -> Iterator[dict[str, Engine]]:
    """Makes shards as keepers leave them, each in the directory that its settings name."""
    with ExitStack() as stack:
        made = {}
        for node, count in SIZES.items():
            made[node] = stack.enter_context(items.create(base / node, 8))
            made[node].update_settings(extra={"node": node})
            items.write(made[node], range(count))
        yield made


def lines_of(text: str) -> dict[str, list[str]]:
    """Returns the cells of a table's rows, by the first cell."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return {first: cells for first, *cells in rows}


def test_inspect_has_a_line_a_shard_and_the_sum_and_changes_nothing(
    engines: dict[str, Engine], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(base / "node-1")
    assert main(["inspect", str(base)]) == exits.DONE
    text = capsys.readouterr().out
    assert text.startswith(f"{base}: 2 shards\n")
    found = lines_of(text)
    assert found["node-1"][:5] == ["6", "8", "75.0%", "6", "0"]
    assert found["node-2"][:5] == ["2", "8", "25.0%", "2", "0"]
    assert found["all"][:5] == ["8", "16", "50.0%", "8", "0"]
    assert found["node-1"][-1] == "1 alive"
    assert text.endswith(f"{ELSEWHERE}\n")
    assert contents(base / "node-1") == before


def test_inspect_gives_the_shards_and_their_sum_as_json(
    engines: dict[str, Engine], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(base), "--json"]) == exits.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(base)
    assert found["shards"].keys() == SIZES.keys()
    assert found["shards"]["node-2"]["settings"]["extra"]["node"] == "node-2"
    assert (found["total"]["length"], found["total"]["elements"]) == (8, 16)


def test_top_shows_rates_a_shard_and_their_sum(
    engines: dict[str, Engine], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = ShardsWatch(str(base))
    watch.update()
    assert watch.rates() == {}
    items.write(engines["node-1"], range(100))
    items.write(engines["node-2"], range(50))
    watch.update()
    paces = watch.to_json()["pace"]
    assert all(paces[node]["rates"]["inserts"] > 0 for node in SIZES)
    total = sum(paces[node]["rates"]["inserts"] for node in SIZES)
    assert watch.rates()["inserts"] == total
    assert main(["top", str(base), "--once"]) == exits.DONE
    found = lines_of(capsys.readouterr().out)
    assert found["node-1"][0].endswith("100.0%")
    assert found["all"][1] == "16"
    assert main(["top", str(base), "--once", "--json"]) == exits.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["rates"]["inserts"] == 0
    assert told["shards"].keys() == told["pace"].keys() == SIZES.keys()


def test_a_shard_that_is_removed_meanwhile_stays_with_the_reason(
    engines: dict[str, Engine], base: Path
) -> None:
    watch = ShardsWatch(str(base))
    watch.update()
    engines["node-2"].close()
    (base / "node-2").rename(base.parent / "away")
    watch.update()
    table, events = watch.tables()
    assert [str(row[0]) for row in table.rows] == ["node-1", "node-2", "all"]
    assert "the buffer was removed" in table.rows[1][-1].value
    assert watch.to_json()["total"]["length"] == 6
    assert [row[:2] for row in events.rows] == [("node-2", "unreadable")]


def test_a_damaged_shard_is_named_beside_the_others(
    engines: dict[str, Engine], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines["node-2"].close()
    control = base / "node-2" / ".shmbuffer" / "control"
    control.write_bytes(bytes(control.stat().st_size))
    assert main(["inspect", str(base)]) == exits.DONE
    text = capsys.readouterr().out
    assert str(base / "node-2") in text
    assert lines_of(text)["all"][:2] == ["6", "8"]


def test_a_screen_is_drawn_again_at_each_look(
    engines: dict[str, Engine], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    watch, pauses = ShardsWatch(str(base)), iter([False, True])
    watch.update()

    def pause(_: float) -> bool:
        items.write(engines["node-1"], range(3))
        return next(pauses)

    fill_screen(watch, 0.0, pause)
    assert watch.rates()["inserts"] > 0


@pytest.mark.parametrize("verb", [["inspect"], ["top", "--once"]])
def test_a_directory_above_buffers_that_are_no_shards_is_refused_as_before(
    verb: list[str], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with items.create(base / "replay", 8):
        assert main([verb[0], str(base), *verb[1:]]) == exits.NO_BUFFER
    assert f"did you mean {base / 'replay'}?" in capsys.readouterr().err
