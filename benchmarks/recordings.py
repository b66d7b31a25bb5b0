"""Items that are stored in records: frames, which can be compressed, and sequences of any length.

`tests.frames` creates both, once for all benchmarks of a process, as consecutive steps like those
of a collector.

The peers import this module, so it must not import shmbuffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

from tensordict import TensorDict

from tests.frames import sequences, transitions

STACKS = ("observation", "next_observation")
_MADE = 1024  # items; batches are taken from them in turn


class Recording(ABC):
    """Items whose records differ in size, with the attributes of `items.Kind`."""

    name: str
    mean_bytes: int
    """Mean size of the tensors of an item in bytes, from which the size of a byte ring follows."""

    @abstractmethod
    def batches(self, count: int, form: str, seed: int = 0) -> list[Any]:
        """Returns different batches of ``count`` items; 0 returns single items."""

    def fill(self, buffer: Any, count: int) -> None:
        """Writes ``count`` items, repeatedly the same ones if they are many."""
        batches = self.batches(min(count, 256), "TensorDict")
        for start in range(0, count, 256):
            buffer.extend(batches[start // 256 % len(batches)][: count - start])


class Frames(Recording):
    """Steps of an Atari-like game with two stacks of four frames, the second one frame later.

    No entry is nested, because torchrl does not compress nested ones.
    """

    name = "frames"
    mean_bytes = 2 * 4 * 84 * 84 + 8 + 4 + 1

    def batches(self, count: int, form: str, seed: int = 0) -> list[Any]:
        """Implements `Recording.batches` with dense TensorDicts."""
        steps = _steps()
        if not count:
            return [steps[at].clone() for at in range(0, _MADE, 16)]
        return [steps[at : at + count] for at in range(0, _MADE - count + 1, count)]


class ChannelsLast(Frames):
    """Steps like `Frames`, with frames stacked along the last dimension as in gymnasium."""

    name = "channels last"

    def batches(self, count: int, form: str, seed: int = 0) -> list[Any]:
        """Implements `Recording.batches` with dense TensorDicts."""
        steps = _steps_last()
        if not count:
            return [steps[at].clone() for at in range(0, _MADE, 16)]
        return [steps[at : at + count] for at in range(0, _MADE - count + 1, count)]


class Sequences(Recording):
    """Sequences of 10 to 10,000 tokens with their log-probabilities and a reward."""

    name = "sequences"
    mean_bytes = 18_000

    def batches(self, count: int, form: str, seed: int = 0) -> list[Any]:
        """Implements `Recording.batches` with lists of TensorDicts."""
        made = _sequences()
        if not count:
            return made[: _MADE // 4]
        return [made[at : at + count] for at in range(0, _MADE - count + 1, count)]


RECORDINGS: dict[str, Recording] = {
    "frames": Frames(),
    "channels last": ChannelsLast(),
    "sequences": Sequences(),
}


@cache
def _steps() -> TensorDict:
    made = transitions(_MADE)
    return TensorDict(
        {
            "observation": made["observation"],
            "next_observation": made["next", "observation"],
            "action": made["action"],
            "reward": made["next", "reward"].squeeze(-1),
            "done": made["next", "done"].squeeze(-1),
        },
        batch_size=[_MADE],
    )


@cache
def _steps_last() -> TensorDict:
    steps = _steps().copy()
    for key in STACKS:
        steps[key] = steps[key].permute(0, 2, 3, 1).contiguous()
    return steps


@cache
def _sequences() -> list[TensorDict]:
    return sequences(_MADE)
