"""``demo``: its requirements, output and exit codes. The run itself is in tests/examples."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the demo trains on one of its environments")

from shmbuffer import RecoveryReport
from shmbuffer.cli import exits, main
from shmbuffer.examples import learning_curve
from shmbuffer.examples.command import UNSOLVED
from shmbuffer.examples.evidence import Evidence
from shmbuffer.examples.learning_curve import Curve
from shmbuffer.examples.trial import Kill, Outcome, Trial
from shmbuffer.extras import command
from tests.kit.programs import Program

OUTCOME = Outcome(
    solved=True,
    evaluations=[(2_000, 120.0), (16_000, 500.0)],
    seconds=61.0,
    kills=[Kill("a collector", 5_000, (11,)), Kill("all", 15_000, (10, 12, 13, 14))],
    reports=[
        RecoveryReport(
            "run/replay", "no client alive", items=15_000, rolled_back=16, duration_ms=2.5
        ),
    ],
    evidence=[
        Evidence(15_000, 14_984, lost=0, torn=0, repeated=0, unacknowledged=16),
        Evidence(16_000, 15_984, lost=0, torn=0, repeated=0, unacknowledged=16),
    ],
    torn_samples=0,
    stats={
        "write_count": 16_000,
        "items_sampled": 128_000,
        "batches_sampled": 1_000,
        "updates_applied": 127_872,
    },
)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the run by one with a given outcome; pictures go to the folder of the test."""
    monkeypatch.chdir(tmp_path)

    def come_to(outcome: Outcome) -> None:
        def play(self: Trial) -> Outcome:
            self._say("something happened")
            self._watcher.status(Outcome(stats={"inserts_per_s": 1234.0}))
            return outcome

        monkeypatch.setattr(Trial, "play", play)

    come_to(OUTCOME)
    return come_to


def test_it_ends_with_tables_of_what_was_written_killed_and_recovered(
    outcome: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == exits.DONE
    out = capsys.readouterr().out
    assert out.startswith("something happened\nsolved\n")
    for line in (
        "  items written       16,000",
        "  items sampled       128,000 in 1,000 batches",
        "  15,000  all          4          the demo",
        "  replay  15,000  16           0               0                    2.5",
        "  lost            0",
    ):
        assert line in out.splitlines()


def test_with_json_the_object_is_all_that_is_on_stdout(
    outcome: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json", "--seed", "3"]) == exits.DONE
    said = capsys.readouterr()
    found = json.loads(said.out)
    expected = {
        "solved": True,
        "mean_return": 500.0,
        "seed": 3,
        "items_written": 16_000,
        "items_sampled": 128_000,
        "kills": 2,
        "lost": 0,
        "torn": 0,
        "recovery_ms": 2.5,
        "rolled_back": 16,
        "seconds": 61.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert "items written" in said.err


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"solved": False}, UNSOLVED),
        ({"torn_samples": 1}, exits.DAMAGED),
        ({"evidence": [replace(OUTCOME.evidence[0], lost=1), OUTCOME.evidence[1]]}, exits.DAMAGED),
        ({"evidence": [], "stats": {}, "evaluations": [], "solved": False}, UNSOLVED),
    ],
)
def test_the_exit_code_says_what_went_wrong(
    outcome: Any, change: dict[str, Any], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(replace(OUTCOME, **change))
    assert main(["demo", "--json"]) == code
    json.loads(capsys.readouterr().out)


def test_the_learning_curve_is_a_png(outcome: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["demo", "--picture", "curve.png"]) == exits.DONE
    assert f"learning curve: {Path('curve.png').absolute()}" in capsys.readouterr().out
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_curve_is_drawn_in_the_terminal(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo"]) == exits.DONE
    out = capsys.readouterr().out
    assert "CartPole-v1, seed 0, 2 collectors" in out
    assert "| at 15,000: all killed" in out


def test_the_learning_curve_replaces_a_link_and_does_not_follow_it(
    outcome: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture, other = tmp_path / "curve.png", tmp_path / "other"
    other.write_text("mine")
    picture.symlink_to(other)
    assert main(["demo", "--picture", str(picture)]) == exits.DONE
    assert other.read_text() == "mine"
    assert not picture.is_symlink()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_saved_does_not_spoil_the_run(
    outcome: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["demo", "--picture", "missing/curve.png"]) == exits.DONE
    out = capsys.readouterr().out
    assert "no picture: missing/curve.png: the directory" in out
    assert "| at 15,000: all killed" in out


def test_the_drawing_has_the_returns_the_goal_and_the_kills_in_their_places() -> None:
    curve = Curve("title", points=[(0, 0.0), (100, 500.0)], marks=[(50, "all")], goal=250.0)
    title, *lines, axis, kill = learning_curve.draw(curve).splitlines()
    assert title == "title"
    assert lines[0].startswith("   500 ")
    assert lines[0].endswith("*")
    assert lines[-1].startswith("     0 *")
    assert sum("----" in line for line in lines) == 1
    assert all("|" in line for line in lines)
    assert axis.endswith("100 steps")
    assert kill.endswith("at 50: all killed")


def test_a_directory_that_holds_something_is_refused(
    outcome: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "mine").write_text("precious")
    assert main(["demo", "--scratch-dir", str(directory)]) == exits.REFUSED
    assert "not empty" in capsys.readouterr().err
    assert (directory / "mine").read_text() == "precious"


def test_a_directory_of_the_user_stays(outcome: Any, tmp_path: Path) -> None:
    assert main(["demo", "--scratch-dir", str(tmp_path / "new" / "run")]) == exits.DONE
    assert (tmp_path / "new" / "run").is_dir()


def test_without_gymnasium_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == exits.REFUSED
    assert capsys.readouterr().err == (
        f"shmbuffer: the demo needs gymnasium, which is not installed: {command('demo')}\n"
    )


@pytest.fixture
def nodes_come_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the run over nodes by one with a given outcome."""
    pytest.importorskip("ray")
    from shmbuffer.examples.nodes import Kill, NodesOutcome, NodesTrial

    monkeypatch.chdir(tmp_path)

    def come_to(**change: Any) -> None:
        found = {
            "node-1": Evidence(90, 90, lost=0, torn=0, repeated=0, unacknowledged=0),
            "node-2": Evidence(51, 50, lost=0, torn=0, repeated=0, unacknowledged=1),
        }
        kills = [Kill("the keeper", "node-1", 60, 40, 45, 2.5), Kill("all", "node-2", 90, 41, 42)]
        outcome = NodesOutcome(
            12.0, step=140, updates=30, mean_return=99.0, kills=kills, evidence=found, finished=True
        )
        outcome.drawn.update({"node-1": 700, "node-2": 300})
        monkeypatch.setattr(NodesTrial, "play", lambda self: replace(outcome, **change))

    come_to()
    return come_to


def test_a_run_over_nodes_ends_with_what_became_of_the_items_of_each(
    nodes_come_to: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--nodes", "2"]) == exits.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "finished"
    for line in (
        "     60  node-1  the keeper             40            45   2.5 s",
        "  node     acknowledged   drawn   lost   torn   repeated",
        "  node-1             90     700      0      0          0",
        "  node-2             50     300      0      0          0",
        "  all               140   1,000      0      0          0",
    ):
        assert line in lines
    assert main(["demo", "--nodes", "2", "--json"]) == exits.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"]["node-2"]["acknowledged"] == 50
    assert found["killed"][1] == {
        "what": "all",
        "node": "node-2",
        "step": 90,
        "items": 41,
        "back": 42,
        "seconds": 0.0,
    }


def test_a_run_over_nodes_that_lost_something_or_did_not_end_fails(nodes_come_to: Any) -> None:
    from shmbuffer.examples.nodes import Kill

    bad = Evidence(40, 50, lost=10, torn=0, repeated=0, unacknowledged=0)
    for change in (
        {"evidence": {"node-1": bad}},
        {"evidence": {"node-1": replace(bad, lost=0, torn=1)}},
        {"torn_samples": 1},
        {"finished": False},
        {"kills": [Kill("all", "node-2", 90, items=41, back=40)]},
        {"kills": [Kill("all", "node-2", 90, items=41)]},
    ):
        nodes_come_to(**change)
        assert main(["demo", "--nodes", "2"]) == exits.DAMAGED, change


def test_without_ray_several_nodes_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else there(name)
    )
    assert main(["demo", "--nodes", "3"]) == exits.REFUSED
    assert capsys.readouterr().err == (
        "shmbuffer: the demo on several nodes needs Ray, which is not installed: "
        f"{command('ray')}\n"
    )


@pytest.mark.parametrize(
    "wrong", [["--nodes", "1"], ["--collectors", "0"], ["--seed", "-1"], ["--max-minutes", "soon"]]
)
def test_wrong_usage_is_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *wrong])
    assert ended.value.code == exits.USAGE
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.slow
def test_sigterm_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    with Program(sys.executable, "-m", "shmbuffer", "demo", TMPDIR=str(tmp_path)) as program:
        assert program.line().startswith(f"the run is in {tmp_path}")
        assert program.line().startswith("starting")
        program.send_signal(signal.SIGTERM)
        code, _, _ = program.end()
    assert code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
