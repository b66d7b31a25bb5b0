"""The command line of the demo, its tables and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress_bar import ProgressBar
from shmbuffer.errors import BufferExistsError, ShmBufferError
from shmbuffer.examples import learning_curve, nodes_command
from shmbuffer.examples.learning_curve import Curve
from shmbuffer.extras import missing
from shmbuffer.saves.safe_files import make_folders, temporary_folder
from shmbuffer.watch import tables, units
from shmbuffer.watch.top import terminal

if TYPE_CHECKING:
    from shmbuffer.examples.trial import Outcome

UNSOLVED = 5
"""Exit code of this command only."""

EPILOG = f"""\
  {UNSOLVED:>3}  not solved within --max-minutes

With --nodes it is 1 if an item was lost or torn, or a node did not come back in time, else 0.
The source is examples/demo/cartpole.py in the repository, or nodes.py there; copy from these.
"""


DESCRIPTION = (
    "Trains a double DQN on CartPole-v1: collectors write to a shared prioritized buffer, a "
    "learner draws from it, a coordinator supervises them. Meanwhile a collector is killed "
    "with SIGKILL, and later all of them at once. Then the directory is recovered, every item "
    "in it is verified, and training goes on from there until 20 greedy episodes have a mean "
    "return of 475. Takes about a minute on two cores. Needs gymnasium; rich and matplotlib, "
    "of the extras cli and demo, improve the output. With --nodes it runs on several nodes of Ray, "
    "all on this machine: collectors on each, one learner that draws from all; a keeper is killed, "
    "then a whole node, which comes back with its items; the report counts the items that were "
    "acknowledged, drawn and lost on each node. That needs the extra ray, too."
)
EXAMPLES = (
    "shmbuffer demo\n"
    "shmbuffer demo --seed 1 --collectors 4 --scratch-dir run\n"
    "shmbuffer demo --nodes 3\n"
    "shmbuffer demo --json | tail -n 1"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = f"{parser.epilog}{EPILOG}"
    parser.add_argument(
        "--seed", type=arguments.at_least(0), default=0, metavar="N", help="default 0"
    )
    parser.add_argument(
        "--collectors",
        type=arguments.at_least(1),
        metavar="N",
        help="how many collector processes (default 2); with --nodes, on each (default 1)",
    )
    parser.add_argument(
        "--nodes",
        type=arguments.at_least(2),
        metavar="N",
        help="run on this many nodes of Ray on the loopback interface, the first of them the head",
    )
    parser.add_argument("--no-kill", action="store_true", help="train without kills")
    parser.add_argument(
        "--scratch-dir",
        type=Path,
        metavar="DIR",
        help="directory of the run, which is kept (default: a temporary one)",
    )
    parser.add_argument(
        "--max-minutes",
        type=arguments.seconds,
        default=10.0,
        metavar="M",
        help="give up after this time (default 10)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("shmbuffer-demo.png"),
        metavar="FILE",
        help="where to draw the learning curve (default shmbuffer-demo.png); without matplotlib "
        "it is drawn in the terminal; not with --nodes",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if the task was solved and no item was lost or torn."""
    if importlib.util.find_spec("gymnasium") is None:
        raise missing("the demo needs gymnasium", "demo", name="gymnasium")
    if args.nodes is not None:
        return nodes_command.run(args, _directory)
    from shmbuffer.examples.cartpole import Config
    from shmbuffer.examples.trial import Trial, TrialPlan

    plan = TrialPlan(max_s=60.0 * args.max_minutes)
    if args.no_kill:
        plan = TrialPlan(max_s=plan.max_s, kill_collector_at=None, kill_all_at=None)
    # With --json, stdout has only the object. On SIGTERM, the processes of the run are ended.
    with (
        terminal.leave_on(signal.SIGTERM) as came,
        contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout),
    ):
        config = Config(seed=args.seed, collectors=args.collectors or 2)
        with _directory(args.scratch_dir) as run_dir, _Shown() as shown:
            outcome = Trial(Path(run_dir), config, plan, shown).play()
        console.show(*_tables(outcome))
        curve = Curve(
            title=f"CartPole-v1, seed {args.seed}, {config.collectors} collectors",
            points=outcome.evaluations,
            marks=[(kill.step, kill.what) for kill in outcome.kills],
            goal=plan.goal,
        )
        picture = _draw(curve, args.picture)
    if came:
        return 128 + signal.SIGTERM
    if args.json:
        console.show_json(_json(args, outcome) | {"picture": picture})
    if outcome.lost or outcome.torn:
        return exits.DAMAGED
    return exits.DONE if outcome.solved else UNSOLVED


def _directory(given: Path | None) -> contextlib.AbstractContextManager[str | os.PathLike[str]]:
    """Yields the directory of a run: the user's, which is kept, or a temporary one."""
    if given is None:
        return temporary_folder()
    if given.exists() and any(given.iterdir()):
        raise BufferExistsError(f"{given}: not empty; give the demo a directory of its own")
    make_folders(given)
    return contextlib.nullcontext(given)


class _Shown(ProgressBar):
    """Shows the progress of a trial."""

    def status(self, outcome: Outcome) -> None:
        stats = outcome.stats
        mean_return = outcome.mean_return
        self.numbers(
            {
                "time": units.span(outcome.seconds),
                "step": f"{outcome.step:,}",
                "return": "-" if mean_return is None else f"{mean_return:.1f}",
                "items/s": f"{stats.get('inserts_per_s', 0.0):,.0f}",
                "batches/s": f"{stats.get('batches_sampled_per_s', 0.0):,.0f}",
                "fill": f"{stats.get('fill', 0.0):.1%}",
                "clients": f"{stats.get('clients_alive', 0):.0f}",
            }
        )


# ---- after the run ----


def _tables(outcome: Outcome) -> Iterator[tables.Table]:
    counted, mean_return = _counted(outcome), outcome.mean_return
    yield tables.pairs(
        "solved" if outcome.solved else "not solved",
        {
            "mean return": None if mean_return is None else f"{mean_return:.1f}",
            "time": units.span(outcome.seconds),
            "items written": counted["items_written"],
            "items sampled": f"{counted['items_sampled']:,} in "
            f"{counted['batches_sampled']:,} batches",
            "priorities updated": counted["priorities_updated"],
        },
    )
    yield tables.Table(
        "killed with SIGKILL",
        ("step", "what", "processes", "by"),
        [
            (
                kill.step,
                kill.what,
                len(kill.pids),
                "the demo" if kill.planned else "another process",
            )
            for kill in outcome.kills
        ],
    )
    yield tables.Table(
        "recovered",
        ("buffer", "items", "rolled back", "rolled forward", "priorities repaired", "ms"),
        [
            (
                Path(report.path).name,
                report.items,
                report.rolled_back,
                report.rolled_forward,
                report.priorities_repaired,
                f"{report.duration_ms:.1f}",
            )
            for report in outcome.reports
        ],
    )
    yield tables.pairs("what the items say", _evidence(outcome))


def _json(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    return {
        "solved": outcome.solved,
        "mean_return": outcome.mean_return,
        "seed": args.seed,
        "collectors": args.collectors or 2,
        "seconds": round(outcome.seconds, 1),
        **_counted(outcome),
        "kills": len(outcome.kills),
        "killed": [
            {"what": kill.what, "step": kill.step, "pids": kill.pids, "planned": kill.planned}
            for kill in outcome.kills
        ],
        "recovery_ms": round(outcome.recovery_ms, 3),
        "rolled_back": sum(report.rolled_back for report in outcome.reports),
        "rolled_forward": sum(report.rolled_forward for report in outcome.reports),
        **_evidence(outcome),
        "evaluations": outcome.evaluations,
    }


def _counted(outcome: Outcome) -> dict[str, int]:
    counters = {
        "items_written": "write_count",
        "items_sampled": "items_sampled",
        "batches_sampled": "batches_sampled",
        "priorities_updated": "updates_applied",
    }
    return {name: int(outcome.stats.get(counter, 0)) for name, counter in counters.items()}


def _evidence(outcome: Outcome) -> dict[str, int]:
    last = asdict(outcome.evidence[-1]) if outcome.evidence else {}
    return last | {"lost": outcome.lost, "torn": outcome.torn}


def _draw(curve: Curve, path: Path) -> str | None:
    """Saves the learning curve, or prints it in the terminal; returns the path of the file."""
    try:
        saved = learning_curve.save(curve, path)
    except (OSError, ShmBufferError) as error:
        print(f"no picture: {error}")
        saved = None
    if saved is None:
        print(learning_curve.draw(curve))
        return None
    print(f"learning curve: {saved}")
    return str(saved)
