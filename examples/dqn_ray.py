"""Trains on CartPole with collectors on several nodes of a Ray cluster and one sharded buffer.

    pip install "shmbuffer[ray]" gymnasium
    python examples/dqn_ray.py --nodes 3      on this machine; one node is killed and restarted
    python examples/dqn_ray.py                on the head node of a running cluster

Each node has a ring, to which its collectors write at memory speed. The learner samples by priority
from all rings, as from one buffer. Weights are a Ray object, which Ray copies to each node once. If
a node dies, training continues with the other nodes. When the node is back, its items can be
sampled again. The agent is examples/demo/double_dqn.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmbuffer import (
    LazyMemmapStorage,
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from shmbuffer.examples.double_dqn import Agent, Config, QNetwork, Rollout, evaluate, flat

ROWS = 16  # number of rows per write
PUBLISH_EVERY = 25  # number of updates between publications
MOST_AHEAD = 300  # largest number of steps by which collectors are ahead of the learner
LOOK_EVERY_S = 1.0  # seconds between checks for new nodes
PATIENCE_S = 60.0  # seconds to wait for a restarted node


@ray.remote(num_cpus=1)
class Collector:
    """Collects transitions on its node, and writes them to the node's ring."""

    def __init__(self, rb: Any, config: Config, seed: int) -> None:
        torch.set_num_threads(1)
        self.rb, self.network = rb, QNetwork(config.hidden)
        self.rollout = Rollout(config, seed)

    def collect(self, weights: torch.Tensor, epsilon: float) -> int:
        """Takes some steps with these weights; returns their number."""
        self.network.load_flat(weights)
        self.rb.extend(self.rollout.collect(self.network, epsilon, ROWS))
        return ROWS


class Crew:
    """Collectors, one on each live node, busy or idle."""

    def __init__(self, rb: ShardedReplayBuffer, config: Config) -> None:
        self.rb, self.config = rb.client(), config
        self.collectors: dict[str, Any] = {}  # by node name
        self.busy: dict[Any, str] = {}  # node by the reference to the pending result
        self.made = 0
        self.look()
        ray.get([one.__ray_ready__.remote() for one in self.collectors.values()])

    def steps(self, weights: Any, epsilon: float, *, wanted: bool) -> int:
        """Starts steps of idle collectors if requested; returns the number of completed steps."""
        if time.monotonic() - self.looked_s > LOOK_EVERY_S:
            self.look()
        if wanted:
            for node in self.collectors.keys() - self.busy.values():
                self.busy[self.collectors[node].collect.remote(weights, epsilon)] = node
        steps = 0
        for answer in ray.wait(list(self.busy), timeout=0)[0] if self.busy else ():
            node = self.busy.pop(answer)
            try:
                steps += ray.get(answer)
            except ray.exceptions.RayError as error:
                print(f"the collector of {node} is gone: {type(error).__name__}", flush=True)
                del self.collectors[node]
        return steps

    def look(self) -> None:
        """Starts a collector on each node without one."""
        self.looked_s = time.monotonic()
        for node in ray.nodes():
            name = node["NodeName"]
            if node["Alive"] and name not in self.collectors:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = Collector.options(scheduling_strategy=here)
                self.collectors[name] = options.remote(self.rb, self.config, self.made)
                self.made += 1


def train(
    rb: ShardedReplayBuffer,
    config: Config,
    steps: int,
    events: Mapping[int, Callable[[], None]],
) -> list[float]:
    """Learns from so many steps of all nodes; what shall happen meanwhile, by step.

    Returns:
        The mean returns of the evaluations, of which there are ten.
    """
    agent, crew = Agent(config), Crew(rb, config)
    weights, step, returns = ray.put(flat(agent.parameters)), 0, []
    left = sorted(events)
    while step < steps:
        learned = config.warmup_steps + agent.updates * config.steps_per_update
        wanted = step < learned + MOST_AHEAD
        step += crew.steps(weights, config.epsilon.at(step), wanted=wanted)
        while left and step >= left[0]:
            events[left.pop(0)]()
        if step >= steps * (len(returns) + 1) // 10:
            returns.append(evaluate(agent.online, config, seed=2_000_000_000 + step))
            print(f"step {step:6,}  return {returns[-1]:5.1f}  items {items_of(rb)}", flush=True)
        if agent.updates >= config.updates_due(step):
            time.sleep(0.001)
            continue
        batch = rb.sample()
        batch["td_error"] = agent.update(batch, step)
        rb.update_tensordict_priority(batch)
        if agent.updates % PUBLISH_EVERY == 0:
            weights = ray.put(flat(agent.parameters))
    return returns


def items_of(rb: ShardedReplayBuffer) -> str:
    """Returns the number of items of each node, and the nodes that do not answer."""
    stats = rb.stats()
    there = {node: f"{one['size']:,}" for node, one in sorted(stats["shards"].items())}
    told = there | dict.fromkeys(stats["missing"], "no answer")
    return ", ".join(f"{node} {count}" for node, count in told.items())


def run(config: Config, steps: int, scratch_dir: str, cluster: Any = None) -> list[float]:
    """Creates the buffer and trains. On a local cluster, one node is killed and restarted."""
    events: dict[int, Callable[[], None]] = {}
    if cluster is not None:
        name = cluster.names[-1]

        def kill() -> None:
            print(f"killing {name}", flush=True)
            cluster.kill(name)

        def start() -> None:
            print(f"starting {name} again", flush=True)
            cluster.start(name)

        events = {steps * 4 // 10: kill, steps * 6 // 10: start}
    storage = partial(LazyMemmapStorage, config.capacity, scratch_dir=scratch_dir, shared_init=True)
    with ShardedReplayBuffer(
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        storage=storage,
        alpha=config.alpha,
        beta=config.beta,
        batch_size=config.batch_size,
        prefetch=2,
    ) as rb:
        returns = train(rb, config, steps, events)
        if cluster is not None:
            wait_for_all(rb)
        print(f"items {items_of(rb)}", flush=True)
        return returns


def wait_for_all(rb: ShardedReplayBuffer) -> None:
    """Waits until the shards of all nodes answer."""
    end_s = time.monotonic() + PATIENCE_S
    while rb.stats()["missing"] and time.monotonic() < end_s:
        time.sleep(0.5)


def main() -> None:
    """Trains on a running cluster or on a local one."""
    parser = argparse.ArgumentParser(description="Double DQN on CartPole, on several nodes.")
    parser.add_argument("--nodes", type=int, help="nodes on this machine (default: a real cluster)")
    parser.add_argument("--steps", type=int, default=20_000, help="of all nodes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (%(default)s)")
    parser.add_argument("--scratch-dir", help="where each node keeps its items (a temporary one)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = Config(seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="dqn-ray-") as temporary:
        scratch_dir = given.scratch_dir or temporary
        if given.nodes is None:
            ray.init(address="auto")
            run(config, given.steps, scratch_dir)
            return
        from shmbuffer.examples.loopback import Loopback

        with Loopback(given.nodes) as cluster:
            run(config, given.steps, scratch_dir, cluster)


if __name__ == "__main__":
    main()
