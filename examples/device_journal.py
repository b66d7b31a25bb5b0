"""Trains TD3 with all replay rows on the device, and with a shared ring as their journal.

    python examples/device_journal.py PATH [--device cuda] [--steps 2000]

As in FastTD3, many environments step together, batches are large, and the replay rows stay on the
device, so that samples are not copied over the bus. A plain device buffer is lost when its process
ends. This program also writes the rows of each step to a ring in ``PATH``. If it is killed and
started again, it loads the committed rows from the ring to the device, so that no dump is needed.
It publishes its networks to the same directory at regular intervals.

See Seo et al., FastTD3: Simple, Fast, and Capable Reinforcement Learning for Humanoid Control,
2025.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from shmbuffer import Coordinator, SamplerWithoutReplacement, TensorDictReplayBuffer

CHUNK = 65_536  # number of rows that a reload copies to the device at a time
GAMMA, TAU, NOISE, EXPLORE = 0.97, 0.01, 0.2, 0.3


class DeviceRows:
    """A ring of rows on the device, which initially contains the rows of its journal.

    Args:
        journal: a ring of the same capacity, whose samples are on ``device`` and in order.
        device: device of the rows.
    """

    def __init__(self, journal: TensorDictReplayBuffer, device: torch.device) -> None:
        self.journal, self.device = journal, device
        self.capacity, self.cursor, self.size = journal.storage.max_size, 0, 0
        self.rows: TensorDict | None = None
        self.reload()

    def reload(self) -> None:
        """Copies the rows of the journal to the device, oldest first."""
        tickets = torch.empty(len(self.journal), dtype=torch.int64, device=self.device)
        while (left := len(tickets) - self.size) > 0:
            part = self.journal.sample(min(left, CHUNK))
            tickets[self.size : self.size + len(part)] = part.pop("index_generation")
            self._write(part.exclude("index"))
        if self.rows is not None:
            oldest_first = tickets.argsort()
            for leaf in self.rows.values(True, True):
                leaf[: self.size] = leaf[oldest_first]

    def extend(self, rows: TensorDict) -> None:
        """Writes rows ``[envs]``; they survive a kill once the first statement has returned."""
        self.journal.extend(rows.cpu())
        self._write(rows)

    def _write(self, rows: TensorDict) -> None:
        if self.rows is None:
            self.rows = rows[:1].expand(self.capacity).clone().zero_()
        index = torch.arange(self.cursor, self.cursor + len(rows), device=self.device)
        self.rows[index % self.capacity] = rows
        self.cursor = (self.cursor + len(rows)) % self.capacity
        self.size = min(self.size + len(rows), self.capacity)

    def sample(self, count: int) -> TensorDict:
        """Samples rows uniformly on the device."""
        return self.rows[torch.randint(self.size, (count,), device=self.device)]


class Points:
    """Points on a line, all on the device. The reward of a step is minus the distance to 0."""

    def __init__(self, count: int, device: torch.device, length: int = 50) -> None:
        self.state = self._start(torch.empty(count, 2, device=device))
        self.age = torch.randint(length, (count,), device=device)
        self.length = length

    def _start(self, state: torch.Tensor) -> torch.Tensor:
        """Returns positions in [-1, 1] and speeds of 0."""
        place = 2 * torch.rand_like(state[:, 0]) - 1
        return torch.stack([place, torch.zeros_like(place)], 1)

    def step(self, action: torch.Tensor) -> TensorDict:
        """Moves all points, and returns transitions; episodes are truncated, not terminated."""
        speed = 0.9 * self.state[:, 1:] + 0.1 * action
        after = torch.cat([self.state[:, :1] + speed, speed], 1)
        rows = {"observation": self.state, "action": action, "reward": -after[:, 0].abs()}
        rows["next_observation"] = after
        self.age = (self.age + 1) % self.length
        self.state = torch.where(self.age[:, None] == 0, self._start(after), after)
        return TensorDict(rows, [len(after)])


def network(inputs: int, *, end: nn.Module | None = None) -> nn.Module:
    """Returns a small network with one output."""
    layers = [nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    return nn.Sequential(*layers, *([] if end is None else [end]))


class Agent(nn.Module):
    """An actor, two critics, and their target networks."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = network(2, end=nn.Tanh())
        self.critics = nn.ModuleList([network(3), network(3)])
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, *self.critics]))

    def losses(self, batch: TensorDict) -> torch.Tensor:
        """Returns the losses of the critics and of the actor, as a sum with separate gradients."""
        seen, after = batch["observation"], batch["next_observation"]
        with torch.no_grad():
            actor, *critics = self.targets
            noise = (NOISE * torch.randn_like(batch["action"])).clamp(-0.5, 0.5)
            following = torch.cat([after, (actor(after) + noise).clamp(-1, 1)], 1)
            value = torch.minimum(*(critic(following)[:, 0] for critic in critics))
            wanted = batch["reward"] + GAMMA * value
        taken = torch.cat([seen, batch["action"]], 1)
        errors = [(critic(taken)[:, 0] - wanted).square().mean() for critic in self.critics]
        frozen = {name: one.detach() for name, one in self.critics[0].named_parameters()}
        chosen = torch.cat([seen, self.actor(seen)], 1)
        return sum(errors) - torch.func.functional_call(self.critics[0], frozen, chosen).mean()

    def follow(self) -> None:
        """Moves the target networks toward the networks."""
        networks = nn.ModuleList([self.actor, *self.critics])
        with torch.no_grad():
            for target, one in zip(self.targets.parameters(), networks.parameters(), strict=True):
                target.lerp_(one, TAU)


def journal_options(device: torch.device) -> dict[str, Any]:
    """Returns options for `attach`: samples in order, through pinned memory for a GPU."""
    pinned = {"device": device, "pin_memory": device.type == "cuda"}
    return {"sampler": SamplerWithoutReplacement(shuffle=False), "alpha": None, **pinned}


def train(
    path: str, device: torch.device, steps: int, envs: int, capacity: int, publish: int
) -> None:
    """Trains, and continues from the rows and networks of an earlier run in the directory."""
    agent, points = Agent().to(device), Points(envs, device)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    options = {"capacity": capacity, "on_existing": "recover", **journal_options(device)}
    with Coordinator(path, **options) as run:
        rows, first = DeviceRows(run.buffer, device), 0
        if saved := run.buffer.newest():
            agent.load_state_dict(saved.state_dict)
            first = saved.step + 1
        print(f"{rows.size} rows reloaded, step {first}", flush=True)
        for step in range(first, first + steps):
            with torch.no_grad():
                action = agent.actor(points.state)
                action = (action + EXPLORE * torch.randn_like(action)).clamp(-1, 1)
            rows.extend(points.step(action))
            loss = agent.losses(rows.sample(16 * envs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            agent.follow()
            if (step + 1) % publish == 0:
                run.buffer.publish(agent.state_dict(), step)
                reward = rows.rows["reward"][: rows.size].mean()
                print(f"step {step}, {rows.size} rows, reward {reward:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--publish", type=int, default=100, help="steps between two versions")
    train(**vars(parser.parse_args()))
