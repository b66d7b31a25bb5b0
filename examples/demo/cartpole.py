"""Trains on CartPole with two collectors, a learner and a coordinator, which only share a path.

     collect()  × n                   RUN/replay                          learn()
       act, step ──────extend──▶  transitions, priorities  ──sample──▶  Agent.update
         ▲                           ▲     └──◀──update_tensordict_priority──┘  │
         └─────newest────────────  weights  ◀──────────────────publish──────────┘
                                     networks, optimizer, number of updates

`serve` runs the coordinator of the buffer and starts the collectors. The directory holds the state
of the run. Any process, or all of them, can be killed at any time and started again.

Copy what you need. `double_dqn` is the algorithm. `serve`, `collect` and `learn` are the processes
of any off-policy algorithm. The lines about the ledger and `torn` only prove that nothing was lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from shmbuffer import Coordinator, TensorDictPrioritizedReplayBuffer, attach
from shmbuffer.examples import double_dqn
from shmbuffer.examples.double_dqn import Agent, QNetwork, Rollout, evaluate
from shmbuffer.examples.evidence import Ledger, torn


@dataclass(frozen=True)
class Config(double_dqn.Config):
    """Options of the agent and of its processes."""

    collectors: int = 2
    rows_per_write: int = 16
    updates_per_publication: int = 25
    most_steps_ahead: int = 300
    """Largest number of steps by which collectors are ahead of the learner."""
    patience_s: float = 60.0
    """Seconds without newer weights after which a collector ends, because the learner has ended."""
    evaluate_every: int = 1_000


@dataclass(frozen=True)
class Service:
    """Report of the coordinator: counters, collector processes, and all deaths so far."""

    stats: dict[str, float]
    collectors: tuple[int, ...]
    deaths: tuple[str, ...]


@dataclass(frozen=True)
class Learning:
    """Report of the learner about its work since it was started."""

    updates: int
    sampled: int
    torn: int


@dataclass(frozen=True)
class Evaluation:
    """Report of the learner after an evaluation."""

    step: int
    mean_return: float


def serve(
    run: Path,
    config: Config,
    on_existing: Literal["error", "recover"],
    control: Connection,
) -> None:
    """Coordinates a run: creates or recovers the buffer, starts collectors, and reports."""
    with Coordinator(
        run / "replay",
        capacity=config.capacity,
        batch_size=config.batch_size,
        alpha=config.alpha,
        beta=config.beta,
        on_existing=on_existing,
    ) as replay:
        replay.spawn(collect, config.collectors, config, restart=True)
        while not control.poll(0.2):
            collecting = tuple(each.pid for each in replay.processes if each.is_alive())
            deaths = tuple(str(death) for death in replay.deaths)
            control.send(Service(replay.stats(), collecting, deaths))


def collect(replay_dir: Path, index: int, config: Config) -> None:
    """Acts with the newest weights and writes transitions, until it is stopped."""
    torch.set_num_threads(1)
    with attach(replay_dir) as replay, Ledger(replay_dir.parent / "ledgers", index) as ledger:
        rollout = Rollout(config, seed=config.seed * 1_000_003 + ledger.source)
        network = QNetwork(config.hidden)
        version = most_steps = 0  # until the learner has published its first weights
        last_news_s = time.monotonic()
        while time.monotonic() - last_news_s < config.patience_s:
            if (weights := replay.newest(than=version)) is not None:
                version, last_news_s = weights.version, time.monotonic()
                network.load_flat(weights.state_dict["online"])
                learned = weights.step * config.steps_per_update
                most_steps = config.warmup_steps + learned + config.most_steps_ahead
            step = replay.write_count
            if step >= most_steps:
                time.sleep(0.001)
                continue
            rows = rollout.collect(network, config.epsilon.at(step), config.rows_per_write)
            replay.extend(ledger.sign(rows))
            ledger.acknowledge()


def learn(run: Path, config: Config, control: Connection) -> None:
    """Learns from the collectors' transitions, and publishes the weights, until it is stopped."""
    torch.set_num_threads(1)
    with attach(run / "replay", role="learner") as replay:
        assert isinstance(replay, TensorDictPrioritizedReplayBuffer)
        agent = Agent(config)
        if (saved := replay.newest()) is None:
            replay.publish(agent.state(), step=0)
        else:
            agent.load(saved.state_dict, updates=saved.step)
        evaluations = replay.write_count // config.evaluate_every
        n_sampled = n_torn = 0
        while not control.poll():
            step = replay.write_count
            if agent.updates >= config.updates_due(step):
                time.sleep(0.001)
                continue
            batch = replay.sample()
            n_sampled += len(batch)
            n_torn += torn(batch)
            batch["td_error"] = agent.update(batch, step)
            replay.update_tensordict_priority(batch)
            if agent.updates % config.updates_per_publication == 0:
                replay.publish(agent.state(), step=agent.updates)
                control.send(Learning(agent.updates, n_sampled, n_torn))
            if step // config.evaluate_every > evaluations:
                evaluations = step // config.evaluate_every
                # Episodes with seeds that no collector uses, different in each evaluation.
                mean_return = evaluate(agent.online, config, seed=2_000_000_000 + step)
                control.send(Evaluation(step, mean_return))
