"""Runs ``shmbuffer demo --nodes N``: several Ray nodes, one of which is killed and restarted."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import console, exits
from shmbuffer.cli.progress_bar import ProgressBar
from shmbuffer.extras import missing
from shmbuffer.watch import tables, units
from shmbuffer.watch.top import terminal

Directory = contextlib.AbstractContextManager[str | os.PathLike[str]]

if TYPE_CHECKING:
    from shmbuffer.examples.nodes import NodesOutcome


def run(args: argparse.Namespace, directory: Callable[[Path | None], Directory]) -> int:
    """Runs the demo; returns 0 if each shard came back and no item was lost or torn, else 1."""
    if importlib.util.find_spec("ray") is None:
        raise missing("the demo on several nodes needs Ray", "ray", name="ray")
    from shmbuffer.examples.double_dqn import Config
    from shmbuffer.examples.nodes import NodesPlan, NodesTrial

    plan = NodesPlan(
        nodes=args.nodes, collectors=args.collectors or 1, max_s=60.0 * args.max_minutes
    )
    if args.no_kill:
        plan = replace(plan, kill_keeper_at=None, kill_node_at=None)
    # With --json, stdout has only the object. On SIGTERM, the processes of the run are ended.
    with (
        terminal.leave_on(signal.SIGTERM) as came,
        contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout),
    ):
        config = Config(seed=args.seed)
        with directory(args.scratch_dir) as run_dir, _Shown() as shown:
            outcome = NodesTrial(Path(run_dir), config, plan, shown).play()
        console.show(*_tables(outcome))
    if came:
        return 128 + signal.SIGTERM
    if args.json:
        console.show_json(_json(args, outcome))
    is_well = outcome.finished and outcome.returned and not outcome.lost and not outcome.torn
    return exits.DONE if is_well else exits.DAMAGED


class _Shown(ProgressBar):
    """Shows the progress of a trial."""

    def status(self, outcome: NodesOutcome) -> None:
        self.numbers(
            {
                "time": units.span(outcome.seconds),
                "step": f"{outcome.step:,}",
                "updates": f"{outcome.updates:,}",
                "drawn": ", ".join(
                    f"{node} {count:,}" for node, count in sorted(outcome.drawn.items())
                ),
            }
        )


def _tables(outcome: NodesOutcome) -> Iterator[tables.Table]:
    mean_return = outcome.mean_return
    yield tables.pairs(
        "finished" if outcome.finished else "not finished in time",
        {
            "mean return": None if mean_return is None else f"{mean_return:.1f}",
            "time": units.span(outcome.seconds),
            "batches learned from": outcome.updates,
        },
    )
    yield tables.Table(
        "killed with SIGKILL",
        (" step", "node", "what", " acknowledged", " there again", " after"),
        [
            (kill.step, kill.node, kill.what, kill.items, kill.back, f"{kill.seconds:.1f} s")
            for kill in outcome.kills
        ],
    )
    columns = ("acknowledged", "drawn", "lost", "torn", "repeated")
    rows = _nodes(outcome)
    sums = {name: sum(row[name] for row in rows.values()) for name in columns}
    yield tables.Table(
        "what the items say",
        ("node", *(f" {name}" for name in columns)),
        [(node, *(row[name] for name in columns)) for node, row in (*rows.items(), ("all", sums))],
    )


def _nodes(outcome: NodesOutcome) -> dict[str, dict[str, int]]:
    """Returns a table of the items that the collectors of each node wrote."""
    return {
        node: {**asdict(found), "drawn": outcome.drawn[node]}
        for node, found in sorted(outcome.evidence.items())
    }


def _json(args: argparse.Namespace, outcome: NodesOutcome) -> dict[str, Any]:
    return {
        "finished": outcome.finished,
        "mean_return": outcome.mean_return,
        "seed": args.seed,
        "seconds": round(outcome.seconds, 1),
        "steps": outcome.step,
        "updates": outcome.updates,
        "killed": [asdict(kill) for kill in outcome.kills],
        "nodes": _nodes(outcome),
        "returned": outcome.returned,
        "lost": outcome.lost,
        "torn": outcome.torn,
    }
