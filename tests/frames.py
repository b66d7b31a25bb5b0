"""Makes frames and sequences for tests and benchmarks, reproducible by seed.

    film          what a game shows: sprites that move over a structured background
    transitions   the film as a learner gets it: stacks of four frames, and the next ones
    sequences     what a language model writes, of lengths from 10 to 10,000
    recorded      what an environment of gymnasium shows, where its renderer is installed

Grey Atari frames of 84 x 84 bytes were measured: twelve games, played at random for 1500 steps
each. At level 3 of zstd, single frames shrink 5.5 to 42 times (median 10), and stacks of four
frames 15 to 97 times (median 22). In each step 0.5 to 16 % of the pixels change (median 2). Films
are made to have similar values.

Benchmarks import this module where shmbuffer is not installed, so it must not import shmbuffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

SIZE = 84
STACK = 4
VOCABULARY = 50_000

_FINE = 2 * SIZE  # drawn at twice the size, so that edges become grey, as in shrunken Atari frames
_SKY = 16  # rows above the field, at twice the size, for the score
_TILE = 12
_REWARDED = 0.03  # share of the steps with a reward
_LONGEST = 400  # longest episode, in steps

Frames = NDArray[np.uint8]


def film(count: int, *, seed: int = 0) -> Frames:
    """Makes the frames of a game during one episode.

    Args:
        count: number of frames.
        seed: seed of the game: its background, its sprites and their movements.

    Returns:
        uint8 ``[count, 84, 84]``.

    Cost: about 0.1 ms for each frame.
    """
    rng = np.random.default_rng(seed)
    return _Game(rng).shown(_scores(rng, count))


def transitions(count: int, *, seed: int = 0, stack: int = STACK) -> TensorDict:
    """Makes consecutive steps of a game across the ends of its episodes.

    Args:
        count: number of steps.
        seed: seed of the game.
        stack: frames in each observation. The first frame of an episode is repeated to fill it.

    Returns:
        ``[count]``: ``observation`` uint8 ``[stack, 84, 84]``, ``action`` int64, ``done`` and
        ``terminated`` bool ``[1]``, and in ``next`` ``observation``, ``reward`` float32 ``[1]``,
        ``done`` and ``terminated``. ``next`` of a step is the observation of the one behind it,
        unless the episode ends with it. Nothing shares its memory.
    """
    rng = np.random.default_rng(seed)
    game = _Game(rng)
    films, scores, shown, ends = [], [], [], []
    steps = frames = 0
    while steps < count:
        length = min(int(rng.integers(_LONGEST // 4, _LONGEST)), count - steps)
        score = _scores(rng, length + 1)
        films.append(game.shown(score))
        scores.append(np.diff(score))
        at = np.arange(length)[:, None] + np.arange(1 - stack, 1)
        shown.append(frames + np.maximum(at, 0))
        ends.append(np.arange(length) == length - 1)
        steps, frames = steps + length, frames + length + 1
    every, before, done = np.concatenate(films), np.concatenate(shown), np.concatenate(ends)
    done[-1] = False  # the steps end there, but the episode does not
    last = before[:, -1]
    after = np.concatenate([before[:, 1:], last[:, None] + 1], axis=1)
    over = torch.from_numpy(done[:, None])
    never = torch.zeros_like(over)
    return TensorDict(
        {
            "observation": torch.from_numpy(every[before]),
            "action": torch.from_numpy(rng.integers(0, 18, count)),
            "done": never,
            "terminated": never.clone(),
            "next": {
                "observation": torch.from_numpy(every[after]),
                "reward": torch.from_numpy(np.concatenate(scores).astype(np.float32)[:, None]),
                "done": over,
                "terminated": over.clone(),
            },
        },
        batch_size=[count],
    )


def sequences(
    count: int,
    *,
    seed: int = 0,
    shortest: int = 10,
    longest: int = 10_000,
    text: bool = False,
) -> list[TensorDict]:
    """Makes sequences like those of a language model in reinforcement learning.

    Args:
        count: number of sequences. The first has the shortest length, the second the longest. The
        other lengths are log-uniform: as many from 10 to 100 as from 1000 to 10,000.
        seed: seed of the content.
        shortest: smallest number of tokens.
        longest: largest number of tokens.
        text: if True, the sequences also have a ``prompt``.

    Returns:
        TensorDicts without batch dimensions. ``tokens`` is int64 ``[length]``, with a few frequent
        tokens and many rare ones. ``logprobs`` is float32 ``[length]`` and ``reward`` is float32
        ``[]``. ``prompt`` is a str of up to 200 letters, some of which take more than one byte.
    """
    rng = np.random.default_rng(seed)
    spread = math.log(longest / shortest)
    lengths = np.minimum(shortest * np.exp(spread * rng.random(count)), longest).astype(int)
    lengths[:2] = [shortest, longest][:count]
    found = []
    for length in lengths.tolist():
        tokens = np.exp(math.log(VOCABULARY) * rng.random(length)).astype(np.int64)
        entries: dict[str, object] = {
            "tokens": torch.from_numpy(tokens),
            "logprobs": torch.from_numpy(-rng.exponential(size=length).astype(np.float32)),
            "reward": torch.tensor(float(rng.integers(-1, 2))),
        }
        if text:
            entries["prompt"] = "".join(rng.choice(list("abcdeé 語"), rng.integers(1, 200)))
        found.append(TensorDict(entries))
    return found


def recorded(environment: str, count: int, *, seed: int = 0) -> Frames:
    """Records a gymnasium environment while it is played at random.

    Args:
        environment: its id, such as ``"CartPole-v1"`` (its renderer is pygame) or
            ``"ALE/Breakout-v5"`` (in ale_py, with its games).
        count: number of frames.
        seed: seed of the environment and the actions.

    Returns:
        uint8 ``[count, 84, 84]``, grey, scaled down by averaging pixels.

    Raises:
        ImportError, gymnasium.error.DependencyNotInstalled: the renderer is not installed.
    """
    import gymnasium

    if environment.startswith("ALE/"):
        import ale_py  # type: ignore[import-not-found, unused-ignore]

        gymnasium.register_envs(ale_py)
    played = gymnasium.make(environment, render_mode="rgb_array")
    try:
        played.action_space.seed(seed)
        played.reset(seed=seed)
        frames = np.empty((count, SIZE, SIZE), np.uint8)
        for frame in frames:
            frame[:] = _shrunk(np.asarray(played.render()))
            _, _, terminated, truncated, _ = played.step(played.action_space.sample())
            if terminated or truncated:
                played.reset()
    finally:
        played.close()
    return frames


@dataclass(frozen=True)
class _Sprite:
    """A moving object with two alternating pictures that moves straight between the walls."""

    looks: tuple[Frames, Frames]
    """uint8 ``[height, width]`` at twice the size; 0 is transparent."""
    start: tuple[int, int]
    speed: tuple[int, int]

    def places(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row and column at each step: int64 ``[n, 2]``."""
        height, width = self.looks[0].shape
        room = np.array([_FINE - _SKY - height, _FINE - width])
        gone = (np.array(self.start) + steps[:, None] * np.array(self.speed)) % (2 * room)
        places: NDArray[np.int64] = np.minimum(gone, 2 * room - gone) + np.array([_SKY, 0])
        return places


class _Game:
    """A background with tiles, one of which disappears with every point, and sprites before it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._background, self._tiles = _background(rng)
        self._digits = np.kron(rng.integers(0, 2, (10, 5, 4)), np.ones((2, 2))).astype(bool)
        self._bright = int(rng.integers(160, 256))
        self._sprites = [_sprite(rng) for _ in range(int(rng.integers(4, 9)))]

    def shown(self, scores: NDArray[np.int64]) -> Frames:
        """Returns the frames of an episode with these scores: uint8 ``[n, 84, 84]``."""
        steps = np.arange(len(scores))
        places = [sprite.places(steps).tolist() for sprite in self._sprites]
        frames = np.empty((len(scores), SIZE, SIZE), np.uint8)
        behind, points = self._background.copy(), 0
        for step, score in enumerate(scores.tolist()):
            if score != points:
                self._count(behind, points, score)
                points = score
            canvas = behind.copy()
            for sprite, way in zip(self._sprites, places, strict=True):
                row, column = way[step]
                look = sprite.looks[step // 4 % 2]
                height, width = look.shape
                part = canvas[row : row + height, column : column + width]
                np.copyto(part, look, where=look > 0)
            frames[step] = _halved(canvas)
        return frames

    def _count(self, behind: Frames, points: int, score: int) -> None:
        """Writes the score and removes a tile for each point."""
        for point in range(points, score):
            row, column = self._tiles[point % len(self._tiles)]
            behind[row : row + _TILE, column : column + _TILE] = behind[_FINE - 1, 0]
        for at, digit in enumerate(f"{score % 10_000 * 10:05}"):
            part = behind[3:13, 20 + 10 * at : 28 + 10 * at]
            part[:] = np.where(self._digits[int(digit)], self._bright, behind[0, 0])


def _scores(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draws the points at each step."""
    points: NDArray[np.int64] = np.cumsum(rng.random(count) < _REWARDED, dtype=np.int64)
    return points


def _background(rng: np.random.Generator) -> tuple[Frames, list[tuple[int, int]]]:
    """Draws bands, a horizon and tiles: uint8 ``[168, 168]``, and the positions of the tiles."""
    shades = rng.integers(20, 200, 8)
    drawn = np.full((_FINE, _FINE), shades[0], np.uint8)
    edges = np.sort(rng.integers(_SKY, _FINE, 3))
    for shade, edge in zip(shades[1:4], edges, strict=True):
        drawn[edge:] = shade
    horizon = edges[1] + np.cumsum(rng.integers(-2, 3, _FINE // 6)).repeat(6)
    rows = np.arange(_FINE)[:, None]
    drawn[(rows >= horizon) & (rows >= _SKY) & (rows < edges[2])] = shades[4]
    look = np.kron(rng.integers(0, 2, (_TILE // 2, _TILE // 2)), np.ones((2, 2))).astype(bool)
    tiles = []
    for row in range(_SKY + _TILE, _FINE - 3 * _TILE, _TILE):
        for column in range(0, _FINE, _TILE):
            if rng.random() < 0.25:
                tile = np.where(look, shades[5], shades[6 + row // _TILE % 2])
                drawn[row : row + _TILE, column : column + _TILE] = tile
                tiles.append((row, column))
    rng.shuffle(tiles)
    return drawn, tiles


def _sprite(rng: np.random.Generator) -> _Sprite:
    """Draws a symmetric figure, as most figures in games are."""
    height, half = (int(number) for number in rng.integers(4, 9, 2))
    shade = int(rng.integers(120, 256))

    def look() -> Frames:
        side = rng.random((height, half)) < 0.65
        figure = np.concatenate([side, side[:, ::-1]], axis=1)
        return np.kron(figure * shade, np.ones((2, 1))).astype(np.uint8)

    first = look()
    second = first.copy()
    second[-4:] = look()[-4:]  # the figure walks
    start = rng.integers(0, _FINE, 2)
    speed = rng.choice([-2, -1, 1, 2], 2) * rng.choice([[0, 1], [1, 0], [1, 1]])
    return _Sprite((first, second), (int(start[0]), int(start[1])), (int(speed[0]), int(speed[1])))


def _halved(canvas: Frames) -> Frames:
    """Averages blocks of 2 x 2 pixels."""
    rows = canvas[0::2].astype(np.uint16) + canvas[1::2]
    halved: Frames = ((rows[:, 0::2] + rows[:, 1::2]) >> 2).astype(np.uint8)
    return halved


def _shrunk(picture: Frames) -> Frames:
    """Converts red, green and blue ``[height, width, 3]`` into grey ``[84, 84]``."""
    grey = picture @ np.array([0.299, 0.587, 0.114])
    for axis in (0, 1):
        starts = np.arange(SIZE) * grey.shape[axis] // SIZE
        widths = np.diff(starts, append=grey.shape[axis])
        grey = np.add.reduceat(grey, starts, axis) / np.expand_dims(widths, 1 - axis)
    shrunk: Frames = grey.astype(np.uint8)
    return shrunk
