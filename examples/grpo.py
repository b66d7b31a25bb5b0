"""Trains by GRPO while rollout processes and the learner are killed. No prompt is lost or repeated.

    python examples/grpo.py [DIRECTORY] [--prompts 800] [--rollouts 2] [--kill]

    prompts ──sample(lease)──▶ roll_out() × n                                   learn()
       ▲                         reserve(8) ─▶ 8 answers ─▶ commit ─▶ groups ─▶ sample(lease)
       └─── ack, after the commit ────┘  ▲                                         │ GRPO
                                         └── weights ◀── publish ◀── save, ack ◀───┘

A prompt asks for the sum of two digits in base five. The policy is a small GRU that learns to write
the two digits of the sum. A rollout process samples a prompt with a lease that ends with the
process. It then reserves eight slots, writes eight answers with the newest weights, commits them
together, and acknowledges the prompt. If the process is killed before the commit, another process
receives the prompt. If it is killed after the commit, the other process finds the group in the
buffer.

The learner acknowledges groups only after it has saved its state. If it is killed before, it
continues from its last save and receives the groups that the save does not include.

``ledger.jsonl`` has one line per update, with its prompts. A restarted learner removes the lines
after its last save, because the weights of these updates are lost. In the end, each prompt is
listed once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from shmbuffer import (
    ConsumingSampler,
    LazyMemmapStorage,
    PromptGroupSampler,
    RateLimiter,
    TensorDictReplayBuffer,
)

BASE, DIGITS = 5, 2
GROUP, GROUPS = 8, 8  # answers per prompt, and prompts per update
STALENESS = 2  # largest number of policy versions between an answer and its update
SAVE_EVERY = 5  # number of updates between saves
CLIP, EPOCHS = 0.2, 2
HELD = float("inf")  # length of a lease that ends only with the process


class Policy(nn.Module):
    """A GRU that reads two digits and writes two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * BASE + 1, 32)
        self.cell, self.out = nn.GRUCell(32, 64), nn.Linear(64, BASE)

    def read(self, prompt: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state after reading prompts ``[n, 2]``."""
        state = torch.zeros(len(prompt), 64)
        for at in range(2):
            state = self.cell(self.embed(prompt[:, at]), state)
        return state

    def log_probs(self, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """Returns the log probability of each digit of given answers, ``[n, DIGITS]``."""
        state, before, found = self.read(prompt), torch.full((len(prompt),), 2 * BASE), []
        for at in range(DIGITS):
            state = self.cell(self.embed(before), state)
            logits = self.out(state).log_softmax(-1)
            found.append(logits.gather(-1, answer[:, at : at + 1]))
            before = answer[:, at] + BASE
        return torch.cat(found, -1)

    @torch.no_grad()
    def write(self, prompt: torch.Tensor) -> torch.Tensor:
        """Samples an answer to each prompt, digit by digit."""
        state, before, found = self.read(prompt), torch.full((len(prompt),), 2 * BASE), []
        for _ in range(DIGITS):
            state = self.cell(self.embed(before), state)
            digit = self.out(state).softmax(-1).multinomial(1).squeeze(-1)
            found.append(digit)
            before = digit + BASE
        return torch.stack(found, -1)


def prompt_of(number: torch.Tensor) -> torch.Tensor:
    """Returns the two digits of a prompt. Each pair occurs once in 25 consecutive numbers."""
    return torch.stack([number // BASE % BASE, number % BASE], -1)


def reward_of(prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Returns the fraction of correct digits."""
    total = prompt.sum(-1)
    right = torch.stack([total // BASE, total % BASE], -1) == answer
    return right.float().mean(-1)


# -- the processes ---------------------------------------------------------------------------------


def prompts_in(run: Path) -> TensorDictReplayBuffer:
    """Opens the queue of prompts. A process leases each prompt until the process ends."""
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(4096, scratch_dir=run / "prompts", shared_init=True),
        sampler=ConsumingSampler(consumer="rollouts"),
    )


def groups_in(run: Path) -> TensorDictReplayBuffer:
    """Opens the buffer of answers. All answers to a prompt are committed and sampled together."""
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(4096, scratch_dir=run / "groups", shared_init=True),
        sampler=PromptGroupSampler(group_key="number", group_size=GROUP, consumer="learner"),
        batch_size=GROUP * GROUPS,
        rate_limiter=RateLimiter(
            max_staleness=STALENESS,
            items_per_version=GROUP * GROUPS,
            when_no_peer="wait",  # wait until a killed rollout process has been restarted
        ),
    )


def roll_out(run: Path, seed: int) -> None:
    """Answers prompts until it is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, version = Policy(), 0
    with prompts_in(run) as prompts, groups_in(run) as groups:
        while True:
            taken = prompts.sample(1, lease=HELD)
            number = taken["number"]
            while not is_written(groups, int(number)):  # repeat if the policy became too old
                with groups.reserve(GROUP) as room:  # waits until the learner catches up
                    weights = groups.newest(than=version)
                    if weights is not None:
                        version = weights.version
                        policy.load_state_dict(weights.state_dict)
                    room.commit(group_of(policy, number, version), version=version)
            prompts.ack(taken)


def is_written(groups: TensorDictReplayBuffer, number: int) -> bool:
    """True if an earlier process committed the answers to this prompt before it was killed."""
    return len(groups) > 0 and bool((groups[:]["number"] == number).any())


def group_of(policy: Policy, number: torch.Tensor, version: int) -> TensorDict:
    """Returns eight answers to one prompt."""
    numbers = number.expand(GROUP).clone()
    prompt = prompt_of(numbers)
    answer = policy.write(prompt)
    group = {
        "number": numbers,
        "prompt": prompt,
        "answer": answer,
        "log_prob": policy.log_probs(prompt, answer).detach(),
        "reward": reward_of(prompt, answer),
        "version": torch.full((GROUP,), version),
    }
    return TensorDict(group, [GROUP])


def learn(run: Path, prompts: int) -> None:
    """Trains on each group once, and continues from the last save."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    learner = Learner(run)
    with groups_in(run) as rb:
        learner.acknowledge(rb)  # the process may have been killed between save and acknowledgement
        rb.publish(learner.policy.state_dict(), step=learner.step)
        while learner.trained < prompts:
            batch = rb.sample(lease=HELD)
            learner.train(batch)
            rb.publish(learner.policy.state_dict(), step=learner.step)
            if learner.step % SAVE_EVERY == 0 or learner.trained >= prompts:
                learner.save()
                learner.acknowledge(rb)


class Learner:
    """The policy, its optimizer, and the groups that have not been acknowledged yet."""

    def __init__(self, run: Path) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-3)
        self.step = self.trained = 0
        self._batches: list[
            dict[str, torch.Tensor]
        ] = []  # used in an update, but not acknowledged yet
        self._save, self._ledger = run / "learner.pt", run / "ledger.jsonl"
        if self._save.exists():
            saved = torch.load(self._save)
            self.policy.load_state_dict(saved["policy"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.trained = saved["step"], saved["trained"]
            self._batches = saved["batches"]
        lines = self._ledger.read_text().splitlines(keepends=True) if self.step else []
        self._ledger.write_text("".join(lines[: self.step]))  # later updates are not in the save

    def train(self, batch: TensorDictBase) -> None:
        """Performs one update, which makes the better answers of each group more likely."""
        number, order = batch["number"].sort(stable=True)
        if (number.view(GROUPS, GROUP) != number.view(GROUPS, GROUP)[:, :1]).any():
            raise AssertionError(f"a group is not whole: {number.tolist()}")
        reward = batch["reward"][order].view(GROUPS, GROUP)
        spread = reward.std(-1, keepdim=True) + 1e-4
        advantage = ((reward - reward.mean(-1, keepdim=True)) / spread).view(-1, 1)
        prompt, answer, before = (batch[key][order] for key in ("prompt", "answer", "log_prob"))
        for _ in range(EPOCHS):
            ratio = (self.policy.log_probs(prompt, answer) - before).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            self.optimizer.zero_grad()
            (-gain.mean()).backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        self.step, self.trained = self.step + 1, self.trained + GROUPS
        self._batches.append({key: batch[key] for key in KEYS})
        prompts = number.view(GROUPS, GROUP)[:, 0].tolist()
        line = {"step": self.step, "reward": float(reward.mean()), "prompts": prompts}
        with self._ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Saves the state atomically, by renaming a complete file."""
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "trained": self.trained,
            "batches": self._batches,
        }
        torch.save(state, self._save.with_suffix(".new"))
        os.replace(self._save.with_suffix(".new"), self._save)

    def acknowledge(self, rb: TensorDictReplayBuffer) -> None:
        """Acknowledges all groups that the last save includes, so that none is delivered again."""
        for batch in self._batches:
            rb.ack(batch)
        self._batches = []


KEYS = ("index", "index_generation", "index_lease")  # entries of a batch that `ack` needs


# -- the run ---------------------------------------------------------------------------------------


class Done(NamedTuple):
    """Result of a run."""

    prompts: list[int]
    """Numbers of the prompts in the order of the updates."""
    rewards: list[float]
    """Mean reward of each update."""
    killed: int


def main(run: Path, prompts: int = 800, rollouts: int = 2, *, kill: bool = False) -> Done:
    """Trains on ``prompts`` prompts; with ``kill``, kills rollout processes and the learner."""
    run.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "tensordict"]
    )  # imported once instead of in each process
    seeds = count(1)

    def start(at: int) -> BaseProcess:
        target: Any = roll_out if at else learn
        arguments = run, next(seeds) if at else prompts
        process = context.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

    with prompts_in(run) as queue:
        if not queue.write_count:
            queue.extend(TensorDict({"number": torch.arange(prompts)}, [prompts]))
        running = [start(at) for at in range(rollouts + 1)]
        killed, ledger = 0, run / "ledger.jsonl"
        try:
            while running[0].exitcode != 0:
                time.sleep(0.02)
                done = ledger.read_text().count("\n") if ledger.exists() else 0
                if kill and killed < 3 and done > (killed + 1) * prompts // GROUPS // 4:
                    os.kill(running[(killed + 1) % 2].pid or 0, signal.SIGKILL)
                    running[(killed + 1) % 2].join()
                    killed += 1
                for at, process in enumerate(running):
                    if process.exitcode not in (None, 0):
                        if process.exitcode != -signal.SIGKILL:
                            raise RuntimeError(f"a process ended with {process.exitcode}")
                        running[at] = start(at)
        finally:
            for process in running:
                process.kill()
                process.join()
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    trained = [number for line in lines for number in line["prompts"]]
    return Done(trained, [line["reward"] for line in lines], killed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        place = given.directory or Path(temporary)
        result = main(place, given.prompts, given.rollouts, kill=given.kill)
    tenth = len(result.rewards) // 10
    first, last = (sum(part) / tenth for part in (result.rewards[:tenth], result.rewards[-tenth:]))
    once = sorted(result.prompts) == [*range(given.prompts)]
    print(f"reward {first:.2f} -> {last:.2f}; {result.killed} processes killed")
    print("every prompt was trained on once" if once else "prompts are missing, or there twice")
