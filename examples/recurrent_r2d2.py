"""Trains a recurrent Q-network with burn-in, like R2D2, to remember a cue until the episode ends.

    python examples/recurrent_r2d2.py [SEED]

The first observation of an episode shows a cue. Seven steps later, the action that names the cue is
rewarded. An agent without memory wins half of the episodes. The buffer holds single steps, each
with the recurrent state of the actor before the step. A sample consists of windows of steps. The
recurrent state is recomputed over the burn-in steps, the following steps are used for the update,
and one further step gives the value after the last one. See Kapturowski et al., Recurrent
Experience Replay in Distributed Reinforcement Learning, ICLR 2019.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict
from torch import nn

from shmbuffer import LazyTensorStorage, Sequence, TensorDictPrioritizedReplayBuffer

CUES, LENGTH = (
    2,
    8,
)  # number of cues, and steps per episode: the first shows the cue, the last asks for it
BURN_IN, LEARN, BOOTSTRAP = 3, 4, 1
ENVS, WINDOWS, HIDDEN = 16, 32, 32
GAMMA, EPSILON = 0.95, 0.2
MOST_EPISODES = 600  # largest number of episodes per environment
GOAL = 0.95  # fraction of episodes that must be won


class Network(nn.Module):
    """Computes the action values of each step from all observations up to that step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.value = nn.GRUCell(CUES + 1, HIDDEN), nn.Linear(HIDDEN, CUES)

    def forward(self, seen: torch.Tensor, state: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Returns values ``[windows, steps, actions]``. Padded steps do not change the state."""
        values = []
        for step in range(seen.shape[1]):
            state = torch.where(there[:, step, None], self.cell(seen[:, step], state), state)
            values.append(self.value(state))
        return torch.stack(values, 1)


class Memory:
    """Several environments whose episodes begin and end together."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def episode(self, network: Network, epsilon: float) -> tuple[TensorDict, torch.Tensor]:
        """Plays an episode in each environment.

        Returns the steps ``[envs, steps]``, and which environments have won.
        """
        cue = torch.randint(CUES, (ENVS,), generator=self.random)
        state, steps = torch.zeros(ENVS, HIDDEN), []
        for at in range(LENGTH):
            seen = torch.zeros(ENVS, CUES + 1)
            if at == 0:
                seen[torch.arange(ENVS), cue] = 1.0
            last = at == LENGTH - 1
            seen[:, CUES] = float(last)
            with torch.no_grad():
                following = network.cell(seen, state)
                action = network.value(following).argmax(1)
            free = torch.rand(ENVS, generator=self.random) < epsilon
            action[free] = torch.randint(CUES, (ENVS,), generator=self.random)[free]
            won = (action == cue) & last
            after = {"reward": won.float(), "done": torch.full((ENVS,), last)}
            items = {"seen": seen, "state": state, "action": action, "next": after}
            steps.append(TensorDict(items, [ENVS]))
            state = following
        return torch.stack(steps, 1), won


def update(
    batch: TensorDict, online: Network, target: Network, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Performs a step of double Q-learning on windows, and returns the TD error of each step."""
    there, learned = batch["validity_mask"], batch["learning_mask"]
    seen, state = batch["seen"], batch["state"][:, 0]
    values = online(seen, state, there)
    after, done = batch["next", "reward"], batch["next", "done"]
    with torch.no_grad():
        chosen = values.argmax(-1, keepdim=True)
        worth = target(seen, state, there).gather(-1, chosen).squeeze(-1)
        follows = torch.zeros_like(worth)
        follows[:, :-1] = worth[:, 1:]
        wanted = after + GAMMA * torch.where(done, 0.0, follows)
        known = (
            done.clone()
        )  # whether the next step is known: no step follows, or it is in the window
        known[:, :-1] |= there[:, 1:]
    error = wanted - values.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    counts = (there & learned & known).float()
    weights = batch["priority_weight"][:, :1]
    optimizer.zero_grad()
    (weights * counts * error**2).sum().div(counts.sum()).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
    return error.detach().abs()


def main(seed: int = 0) -> float:
    """Trains until the goal is reached; returns the fraction of the last episodes that was won."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    online, target = Network(), Network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.9,
        beta=0.6,
        storage=LazyTensorStorage(20_000),
        sample_unit=Sequence(LEARN, burn_in=BURN_IN, bootstrap=BOOTSTRAP, eta=0.9),
        batch_size=WINDOWS,
    )
    memory, won = Memory(seed), 0.0
    for episode in range(MOST_EPISODES):
        steps, _ = memory.episode(online, EPSILON)
        buffer.extend(steps, stream_dim=0)  # one stream per environment
        for _ in range(2):
            batch = buffer.sample().reshape(WINDOWS, -1)
            batch["td_error"] = update(batch, online, target, optimizer)
            buffer.update_tensordict_priority(batch)
        if episode % 20 == 19:
            greedy = [memory.episode(online, 0.0)[1] for _ in range(5)]
            won = torch.cat(greedy).float().mean().item()
            print(f"episode {episode + 1:4}: {won:.0%} won")
            if won >= GOAL:
                break
    return won


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])) < GOAL)
