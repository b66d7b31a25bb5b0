"""The command lines: seeds repeat failures, figures are on one line, a table is at the end."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.torture import command, everything
from tests.torture.command import Figures, Say, added, following, repeatable, seeds
from tests.torture.everything import CAMPAIGNS, Result, chosen, table


def campaign_of_the_test(seconds: float, seed: int, say: Say) -> Figures:
    """A campaign that fails with an odd seed."""
    with repeatable("some.module", seed):
        assert not seed % 2, "the seed is odd"
    say("half of it is done")
    return {"cases": 3, "seconds": seconds}


def test_the_seed_of_any_case_repeats_that_case_first() -> None:
    drawn = list(islice(seeds(1, 60), 4))
    assert drawn[0] == 1
    assert list(islice(seeds(drawn[2], 60), 2)) == drawn[2:]
    assert following(1) == drawn[1] < 2**48
    assert len({following(seed) for seed in range(1000)}) == 1000
    assert list(seeds(5, 0)) == [5]


def test_a_campaign_prints_its_figures_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(campaign_of_the_test, ["--seconds", "5", "--seed", "2"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"cases": 3, "seconds": 5.0}
    assert err == "half of it is done\n"


def test_a_failure_names_the_seed_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(campaign_of_the_test, ["--seed", "3"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "the seed is odd" in err
    assert "seed 3; to repeat: python -m some.module --seconds 1 --seed 3" in err


def test_figures_are_added_by_name() -> None:
    total: Figures = {"kills": 1}
    added(total, {"kills": 2, "items": 5})
    assert total == {"kills": 3, "items": 5}


def test_campaigns_are_chosen_by_their_short_names() -> None:
    assert chosen([]) == list(CAMPAIGNS)
    assert chosen(["soak", "crash", "kills"]) == [
        "tests.torture.kills",
        "tests.torture.soak",
        "tests.crash.campaign",
    ]
    with pytest.raises(SystemExit, match="no campaign is called kill;"):
        chosen(["kill"])


def test_a_failure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fine").mkdir()
    (tmp_path / "fine" / "__init__.py").touch()
    (tmp_path / "fine" / "campaign.py").write_text(
        "import sys; print('so far', file=sys.stderr); print('{\"cases\": 12345}')"
    )
    (tmp_path / "fine" / "failing.py").write_text("raise SystemExit('seed 9 fails')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modules = ("fine.failing", "fine.missing", "no_such.campaign", "fine.campaign")
    monkeypatch.setattr(everything, "chosen", lambda only: list(modules))
    report = tmp_path / "report.md"
    assert everything.main(["--hours", "0", "--report", str(report)]) == 1
    out, err = capsys.readouterr()
    assert out == report.read_text()
    failing, *missing, fine = [line for line in out.splitlines() if line.startswith("| `")]
    assert [line.split(" | ")[2] for line in (failing, *missing)] == ["FAILED"] * 3
    assert fine.endswith("| passed | cases 12,345 |")
    assert "seed 9 fails" in out
    assert out.count("there is no such module") == 2
    assert "so far" in err


def test_a_table_says_what_passed() -> None:
    text = table([Result("a.b", 90.0, {"kills": 1000, "rate": 0.12345}, "")], 4)
    assert text.startswith("Seed 4.\n\n| campaign")
    assert "| `a.b` | 1.5 | passed | kills 1,000, rate 0.123 |" in text
    assert sys.executable not in text
