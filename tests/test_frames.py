"""The input of tests and benchmarks is reproducible, and compresses like real frames."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
import torch
import zstandard

from tests.frames import SIZE, STACK, VOCABULARY, film, recorded, sequences, transitions


def shrinks(pieces: np.ndarray) -> float:
    """Returns the compression factor of pieces that are compressed separately at level 3."""
    codec = zstandard.ZstdCompressor(3)
    return pieces.nbytes / sum(len(codec.compress(piece.tobytes())) for piece in pieces)


def test_the_same_seed_gives_the_same_and_another_seed_something_else() -> None:
    assert np.array_equal(film(20, seed=1), film(20, seed=1))
    assert not np.array_equal(film(20, seed=1), film(20, seed=2))
    assert (transitions(20, seed=1) == transitions(20, seed=1)).all()
    one, again, other = (sequences(3, seed=seed, text=True) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0]["tokens"], other[0]["tokens"])


def test_frames_shrink_about_as_those_of_atari_do() -> None:
    films = [film(80, seed=seed) for seed in range(6)]
    stacks = [np.stack([shown[at : at + STACK] for at in range(0, 76, 5)]) for shown in films]
    assert 6 < median(map(shrinks, films)) < 15
    assert 15 < median(map(shrinks, stacks)) < 30
    changed = [float(np.mean(shown[1:] != shown[:-1])) for shown in films]
    assert all(0.005 < share < 0.16 for share in changed)


def test_the_next_observation_is_that_of_the_step_behind_unless_an_episode_ends() -> None:
    data = transitions(500, seed=3)
    observation, after = data["observation"], data["next", "observation"]
    assert observation.shape == (500, STACK, SIZE, SIZE)
    over = data["next", "done"][:-1, 0]
    assert 0 < over.sum() < 10
    goes_on = (after[:-1] == observation[1:]).flatten(1).all(1)
    assert torch.equal(goes_on, ~over)
    assert torch.equal(after[:, :-1], observation[:, 1:])
    first = observation[1:][over]
    assert torch.equal(first, first[:, -1:].expand_as(first))
    assert 0 < data["next", "reward"].sum() < 100


def test_no_tensor_in_a_batch_of_steps_shares_its_memory() -> None:
    data = transitions(5)
    data["observation"].zero_()
    data["done"].fill_(True)
    assert data["next", "observation"].any()
    assert not data["next", "done"].any()
    assert not data["terminated"].any()


def test_sequences_are_of_every_length_between_the_shortest_and_the_longest() -> None:
    lengths = [len(item["tokens"]) for item in sequences(200)]
    assert lengths[:2] == [10, 10_000]
    assert min(lengths) >= 10
    assert max(lengths) <= 10_000
    for low, high in ((10, 100), (100, 1000), (1000, 10_000)):
        assert sum(low <= length < high for length in lengths) > 40
    assert [len(item["tokens"]) for item in sequences(1, shortest=4, longest=4)] == [4]


def test_a_sequence_has_a_logarithm_for_every_token_and_a_prompt_if_asked() -> None:
    plain, long = sequences(2)
    assert set(plain.keys()) == {"tokens", "logprobs", "reward"}
    assert long["tokens"].dtype is torch.int64
    assert long["tokens"].min() > 0
    assert long["tokens"].max() < VOCABULARY
    assert long["logprobs"].shape == long["tokens"].shape
    assert (long["logprobs"] <= 0).all()
    prompts = [item["prompt"] for item in sequences(5, text=True)]
    assert all(isinstance(prompt, str) for prompt in prompts)
    assert not all(map(str.isascii, prompts))


@pytest.mark.filterwarnings("ignore:pkg_resources is deprecated")  # warning of pygame
@pytest.mark.filterwarnings("ignore:.*avx2 capable:RuntimeWarning")  # warning of pygame
@pytest.mark.parametrize(
    ("environment", "renderer"), [("CartPole-v1", "pygame"), ("ALE/Breakout-v5", "ale_py")]
)
def test_frames_of_an_environment_are_recorded_where_its_renderer_is(
    environment: str, renderer: str
) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip(renderer, reason=f"{environment} is rendered by {renderer}")
    frames = recorded(environment, 30, seed=1)
    assert frames.shape == (30, SIZE, SIZE)
    assert np.array_equal(frames, recorded(environment, 30, seed=1))
    assert (frames[1:] != frames[:-1]).any()
    assert shrinks(frames) > 5
