"""Several rings that are sampled as one buffer: draws and weights. Real rings, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("ray")

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.distributed.message import pack, unpack
from shmbuffer.distributed.shards.member import Member
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard import Shard
from shmbuffer.distributed.shards.shard_batches import SHARD, ShardBatches
from shmbuffer.distributed.shards.shard_pieces import (
    apply_update,
    draw_piece,
    identity_in,
    join_parts,
)
from shmbuffer.distributed.shards.shares import ShardMass, effective_size, factors_of
from tests.kit.rings import ring_of

SIZES = {"a": 2_000, "b": 400, "c": 20}


class Here(Member):
    """A shard in this process: a ring without a keeper."""

    def __init__(self, node: str, buffer: ReplayBuffer) -> None:
        self.node, self.buffer = node, buffer
        self._where = "here"
        self.identity = None
        self.lives, self.life, self._why = True, 0, ""
        self.sent, self._waiting = [], []
        self.look()

    def near(self, group: str) -> Any:
        return self.buffer


class Three(Members):
    """Three shards in this process."""

    def __init__(self, members: list[Here]) -> None:
        self._members = {member.node: member for member in members}
        self._absent = []
        self.stale = False

    def refresh(self, *, all_of_them: bool = False) -> None:
        for member in () if self.stale else self.living():
            member.look()

    def send_what_waits(self) -> None:
        """Does nothing, because no message waits."""

    def answers(self, asked: Any) -> Iterator[Any]:
        assert not list(asked)
        return iter(())


def prioritized(path: Path, capacity: int, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=path),
        **{"alpha": 0.7, "beta": 1.0, "priority_key": "p", "batch_size": 64, **options},
    )


def items(first: int, count: int, random: np.random.Generator) -> TensorDict:
    a = torch.arange(first, first + count)
    priority = torch.from_numpy(random.exponential(size=count) + 0.01)
    return TensorDict({"a": a, "x": (a % 7).double() * priority, "p": priority}, [count])


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Three]:
    """Makes three shards of very unequal sizes and priorities; item ``a`` is in one of them."""
    random, first, members = np.random.default_rng(0), 0, []
    for at, (node, size) in enumerate(SIZES.items()):
        buffer = prioritized(tmp_path / node, size)
        data = items(first, size, random)
        data["p"] *= 10.0**at
        buffer.extend(data)
        members.append(Here(node, buffer))
        first += size
    three = Three(members)
    yield three
    for member in members:
        member.buffer.close()
    three._members.clear()  # pytest keeps the fixture longer than the maps may stay


def contents(shards: Three) -> TensorDict:
    return torch.cat([member.buffer[:] for member in shards])


def masses(shards: Three) -> np.ndarray:
    return np.concatenate([ring_of(member.buffer).tree.mass() for member in shards])


def batches_of(shards: Three, home: str | None = None) -> ShardBatches:
    first = next(iter(shards))
    return ShardBatches(shards, Shard(first.buffer, lambda _: b"", first.node).face(), home)


def drawn(batches: ShardBatches, count: int, rounds: int, beta: float = 1.0) -> Iterator[Any]:
    for key in range(rounds):
        yield batches.finish(*batches.begin(count, [key * 7919 + 1], beta))


def standard_deviations(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns how far a chi-square statistic is above its mean, in standard deviations."""
    often = expected >= 5
    rest = found[~often].sum(), expected[~often].sum()
    found = np.append(found[often], rest[0])
    expected = np.append(expected[often], max(rest[1], 1e-9))
    degrees = len(found) - 1
    return float((((found - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def test_draws_are_those_of_one_buffer_that_holds_all_items(shards: Three) -> None:
    mass = masses(shards)
    draws = 200 * 1_000
    found = np.zeros(len(mass))
    for data, _ in drawn(batches_of(shards), 1_000, 200):
        found += np.bincount(data["a"].numpy(), minlength=len(mass))
    assert found.sum() == draws
    assert abs(standard_deviations(found, draws * mass / mass.sum())) < 5


def test_weights_are_those_of_one_buffer_that_holds_all_items(shards: Three) -> None:
    mass = masses(shards)
    for beta in (0.0, 0.4, 1.0):
        for data, info in drawn(batches_of(shards), 500, 3, beta):
            expected = (mass[data["a"].numpy()] / mass.min()) ** -beta
            np.testing.assert_allclose(info["_weight"].numpy(), expected, rtol=1e-5)
            assert info["_weight"] is info["priority_weight"]


def test_one_shard_gives_what_its_buffer_gives_bit_for_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    with prioritized(tmp_path / "one", 300) as buffer:
        buffer.extend(items(0, 300, random))
        batches = batches_of(Three([Here("one", buffer)]))
        for key, (data, info) in enumerate(drawn(batches, 256, 5, 0.6)):
            own, index, tickets, weights = buffer.storage.draw(256, key * 7919 + 1, 0.6)
            assert torch.equal(data["a"], own["a"])
            assert torch.equal(info["index"], index)
            assert torch.equal(info["index_generation"], tickets)
            assert torch.equal(info["_weight"], weights)


@pytest.mark.parametrize("believed", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.7), (3.0, 0.2, 1.0)])
def test_the_weighted_mean_is_right_whatever_the_shares_are(
    shards: Three, believed: tuple[float, ...]
) -> None:
    batches = batches_of(shards)
    everything = contents(shards)
    truth = everything["x"].mean().item()
    means = []
    for key in range(300):
        shards.stale = True
        for member, factor in zip(shards, believed, strict=True):
            member.look()
            totals = member.totals
            member.totals = totals._replace(mass=totals.mass * factor)
        data, info = batches.finish(*batches.begin(1_000, [key], 1.0))
        # Not divided by the sum of the weights, because a mean of ratios is biased.
        means.append((info["_weight"].double() * data["x"]).mean().item())
    mass = masses(shards)
    scale = scale_of_weights(shards, believed, mass)
    means = np.array(means) * scale
    error = means.std() / np.sqrt(len(means))
    assert abs(means.mean() - truth) < 4 * error
    assert error < 0.1 * truth


def scale_of_weights(shards: Three, believed: tuple[float, ...], mass: np.ndarray) -> float:
    """Returns the constant factor between the mean of ``weight * x`` and the mean of x."""
    # weight = least(q) / q with q the probability used; mean of x / (n q) is the mean of x.
    shares = [ring_of(one.buffer).totals().mass for one in shards]
    share = np.array(shares) * believed
    share /= share.sum()
    bounds = np.cumsum([0, *SIZES.values()])
    used = np.concatenate(
        [
            share[at] * mass[low:high] / mass[low:high].sum()
            for at, (low, high) in enumerate(pairwise(bounds))
        ]
    )
    return 1 / (used.min() * len(mass))


def test_a_batch_of_the_own_node_weighs_what_it_is_among_the_learners(shards: Three) -> None:
    everything = contents(shards)
    truth = everything["x"].mean().item()
    mass, bounds = masses(shards), np.cumsum([0, *SIZES.values()])
    used = np.concatenate(
        [mass[low:high] / mass[low:high].sum() / 3 for low, high in pairwise(bounds)]
    )
    means = []
    for member in shards:
        batches = batches_of(shards, member.node)
        own = [
            (info["_weight"].double() * data["x"]).mean().item()
            for data, info in drawn(batches, 1_000, 100)
        ]
        means.append(np.array(own))
    mean = np.mean(means, axis=0) / (used.min() * len(mass))
    assert abs(mean.mean() - truth) < 4 * mean.std() / np.sqrt(len(mean))


def test_a_shard_that_is_emptied_meanwhile_is_drawn_for_by_the_others(shards: Three) -> None:
    batches = batches_of(shards)
    shards.stale = True
    gone = shards.at("a")
    assert isinstance(gone, Here)
    gone.buffer.empty()
    data, info = batches.finish(*batches.begin(500, [3], 1.0))
    assert len(data) == 500
    assert gone.identity not in info[SHARD].tolist()
    mass = masses(shards)
    there = mass[mass > 0]
    expected = mass[data["a"].numpy()] / there.min()
    np.testing.assert_allclose(info["_weight"].numpy(), 1 / expected, rtol=1e-5)


def test_the_weights_leave_out_a_shard_that_was_lost(shards: Three) -> None:
    masses_of = {one.node: ring_of(one.buffer).tree.mass() for one in shards}
    dead = min(masses_of, key=lambda node: masses_of[node].min())
    lost = shards.at(dead)
    assert lost is not None
    lost.lose("test")
    living = np.concatenate([mass for node, mass in masses_of.items() if node != dead])
    mass = masses(shards)
    assert mass.min() < living.min()
    for data, info in drawn(batches_of(shards), 500, 3):
        assert lost.identity not in info[SHARD].tolist()
        expected = living.min() / mass[data["a"].numpy()]
        np.testing.assert_allclose(info["_weight"].numpy(), expected, rtol=1e-5)


def test_nothing_in_any_shard_is_an_empty_buffer_that_names_who_is_missing(shards: Three) -> None:
    for member in shards:
        member.buffer.empty()
    dead = shards.at("b")
    assert dead is not None
    dead.lose("test")
    with pytest.raises(EmptyBufferError, match="no answer from the shards of b"):
        batches_of(shards).begin(10, [1], 1.0)


def test_shards_without_priorities_draw_by_their_lengths(tmp_path: Path) -> None:
    members = []
    for first, node in enumerate("ab"):
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(300, scratch_dir=tmp_path / node))
        rb.extend(TensorDict({"a": torch.arange(100 + 200 * first)}, [100 + 200 * first]))
        members.append(Here(node, rb))
    found = 0
    for _, info in drawn(batches_of(Three(members)), 1_000, 20, beta=None):  # type: ignore[arg-type]
        assert "_weight" not in info
        found += (info[SHARD] == members[0].identity).sum().item()
    assert abs(found - 5_000) < 5 * np.sqrt(20_000 * 0.25 * 0.75)
    for member in members:
        member.buffer.close()


def test_masses_that_are_all_zero_count_for_nothing_beside_others(tmp_path: Path) -> None:
    zero = prioritized(tmp_path / "zero", 10, eps=0.0)
    more = prioritized(tmp_path / "more", 10, eps=0.0)
    zero.extend(TensorDict({"a": torch.arange(10), "p": torch.zeros(10)}, [10]))
    more.extend(TensorDict({"a": torch.arange(10, 15), "p": torch.ones(5) * 1e-6}, [5]))
    both = Three([Here("zero", zero), Here("more", more)])
    for data, _ in drawn(batches_of(both), 100, 3):
        assert data["a"].min() >= 10
    more.update_priority(torch.arange(5), torch.zeros(5))
    seen = set()
    for data, info in drawn(batches_of(both), 200, 3):
        seen |= set(data["a"].tolist())
        assert (info["_weight"] == 1).all()
    assert seen == set(range(15))
    zero.close()
    more.close()


def test_the_largest_priority_travels_to_the_other_shards(shards: Three) -> None:
    batches = batches_of(shards)
    for _ in drawn(batches, 2_000, 2):
        pass
    largest = contents(shards)["p"].max().item()
    for member in shards:
        assert ring_of(member.buffer).tree.max_priority == largest


def test_priorities_of_another_buffer_in_the_place_of_a_shard_are_lost(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    with prioritized(tmp_path / "one", 30) as buffer:
        buffer.extend(items(0, 30, random))
        own = identity_in(buffer, "n")
        index, raw = np.arange(3), np.full(3, 9.0)
        assert apply_update(buffer, "n", own + 1, index, raw, None) == (0, 0, 3)
        assert apply_update(buffer, "m", own, index, raw, None) == (0, 0, 3)
        assert apply_update(buffer, "n", own, index, raw, None) == (3, 0, 0)
        stale = np.array([0, 31, 2])
        assert apply_update(buffer, "n", own, index, raw, stale) == (2, 1, 0)


def test_a_piece_arrives_as_it_was_and_its_tensors_lie_in_the_message(tmp_path: Path) -> None:
    data = TensorDict(
        {
            "image": torch.arange(2 * 3 * 5, dtype=torch.uint8).view(2, 3, 5),
            "none": torch.empty(2, 0),
            "half": torch.randn(2, 3).bfloat16(),
            "flag": torch.tensor([True, False]),
            "next": {"x": torch.randn(4, 2).T},
        },
        [2],
    )
    message = pack((data, {"index": torch.arange(2), "text": ["a", "b"]}, np.arange(3)))
    message.flags.writeable = False
    found, info, array = unpack(message)
    assert set(found.keys(True, True)) == set(data.keys(True, True))
    for key in data.keys(True, True):
        assert found[key].dtype is data[key].dtype
        assert torch.equal(found[key], data[key])
    assert (info["index"].tolist(), info["text"], array.tolist()) == ([0, 1], ["a", "b"], [0, 1, 2])
    begin = message.ctypes.data
    for key in ("image", "half"):
        assert begin < found[key].data_ptr() < begin + message.nbytes
        assert found[key].data_ptr() % 64 == begin % 64


def test_what_cannot_be_imported_travels_by_value() -> None:
    twice = lambda x: 2 * x  # noqa: E731 - it has no name to import it by
    tensor, function = unpack(pack((torch.arange(3), twice)))
    assert (tensor.tolist(), function(4)) == ([0, 1, 2], 8)


def test_pieces_of_any_form_become_one_batch_and_what_cannot_says_so() -> None:
    ragged = [
        torch.stack([torch.zeros(2)]),
        torch.stack([torch.ones(2), torch.ones(2)]),
    ]
    assert join_parts(ragged).shape == (3, 2)
    pair = join_parts([(torch.zeros(1), [1]), (torch.ones(2), [2, 3])])
    assert pair[0].tolist() == [0, 1, 1]
    assert pair[1] == [1, 2, 3]
    lazy = [TensorDict.lazy_stack([TensorDict({"x": torch.zeros(n)}, [])]) for n in (1, 2)]
    assert [len(item["x"]) for item in join_parts(lazy).unbind(0)] == [1, 2]
    places = torch.tensor([2, 0, 1]).split([1, 2])
    data = [TensorDict({"x": torch.arange(n), "y": {"z": torch.ones(n, 2)}}, [n]) for n in (1, 2)]
    assert join_parts(data, places)["x"].tolist() == [0, 1, 0]
    assert join_parts(data, places)["y", "z"].shape == (3, 2)
    assert join_parts([[0], [10, 11]], places) == [10, 11, 0]
    assert [
        len(item["x"]) for item in join_parts([lazy[1], lazy[0], lazy[0]], places).unbind(0)
    ] == [
        1,
        1,
        2,
    ]
    with pytest.raises(TypeError, match="objects of type object, which cannot be joined"):
        join_parts([object(), object()])


def test_factors_of_one_shard_are_one_and_a_batch_says_its_effective_size() -> None:
    assert factors_of([ShardMass(0.3, 7.7, 0.1), ShardMass(0.3, 7.7, 0.1)], [], 0.9) == [1.0, 1.0]
    assert effective_size([1.0, 1.0, 1.0]) == 3
    assert effective_size([1.0, 0.0]) == 1
    assert effective_size([]) == 0


def test_a_piece_by_a_sampler_of_passes_is_decided_by_the_key(tmp_path: Path) -> None:
    from shmbuffer import SliceSampler

    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "rb"),
        sampler=SliceSampler(slice_len=4, traj_key="t"),
        batch_size=8,
    )
    rb.extend(TensorDict({"t": torch.arange(40) // 10, "a": torch.arange(40)}, [40]))
    first, again = (draw_piece(rb, "n", 8, 5, None, 0.0) for _ in range(2))
    assert torch.equal(first.data["a"], again.data["a"])
    assert first.data["a"][:4].diff().tolist() == [1, 1, 1]
    assert first.totals.length == 40
    rb.close()
