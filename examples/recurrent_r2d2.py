"""A recurrent learner with burn-in, as R2D2: remember a cue until the end of the episode.

    python examples/recurrent_r2d2.py [SEED]

The first observation of an episode shows a cue; seven steps later an action that names it is
rewarded. Without a memory half of the episodes are won. The buffer holds single steps, each with
the recurrent state that the actor had before it. A sample is windows of them: the state of the
first step is warmed up over the burn-in, the steps behind are learned from, and one more gives the
value of the last. See Kapturowski et al., Recurrent Experience Replay, ICLR 2019.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict
from torch import nn

from shmbuffer import LazyTensorStorage, Sequence, TensorDictPrioritizedReplayBuffer

CUES, LENGTH = 2, 8  # of an episode: the cue is in its first step, the question in its last
BURN_IN, LEARN, BOOTSTRAP = 3, 4, 1
ENVS, WINDOWS, HIDDEN = 16, 32, 32
GAMMA, EPSILON = 0.95, 0.2
MOST_EPISODES = 600  # of each environment
GOAL = 0.95  # of the episodes, won


class Network(nn.Module):
    """Action values of each step, from what was seen until then."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.value = nn.GRUCell(CUES + 1, HIDDEN), nn.Linear(HIDDEN, CUES)

    def forward(self, seen: torch.Tensor, state: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Values ``[windows, steps, actions]``; a step that is not there leaves the state alone."""
        values = []
        for step in range(seen.shape[1]):
            state = torch.where(there[:, step, None], self.cell(seen[:, step], state), state)
            values.append(self.value(state))
        return torch.stack(values, 1)


class Memory:
    """Environments side by side, whose episodes begin and end together."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def episode(self, network: Network, epsilon: float) -> tuple[TensorDict, torch.Tensor]:
        """Every step of one episode of each environment, ``[envs, steps]``, and who has won."""
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
    """One step of double Q-learning on windows; returns the error of each step."""
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
        known = done.clone()  # what follows: nothing, or a step of the window
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
    """Trains until the goal is reached; returns the part of the last episodes that was won."""
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
        buffer.extend(steps, stream_dim=0)  # each environment is a stream of its own
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
