"""Trains on CartPole on several Ray nodes, and kills first a keeper and later a whole node.

    node-1, the head        node-2                  node-3
    learner, collector      collector               collector
    ring ◀─ keeper          ring ◀─ keeper ✗        ring ◀─ keeper      ✗ with all its processes

`NodesTrial` runs the program on the loopback interface of one machine. It kills with SIGKILL, waits
until the shard answers again, and examines the items at the end. The lines about the ledger and
``torn`` only prove that nothing was lost; examples/dqn_ray.py is the program without them.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmbuffer import (
    LazyMemmapStorage,
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from shmbuffer.distributed.runtime import living_nodes
from shmbuffer.examples.double_dqn import Agent, Config, QNetwork, Rollout, evaluate, flat
from shmbuffer.examples.evidence import (
    LIVES,
    Evidence,
    Ledger,
    acknowledged,
    examine_each,
    torn,
    total,
)
from shmbuffer.examples.loopback import Loopback
from shmbuffer.examples.trial import Watcher
from shmbuffer.memory.upkeep.inspect import inspect

ROWS = 16  # number of rows per write
PUBLISH_EVERY = 25  # number of updates between publications
MOST_AHEAD = 300  # largest number of steps by which collectors are ahead of the learner
ASK_EVERY_S = 0.5  # seconds between checks whether a shard is back


@dataclass(frozen=True)
class NodesPlan:
    """Steps, over all nodes, at which to kill, and the time limit."""

    nodes: int = 3
    collectors: int = 1  # per node
    kill_keeper_at: int | None = 2_000
    kill_node_at: int | None = 3_500
    return_after: int = 1_000  # number of steps without the node
    steps: int = 6_000
    max_s: float = 600.0


@dataclass
class Kill:
    """The death of a keeper or a node, and the recovery of its items."""

    what: str
    node: str
    step: int
    items: int  # number of items that the node's writers had acknowledged
    back: int | None = None  # number of items in the shard when it answered again
    seconds: float = 0.0  # time until the shard answered again


@dataclass
class NodesOutcome:
    """Result of a run so far."""

    seconds: float = 0.0
    step: int = 0
    updates: int = 0
    torn_samples: int = 0  # number of sampled items that did not match their stamp
    mean_return: float | None = None
    kills: list[Kill] = field(default_factory=list)
    drawn: Counter[str] = field(default_factory=Counter)  # number of sampled items by node
    evidence: dict[str, Evidence] = field(
        default_factory=dict
    )  # result of the final examination, by node
    finished: bool = False  # True if all steps were taken in time

    @property
    def lost(self) -> int:
        """Number of acknowledged items that are missing."""
        return sum(each.lost for each in self.evidence.values())

    @property
    def returned(self) -> bool:
        """True if each killed shard is back with all acknowledged items."""
        return all(kill.back is not None and kill.back >= kill.items for kill in self.kills)

    @property
    def torn(self) -> int:
        """Number of items, in rings and samples, that did not match their stamp."""
        return self.torn_samples + sum(each.torn for each in self.evidence.values())


@ray.remote(num_cpus=0)
class Collector:
    """Collects transitions on its node, and writes them to the node's ring."""

    def __init__(self, rb: Any, config: Config, ledgers: Path, index: int) -> None:
        torch.set_num_threads(1)
        self.rb, self.ledger = rb, Ledger(ledgers, index)
        self.network = QNetwork(config.hidden)
        self.rollout = Rollout(config, seed=config.seed * 1_000_003 + self.ledger.source)

    def collect(self, weights: torch.Tensor, epsilon: float) -> int:
        """Takes some steps with these weights; returns their number."""
        self.network.load_flat(weights)
        rows = self.rollout.collect(self.network, epsilon, ROWS)
        self.rb.extend(self.ledger.sign(rows))
        self.ledger.acknowledge()
        return ROWS


class NodesTrial:
    """A run, from the start of the nodes to their end."""

    def __init__(self, run_dir: Path, config: Config, plan: NodesPlan, watcher: Watcher) -> None:
        self._run_dir, self._ledgers = run_dir / "replay", run_dir / "ledgers"
        self._config, self._plan, self._watcher = config, plan, watcher
        self._outcome = NodesOutcome()
        self._collectors: dict[tuple[str, int], Any] = {}  # by node and by number on the node
        self._busy: dict[
            Any, tuple[str, int]
        ] = {}  # key of the collector by the reference to its pending result
        self._wrote: set[tuple[str, int]] = set()

    def play(self, cluster: Loopback | None = None) -> NodesOutcome:
        """Runs the trial, on its own cluster if none is given."""
        self._began_s = time.monotonic()
        if cluster is not None:
            return self._played(cluster)
        self._watcher.event(f"starting {self._plan.nodes} nodes of Ray on this machine")
        with Loopback(self._plan.nodes) as own:
            return self._played(own)

    def _played(self, cluster: Loopback) -> NodesOutcome:
        config, outcome = self._config, self._outcome
        storage = partial(
            LazyMemmapStorage, config.capacity, scratch_dir=self._run_dir, shared_init=True
        )
        self._cluster = cluster
        self._say(f"the shards are in {self._run_dir}, one on each of {', '.join(cluster.names)}")
        with ShardedReplayBuffer(
            replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
            storage=storage,
            alpha=config.alpha,
            beta=config.beta,
            batch_size=config.batch_size,
            prefetch=2,
        ) as rb:
            self._rb, self._agent = rb, Agent(config)
            self._weights = ray.put(flat(self._agent.parameters))
            for name in cluster.names:
                self._start_collectors(name)
            ray.get([one.__ray_ready__.remote() for one in self._collectors.values()])
            self._say(f"{len(self._collectors)} collectors and a learner are there")
            self._follow_the_plan()
            for collector in self._collectors.values():
                ray.kill(collector)
        self._examine()
        outcome.mean_return = evaluate(self._agent.online, config, seed=2_000_000_000)
        outcome.seconds = time.monotonic() - self._began_s
        return outcome

    def _follow_the_plan(self) -> None:
        plan, names = self._plan, self._cluster.names
        if plan.kill_keeper_at is not None and self._learn_until(plan.kill_keeper_at):
            self._kill_keeper(names[1 % len(names)])
        if plan.kill_node_at is not None and self._learn_until(plan.kill_node_at):
            self._kill_node(names[-1])
        self._outcome.finished = self._learn_until(plan.steps)

    # ---- learning ----

    def _learn_until(self, step: int) -> bool:
        """Learns until the collectors have taken ``steps`` steps; False after the time limit."""
        while self._outcome.step < step or self._collectors.keys() - self._wrote:
            if self._is_over():
                return False
            self._turn()
        return True

    def _turn(self) -> None:
        """Receives the results of collectors, sends them on, and learns from one batch."""
        outcome, agent, config = self._outcome, self._agent, self._config
        learned = config.warmup_steps + agent.updates * config.steps_per_update
        if outcome.step < learned + MOST_AHEAD:
            epsilon = config.epsilon.at(outcome.step)
            for who in self._collectors.keys() - self._busy.values():
                self._busy[self._collectors[who].collect.remote(self._weights, epsilon)] = who
        for answer in ray.wait(list(self._busy), timeout=0)[0] if self._busy else ():
            who = self._busy.pop(answer)
            try:
                outcome.step += ray.get(answer)
                self._wrote.add(who)
            except ray.exceptions.RayError as error:
                self._say(f"a collector of {who[0]} is gone ({type(error).__name__})")
                del self._collectors[who]
                self._wrote.discard(who)
        outcome.seconds = time.monotonic() - self._began_s
        self._watcher.status(outcome)
        if agent.updates >= config.updates_due(outcome.step):
            time.sleep(0.001)
            return
        batch = self._rb.sample()
        outcome.torn_samples += torn(batch)
        outcome.drawn.update(self._node_of(one) for one in batch["source"].tolist())
        batch["td_error"] = agent.update(batch, outcome.step)
        self._rb.update_tensordict_priority(batch)
        outcome.updates = agent.updates
        if agent.updates % PUBLISH_EVERY == 0:
            self._weights = ray.put(flat(agent.parameters))

    def _start_collectors(self, name: str) -> None:
        here = Collector.options(  # type: ignore[attr-defined]  # ray.remote has added it
            scheduling_strategy=NodeAffinitySchedulingStrategy(living_nodes()[name], soft=False)
        )
        first = self._cluster.names.index(name) * self._plan.collectors
        for number in range(self._plan.collectors):
            self._collectors[name, number] = here.remote(
                self._rb.client(), self._config, self._ledgers, first + number
            )

    def _node_of(self, source: int) -> str:
        """Returns the node of the collector that wrote an item."""
        return self._cluster.names[source // LIVES // self._plan.collectors]

    # ---- killing ----

    def _kill_keeper(self, name: str) -> None:
        kill = self._noted("the keeper", name)
        pid = inspect(self._run_dir / name)["owner"]["pid"]
        os.kill(pid, signal.SIGKILL)
        self._say(f"killed the keeper of {name} with SIGKILL (pid {pid})")
        self._await_return(kill)

    def _kill_node(self, name: str) -> None:
        kill = self._noted("all", name)
        self._cluster.kill(name)
        self._say(f"killed {name} with SIGKILL: raylet, keeper, collectors")
        if not self._learn_until(self._outcome.step + self._plan.return_after):
            return
        self._say(f"starting {name} again")
        self._cluster.start(name)
        if self._await_return(kill):
            self._start_collectors(name)

    def _noted(self, what: str, name: str) -> Kill:
        kill = Kill(what, name, self._outcome.step, self._acknowledged(name))
        self._outcome.kills.append(kill)
        return kill

    def _await_return(self, kill: Kill) -> bool:
        """Learns until the shard answers."""
        began_s = asked_s = time.monotonic()
        while not self._is_over():
            self._turn()
            time.sleep(0.005)  # the starting node needs a processor, too
            if time.monotonic() - asked_s < ASK_EVERY_S:
                continue
            asked_s = time.monotonic()
            kill.back = self._items_of(kill.node)
            if kill.back is not None:
                kill.seconds = asked_s - began_s
                self._say(
                    f"the shard of {kill.node} answers again after {kill.seconds:.1f} s with "
                    f"{kill.back:,} items; {kill.items:,} had been acknowledged before"
                )
                return True
        return False

    def _items_of(self, name: str) -> int | None:
        """Returns the number of items of a shard; None if it does not answer."""
        try:
            shard = self._rb.stats()["shards"].get(name)
        except ray.exceptions.RayError:  # it died during the request
            return None
        return None if shard is None else int(shard["size"])

    # ---- after the run ----

    def _examine(self) -> None:
        """Examines the items of all shards, after all other processes have ended."""
        with ExitStack() as stack:
            paths = [self._run_dir / name for name in self._cluster.names]
            shards = [stack.enter_context(attach(path)) for path in paths]
            for source, found in examine_each(shards, self._ledgers).items():
                name = self._node_of(source)
                before = self._outcome.evidence.get(name)
                self._outcome.evidence[name] = found if before is None else total([before, found])

    def _acknowledged(self, name: str) -> int:
        """Returns the number of items that the collectors of a node have acknowledged."""
        return sum(
            count
            for source, count in acknowledged(self._ledgers).items()
            if self._node_of(source) == name
        )

    def _is_over(self) -> bool:
        return time.monotonic() - self._began_s >= self._plan.max_s

    def _say(self, text: str) -> None:
        step = self._outcome.step
        self._watcher.event(f"step {step:,}: {text}" if step else text)
