"""Trains by PPO in several processes. Each segment is used once, and none is too old.

    python examples/on_policy_queue.py [DIRECTORY] [--collectors 3] [--updates 60] [--kill]

    collect() × n                                           learn()
      reserve(1) ─▶ newest ─▶ 32 steps ─▶ commit ──▶ queue ──▶ sample(lease=60) ─▶ PPO ─▶ ack
          ▲  waits while its policy would be too old                                    │
          └───────────────────────────── weights ◀────────────────────────── publish ───┘

An item is a segment of 32 steps of CartPole-v1. A collector reserves a slot before it plays. The
reservation waits until the present policy will be at most two versions old when the learner samples
the segment. A segment that would be older is rejected at the commit. The learner samples segments
with a lease, and acknowledges them after the update. If the learner dies before, the segments are
delivered again. A collector that dies during a segment leaves nothing in the buffer.

With ``--kill``, a collector is killed during the run and replaced. A run in an existing directory
continues from its last policy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from shmbuffer import (
    ConsumingSampler,
    LazyMemmapStorage,
    RateLimiter,
    TensorDictReplayBuffer,
    attach,
)

STEPS, SEGMENTS = 32, 16  # steps per segment, and segments per update
STALENESS = 2  # largest number of policy versions between a segment and its update
GAMMA, LAMBDA, CLIP, EPOCHS = 0.99, 0.95, 0.2, 4
LEASE_S = 60.0


class Policy(nn.Module):
    """An actor with two actions, and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def act(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples an action, and returns it with its log probability."""
        logits = self.actor(observation).log_softmax(-1)
        action = logits.exp().multinomial(1).squeeze(-1)
        return action, logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)


class Player:
    """An environment whose episodes continue from segment to segment."""

    def __init__(self, seed: int) -> None:
        self._env = gymnasium.make("CartPole-v1")
        self._seen = torch.from_numpy(self._env.reset(seed=seed)[0])
        self._return = 0.0

    @torch.no_grad()
    def segment(self, policy: Policy, version: int) -> TensorDict:
        """Plays a segment, and returns it as an item ``[1]``.

        ``episode_return`` is NaN except in the last step of an episode.
        """
        steps = []
        for _ in range(STEPS):
            action, log_prob = policy.act(self._seen[None])
            seen, reward, terminated, truncated, _ = self._env.step(int(action))
            after = torch.from_numpy(seen)
            self._return += float(reward)
            ends = terminated or truncated
            step = {
                "observation": self._seen,
                "action": action[0],
                "log_prob": log_prob[0],
                "reward": torch.tensor(float(reward)),
                "after": after,
                "terminated": torch.tensor(terminated),
                "ends": torch.tensor(ends),
                "episode_return": torch.tensor(self._return if ends else torch.nan),
            }
            steps.append(TensorDict(step, []))
            if ends:
                after, self._return = torch.from_numpy(self._env.reset()[0]), 0.0
            self._seen = after
        segment: TensorDict = torch.stack(steps)[None]  # type: ignore[assignment]
        segment.batch_size = torch.Size([1])
        return segment.set("version", torch.tensor([version]))


def collect(directory: str, seed: int) -> None:
    """Collects segments until the process is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, player, version = Policy(), Player(seed), 0
    with attach(directory, role="collector") as rb:
        while True:
            with rb.reserve(1) as room:  # waits for the learner, so that the policy is new
                weights = rb.newest(than=version)
                if weights is not None:
                    version = weights.version
                    policy.load_state_dict(weights.state_dict)
                room.commit(player.segment(policy, version), version=version)


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: TensorDictBase) -> None:
    """Performs an update by proximal policy optimization, with one GAE per segment."""
    with torch.no_grad():
        values = policy.critic(batch["observation"]).squeeze(-1)
        after = policy.critic(batch["after"]).squeeze(-1) * ~batch["terminated"]
        error = batch["reward"] + GAMMA * after - values
        advantage, following = torch.zeros_like(error), torch.zeros(len(error))
        for at in reversed(range(STEPS)):
            following = error[:, at] + GAMMA * LAMBDA * following * ~batch["ends"][:, at]
            advantage[:, at] = following
        wanted = advantage + values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    for _ in range(EPOCHS):
        logits = policy.actor(batch["observation"]).log_softmax(-1)
        log_prob = logits.gather(-1, batch["action"][..., None]).squeeze(-1)
        ratio = (log_prob - batch["log_prob"]).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        entropy = -(logits.exp() * logits).sum(-1)
        missed = (policy.critic(batch["observation"]).squeeze(-1) - wanted) ** 2
        loss = -gain.mean() + 0.5 * missed.mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


class Learned(NamedTuple):
    """Result of a run."""

    returns: list[float]
    """Mean return of the episodes that ended in the segments of each update; NaN if none ended."""
    staleness: int
    """Largest number of versions by which the policy of a segment was older than the learner's."""
    twice: int
    """Number of segments that were sampled more than once."""
    killed: int
    refused: int
    """Number of segments that were rejected as too old."""


def begin(rb: TensorDictReplayBuffer) -> tuple[Policy, int]:
    """Returns the newest published policy and its version, and publishes a first one if needed."""
    policy, found = Policy(), rb.newest()
    if found is None:
        return policy, rb.publish(policy.state_dict(), step=0)
    policy.load_state_dict(found.state_dict)
    return policy, found.version


def learn(
    rb: TensorDictReplayBuffer,
    policy: Policy,
    version: int,
    updates: int,
    crew: Crew,
    *,
    kill: bool,
) -> Learned:
    """Performs ``updates`` updates, and returns the result."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    returns: list[float] = []
    tickets: list[int] = []
    staleness = killed = 0
    for step in range(1, updates + 1):
        batch = rb.sample(lease=LEASE_S)
        update(policy, optimizer, batch)
        rb.ack(batch)
        staleness = max(staleness, version - int(batch["version"].min()))
        version = rb.publish(policy.state_dict(), step=step)
        returns.append(float(batch["episode_return"].nanmean()))
        tickets += batch["index_generation"].tolist()
        if kill and step == updates // 3:
            crew.replace(0)
            killed += 1
        if step % 10 == 0:
            print(f"update {step:4}: return {returns[-1]:6.1f}, {staleness} versions behind")
    twice, refused = len(tickets) - len({*tickets}), int(rb.stats()["refused"])
    return Learned(returns, staleness, twice, killed, refused)


class Crew:
    """The collector processes of a run."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory, self._context = directory, multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "tensordict"])  # imported once
        self._started = 0
        self._running = [self._start() for _ in range(count)]

    def _start(self) -> BaseProcess:
        self._started += 1
        arguments = str(self._directory), time.time_ns() % 2**31 + self._started
        process = self._context.Process(target=collect, args=arguments, daemon=True)
        process.start()
        return process

    def replace(self, at: int) -> None:
        """Kills a collector and starts another one."""
        self._end(self._running[at])
        self._running[at] = self._start()

    def end(self) -> None:
        """Kills all collectors. Segments that they have not committed are not needed."""
        for process in self._running:
            self._end(process)

    @staticmethod
    def _end(process: BaseProcess) -> None:
        process.kill()
        process.join()


def main(directory: Path, collectors: int = 3, updates: int = 60, *, kill: bool = False) -> Learned:
    """Trains in a directory, and returns the result."""
    torch.set_num_threads(1)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(512, scratch_dir=directory, shared_init=True),
        sampler=ConsumingSampler(),
        batch_size=SEGMENTS,
        rate_limiter=RateLimiter(max_staleness=STALENESS, items_per_version=SEGMENTS),
    )
    with buffer as rb:
        policy, version = begin(rb)
        crew = Crew(directory, collectors)
        try:
            return learn(rb, policy, version, updates, crew, kill=kill)
        finally:
            crew.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--collectors", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        place = given.directory or Path(temporary) / "queue"
        done = main(place, given.collectors, given.updates, kill=given.kill)
    known = [one for one in done.returns if one == one]  # NaN if no episode has ended
    part = max(1, len(known) // 5)
    first, last = (sum(some) / part for some in (known[:part], known[-part:]))
    print(f"return {first:.0f} -> {last:.0f}; {done.killed} collectors killed")
    print(f"{done.staleness} versions behind at most, {done.twice} segments twice", end=", ")
    print(f"{done.refused} refused")
