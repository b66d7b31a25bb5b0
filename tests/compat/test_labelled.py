"""Staleness and prompt groups agree with TorchRL: items, information, states and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

torchrl = pytest.importorskip("torchrl.data")
theirs = pytest.importorskip("torchrl.data.replay_buffers.samplers")

import shmbuffer  # noqa: E402


def pair(sampler: str, data: TensorDict, **options: Any) -> list[Any]:
    """Makes TorchRL's buffer and ours with the same items."""
    made = []
    for family, samplers in ((torchrl, theirs), (shmbuffer, shmbuffer)):
        storage = family.LazyTensorStorage(len(data))
        one = getattr(samplers, sampler)(**options)
        rb = family.TensorDictReplayBuffer(storage=storage, sampler=one)
        rb.extend(data.clone())
        made.append(rb)
    return made


def versioned(versions: list[int]) -> TensorDict:
    return TensorDict({"policy_version": torch.tensor(versions)}, [len(versions)])


# -- staleness -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(9, 12), st.integers(-1, 9))
@settings(max_examples=60, deadline=None)
def test_the_same_items_are_fresh_enough_and_equally_stale(
    versions: list[int], consumer: int, most: int
) -> None:
    both = pair("StalenessAwareSampler", versioned(versions), max_staleness=most)
    fresh = {at for at, one in enumerate(versions) if most < 0 or consumer - one <= most}
    for rb in both:
        rb.sampler.consumer_version = consumer
        if not fresh:
            with pytest.raises(RuntimeError, match="exceed max_staleness"):
                rb.sample(1)
            continue
        sample = rb.sample(len(fresh))  # each item once
        index = sample["index"].tolist()
        assert sorted(index) == sorted(fresh)
        assert sample["staleness"].dtype is torch.float32
        assert sample["staleness"].tolist() == [consumer - versions[at] for at in index]
        more = rb.sample(3 * len(fresh))
        assert {*more["index"].tolist()} <= fresh


def test_items_are_equally_often_drawn() -> None:
    versions = [0, 3, 3, 9, 8, 5, 9, 2]
    shares = []
    for rb in pair("StalenessAwareSampler", versioned(versions)):
        rb.sampler.consumer_version = 9
        torch.manual_seed(0)
        drawn = torch.cat([rb.sample(3)["index"] for _ in range(8000)])
        shares.append(torch.bincount(drawn, minlength=8) / len(drawn))
    assert torch.allclose(shares[0], shares[1], atol=0.01)


def test_versions_and_states_have_the_same_names() -> None:
    for rb in pair("StalenessAwareSampler", versioned([1]), max_staleness=4):
        sampler = rb.sampler
        sampler.consumer_version = 3
        sampler.increment_consumer_version()
        sampler.max_staleness = 5
        assert dict(sampler.state_dict()) == {"consumer_version": 4, "max_staleness": 5}
        assert repr(sampler) == "StalenessAwareSampler(consumer_version=4, max_staleness=5)"
        sampler.load_state_dict({"consumer_version": 7, "max_staleness": 2})
        assert (sampler.consumer_version, sampler.max_staleness) == (7, 2)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_sampler_loads_what_the_other_has_saved(tmp_path: Path, writer: int) -> None:
    both = pair("StalenessAwareSampler", versioned([1]))
    both[writer].sampler.load_state_dict({"consumer_version": 7, "max_staleness": 2})
    both[writer].sampler.dumps(tmp_path / "sampler")
    reader = both[1 - writer].sampler
    reader.loads(tmp_path / "sampler")
    assert (reader.consumer_version, reader.max_staleness) == (7, 2)


def test_a_key_that_is_not_there_is_a_key_error() -> None:
    for rb in pair("StalenessAwareSampler", versioned([1]), version_key="other"):
        with pytest.raises(KeyError, match="other"):
            rb.sample(1)


# -- groups ----------------------------------------------------------------------------------------


def grouped(keys: list[int], rewards: list[float]) -> TensorDict:
    count = len(keys)
    reward = torch.tensor(rewards, dtype=torch.float32)[:, None]
    return TensorDict({"query": torch.tensor(keys), "next": {"reward": reward}}, [count])


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=20),
    st.permutations(range(20)),
    st.sampled_from(["recency", "reward", "variance"]),
    st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_the_same_items_of_a_group_are_drawn(
    keys: list[int], order: list[int], strategy: str, wanted: int
) -> None:
    rewards = [float(one**2 % 37) + one / 64 for one in order[: len(keys)]]
    counts = {key: keys.count(key) for key in keys}
    if min(counts.values()) < wanted:
        return
    found = []
    for rb in pair(
        "PromptGroupSampler",
        grouped(keys, rewards),
        samples_per_group=wanted,
        strategy=strategy,
    ):
        sample = rb.sample(wanted * len(counts))
        groups = sample["query"].view(-1, wanted)
        assert (groups == groups[:, :1]).all()
        index = sample["index"].reshape(-1, wanted).sort(1).values.tolist()
        found.append(sorted(index))
    assert found[0] == found[1]


def test_a_batch_is_balanced_and_complete_where_groups_are_short() -> None:
    for rb in pair("PromptGroupSampler", grouped([1, 1, 2], [0.0, 1.0, 2.0]), num_groups=2):
        with pytest.warns(UserWarning, match="sampled more than once|with replacement"):
            sample = rb.sample(6)
        groups = sample["query"].view(2, 3)
        assert (groups == groups[:, :1]).all()
        assert {*groups[:, 0].tolist()} == {1, 2}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, TypeError),
        ({"num_groups": 1, "samples_per_group": 1}, TypeError),
        ({"num_groups": 1.0}, TypeError),
        ({"num_groups": True}, TypeError),
        ({"num_groups": 0}, ValueError),
        ({"samples_per_group": -1}, ValueError),
        ({"num_groups": 1, "strategy": "other"}, ValueError),
    ],
)
def test_the_same_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    for sampler in (theirs.PromptGroupSampler, shmbuffer.PromptGroupSampler):
        with pytest.raises(error):
            sampler(**options)


@pytest.mark.parametrize(
    ("options", "size", "error"),
    [
        ({"num_groups": 2}, 3, ValueError),
        ({"samples_per_group": 2}, 3, ValueError),
        ({"num_groups": 1, "group_key": "other"}, 2, (KeyError, AttributeError, TypeError)),
    ],
)
def test_the_same_batches_are_refused(options: dict[str, Any], size: int, error: Any) -> None:
    for rb in pair("PromptGroupSampler", grouped([1, 1, 2], [0.0, 1.0, 2.0]), **options):
        with pytest.raises(error):
            rb.sample(size)
