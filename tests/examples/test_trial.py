"""A run ends normally although the trial and other programs kill its processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from shmbuffer.examples.cartpole import Config
from shmbuffer.examples.trial import Outcome, Trial, TrialPlan

SMALL = Config(
    hidden=16,
    batch_size=16,
    warmup_steps=100,
    updates_per_publication=5,
    evaluate_every=200,
    evaluation_episodes=2,
)


class Silent:
    """A listener that ignores all events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def status(self, outcome: Outcome) -> None:
        pass


@pytest.mark.full  # a dozen processes that load torch
@pytest.mark.slow
def test_a_run_survives_every_kill_and_no_item_is_lost_or_torn(tmp_path: Path) -> None:
    plan = TrialPlan(kill_collector_at=400, kill_all_at=800, goal=1.0)
    outcome = Trial(tmp_path, SMALL, plan, Silent()).play()
    assert outcome.solved
    assert [kill.what for kill in outcome.kills] == ["a collector", "all"]
    assert [len(kill.pids) for kill in outcome.kills] == [1, 4]
    assert (outcome.lost, outcome.torn) == (0, 0)
    assert [report.reason for report in outcome.reports] == ["no client alive"]
    recovered, last = outcome.evidence
    assert 0 < recovered.acknowledged <= recovered.items < last.items
    assert outcome.evaluations[-1][0] > outcome.kills[-1].step
    assert outcome.stats["items_sampled"] > 0


@pytest.mark.full
@pytest.mark.slow
def test_a_run_killed_from_outside_is_recovered_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    class Vandal(Silent):
        """Kills the learner, and sends Ctrl-C when all processes have been restarted."""

        hurt = False

        def event(self, text: str) -> None:
            super().event(text)
            if self.hurt and text.startswith("starting"):
                raise KeyboardInterrupt

        def status(self, outcome: Outcome) -> None:
            if outcome.step >= 300 and not self.hurt:
                self.hurt = True
                [learner] = [
                    each for each in multiprocessing.active_children() if each.name == "learn"
                ]
                learner.kill()

    vandal = Vandal()
    plan = TrialPlan(kill_collector_at=None, kill_all_at=None, goal=1e9)
    with pytest.raises(KeyboardInterrupt):
        Trial(tmp_path, replace(SMALL, collectors=1), plan, vandal).play()
    assert "learn ended with exit code -9; the others are killed" in vandal.events
    assert any("0 of them lost, 0 torn" in event for event in vandal.events)


def test_a_run_that_has_no_time_ends_without_a_buffer(tmp_path: Path) -> None:
    outcome = Trial(tmp_path, replace(SMALL, collectors=1), TrialPlan(max_s=0.0), Silent()).play()
    assert not outcome.solved
    assert (outcome.lost, outcome.torn, outcome.kills, outcome.mean_return) == (0, 0, [], None)
