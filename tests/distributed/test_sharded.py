"""A buffer over nodes of a real Ray cluster, each with its own raylet, store and workers.

Two nodes, and three for the tests that only ``--full`` runs: each takes ten seconds of a processor.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

ray = pytest.importorskip("ray")

from shmbuffer import (  # noqa: E402 - Ray is an extra
    BufferClosedError,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    RateLimitTimeout,
    SchemaMismatchError,
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from shmbuffer.distributed.shards import sharded_buffer  # noqa: E402
from shmbuffer.distributed.shards.sharded_client import ShardedClient, ShardIndex  # noqa: E402
from shmbuffer.examples.loopback import Loopback  # noqa: E402
from tests.distributed.cluster import cluster_of, on  # noqa: E402
from tests.distributed.parts import Tied  # noqa: E402

Sizes = dict[str, int]


@pytest.fixture(scope="module")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """Returns the number of items for the shard of each node."""
    ours = [item for item in request.session.items if item.path == request.path]
    three = any(item.get_closest_marker("full") for item in ours)
    return {"a": 1_000, "b": 200, **({"c": 40} if three else {})}


@pytest.fixture(scope="module")
def cluster(sizes: Sizes) -> Iterator[Loopback]:
    with cluster_of("".join(sizes)) as made:
        yield made


def options(path: Path) -> dict[str, Any]:
    return {
        "replay_buffer_cls": TensorDictPrioritizedReplayBuffer,
        "storage": partial(LazyMemmapStorage, 2_000, scratch_dir=path, shared_init=True),
        "alpha": 0.7,
        "beta": 1.0,
        "priority_key": "p",
        "answer_timeout": 60.0,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def buffer(cluster: Loopback, directory: Path) -> Iterator[ShardedReplayBuffer]:
    """Makes a buffer for the module, because each one needs a process with torch on every node."""
    with ShardedReplayBuffer(name="tests", **options(directory)) as made:
        yield made


@pytest.fixture
def rb(buffer: ShardedReplayBuffer) -> Iterator[ShardedReplayBuffer]:
    yield buffer
    buffer.empty()
    buffer.detach()


def items(first: int, count: int, scale: float = 1.0) -> TensorDict:
    """Makes items with ``a`` i and a priority that follows from it."""
    a = torch.arange(first, first + count)
    return TensorDict({"a": a, "p": (a % 13 + 1.0) * scale}, [count])


def write(client: ShardedClient, data: TensorDict) -> tuple[str, int, str]:
    """Writes from a node; returns its name, the shard, and the path of the data."""
    out = client.extend(data)
    paths = [one.handle.paths["write"] for one in client._members if one.identity == out.shard]
    return client._node, out.shard, paths[0]


written = ray.remote(write)


def fill(rb: ShardedReplayBuffer, sizes: Sizes) -> dict[str, int]:
    """Writes items 0, 1, ... into each node's shard from that node; returns the shards by node."""
    found, first = {}, 0
    for at, (node, size) in enumerate(sizes.items()):
        data = items(first, size, 10.0**at)
        if node == "a":  # this process is on that node
            where, shard, path = write(rb.client(), data)
        else:
            where, shard, path = ray.get(written.options(**on(node)).remote(rb.client(), data))
        assert where == node
        assert path == "direct"
        found[node] = shard
        first += size
    return found


def test_writers_write_on_their_node_and_a_learner_draws_from_all(
    rb: ShardedReplayBuffer, sizes: Sizes, directory: Path
) -> None:
    shards = fill(rb, sizes)
    assert len(rb) == sum(sizes.values())
    assert rb.shards == {number: node for node, number in shards.items()}
    sample, info = rb.sample(256, return_info=True)
    bounds = np.cumsum([0, *sizes.values()])
    for node, low, high in zip(sizes, bounds, bounds[1:], strict=False):
        own = sample["shard"] == shards[node]
        assert own.any()
        a = sample["a"][own]
        assert ((a >= low) & (a < high)).all()
        assert torch.equal(a - low, sample["index"][own])
    assert 1 < info["effective_sample_size"] <= 256
    assert sample["_weight"] is sample["priority_weight"]
    stats = rb.stats()
    length, capacity = sum(sizes.values()), 2_000 * len(sizes)
    assert (stats["length"], stats["capacity"], stats["missing"]) == (length, capacity, [])
    assert {node: each["length"] for node, each in stats["shards"].items()} == sizes
    assert rb.local is not None
    index = rb.local.extend(items(9_000, 2))
    assert torch.equal(rb.local[index]["a"], torch.tensor([9_000, 9_001]))
    assert len(rb) == length + 2
    with attach(directory / "b") as one:  # any process of the node finds it by its path
        assert len(one) == sizes["b"]


@pytest.mark.full
@pytest.mark.parametrize("batches", [60, pytest.param(1_000, marks=pytest.mark.full)])
def test_draws_through_ray_are_those_of_one_buffer(
    rb: ShardedReplayBuffer, sizes: Sizes, batches: int
) -> None:
    fill(rb, sizes)
    learner = ShardedReplayBuffer.find("tests", prefetch=3, answer_timeout=60.0)
    count = sum(sizes.values())
    mass = mass_of(torch.arange(count)).numpy()
    found, draws = np.zeros(count), batches * 1_024
    for _ in range(batches):
        sample = learner.sample(1_024)
        a = sample["a"].numpy()
        np.testing.assert_allclose(sample["_weight"], mass.min() / mass[a], rtol=1e-5)
        found += np.bincount(a, minlength=count)
    learner.detach()
    expected = draws * mass / mass.sum()
    chi = ((found - expected) ** 2 / expected).sum()
    assert abs(chi - (count - 1)) < 5 * np.sqrt(2 * (count - 1))


def test_priorities_go_back_to_their_shards(
    rb: ShardedReplayBuffer, sizes: Sizes, directory: Path
) -> None:
    shards = fill(rb, sizes)
    sample = rb.sample(200)
    sample["p"] = torch.full((200,), 1e-3)
    found = rb.update_tensordict_priority(sample)
    assert (found.applied, found.stale, found.lost) == (200, 0, 0)
    again = rb.update_priority(sample)
    assert tuple(again) == (200, 0, 0), "it does no harm to send them twice"
    late = sample["index_generation"] + 2_000
    assert tuple(rb.update_priority(sample, generation=late)) == (0, 200, 0)
    with pytest.raises(TypeError, match="without priorities"):
        rb.update_priority(sample["index"], shard=sample["shard"])
    with attach(directory / "b") as one:
        mine = sample["shard"] == shards["b"]
        raw = one.sampler.state_dict()["_priorities"][sample["index"][mine]]
        assert torch.allclose(raw, torch.tensor(1e-3).double())
    late = sample.clone()
    late["index_generation"] += 2_000
    assert tuple(rb.update_tensordict_priority(late)) == (0, 200, 0)
    late["shard"] += 1
    assert tuple(rb.update_tensordict_priority(late)) == (0, 0, 200)
    with pytest.raises(ValueError, match="finite and non-negative"):
        rb.update_tensordict_priority(sample.set("p", torch.full((200,), float("nan"))))
    with pytest.raises(KeyError, match="no entry 'shard'"):
        rb.update_tensordict_priority(sample.exclude("shard").set("p", torch.ones(200)))


def test_what_a_write_returns_takes_priorities(rb: ShardedReplayBuffer) -> None:
    index = rb.extend(items(0, 5))
    assert isinstance(index, ShardIndex)
    assert tuple(rb.update_priority(index, torch.ones(5))) == (5, 0, 0)
    with pytest.raises(TypeError, match="needs shard="):
        rb.update_priority(index.index, torch.ones(5))
    one = rb.add(items(7, 1)[0])
    assert tuple(rb.update_priority(one, 2.0)) == (1, 0, 0)


@pytest.mark.full
def test_a_learner_of_one_node_draws_from_its_own_shard(
    rb: ShardedReplayBuffer, sizes: Sizes
) -> None:
    shards = fill(rb, sizes)
    learner = ShardedReplayBuffer.find("tests", locality="local", answer_timeout=60.0)
    assert set(learner.sample(500)["shard"].tolist()) == {shards["a"]}
    learner.detach()


@pytest.mark.full
def test_learners_of_different_ranks_draw_differently(
    rb: ShardedReplayBuffer, sizes: Sizes
) -> None:
    fill(rb, sizes)

    def drawn(rank: int | None) -> list[int]:
        learner = ShardedReplayBuffer.find("tests", rank=rank, answer_timeout=60.0)
        torch.manual_seed(3)
        found: list[int] = learner.sample(64)["a"].tolist()
        learner.detach()
        return found

    assert drawn(None) == drawn(0)
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(0)


@pytest.mark.full
def test_a_buffer_is_found_by_its_name(
    rb: ShardedReplayBuffer, sizes: Sizes, tmp_path: Path
) -> None:
    fill(rb, sizes)
    copy = pickle.loads(pickle.dumps(rb.client()))
    assert len(copy) == len(rb)
    copy.detach()
    with pytest.raises(ValueError, match="'tests' already exists"):
        ShardedReplayBuffer(name="tests", **options(tmp_path))
    with pytest.raises(ValueError, match="no sharded buffer 'other'"):
        ShardedReplayBuffer.find("other")


def test_waiting_for_items_says_how_many_are_there(rb: ShardedReplayBuffer) -> None:
    rb.extend(items(0, 10))
    assert len(rb.sample(4, min_size=10)) == 4
    with pytest.raises(
        RateLimitTimeout, match=r"the shards have 10 items, but 11 are needed; after 0\.05 s"
    ):
        rb.sample(4, min_size=11, timeout=0.05)


def test_an_error_in_a_shard_is_raised_where_it_was_asked_for(rb: ShardedReplayBuffer) -> None:
    rb.extend(items(0, 10))
    with pytest.raises(SchemaMismatchError, match="a"):
        rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    assert len(rb) == 10


def test_bad_arguments_are_refused_before_anything_is_made(
    cluster: Loopback, sizes: Sizes, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="is called once on each node"):
        ShardedReplayBuffer(storage=LazyTensorStorage(10))
    given = options(tmp_path)
    with pytest.raises(ValueError, match="locality must be 'global' or 'local'"):
        ShardedReplayBuffer(**given, locality="near")
    with pytest.raises(TypeError, match=r"^ShardedReplayBuffer\(transform=...\): this Tied cannot"):
        ShardedReplayBuffer(**given, transform=Tied())
    with pytest.raises(NotImplementedError, match="pass rank= to sample differently"):
        ShardedReplayBuffer(**given, generator=torch.Generator())
    most = rf"between 1 and {len(sizes)}, .* in the Ray cluster \({', '.join(sizes)}\); pass"
    with pytest.raises(ValueError, match=rf"nodes=4\) must be {most}"):
        ShardedReplayBuffer(**given, nodes=4)
    for nodes, why in (
        (0, "must be between"),
        (-1, "must be between"),
        ([], "must be present"),
        (["z"], "must be present"),
    ):
        with pytest.raises(ValueError, match=why):
            ShardedReplayBuffer(**given, nodes=nodes)
    with pytest.raises(TypeError, match="a number or a list of node names"):
        ShardedReplayBuffer(**given, nodes="a")  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="answer_timeout must be"):
            ShardedReplayBuffer.find("tests", answer_timeout=seconds)
    with pytest.raises(ValueError, match="locality must be"):
        ShardedReplayBuffer.find("tests", locality="near")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_without_ray_a_buffer_is_not_looked_for_in_a_new_cluster(
    rb: ShardedReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="is not connected to a Ray cluster"):
        ShardedReplayBuffer.find("tests")


def test_the_exponent_of_weights_is_checked_as_by_other_clients(rb: ShardedReplayBuffer) -> None:
    before = rb.beta
    for value, error in ((-0.5, ValueError), (float("nan"), ValueError), ("0.4", TypeError)):
        with pytest.raises(error, match=f"beta must be a finite number .*, got beta={value}"):
            rb.beta = value
    assert rb.beta == before == 1.0
    rb.beta = 0.4
    assert rb.beta == 0.4
    rb.beta = 1.0


def test_priorities_that_are_not_one_for_each_item_are_refused(rb: ShardedReplayBuffer) -> None:
    shard = rb.extend(items(0, 10)).shard
    for given in ({"shard": [shard] * 3}, {"shard": shard, "generation": [0] * 3}):
        with pytest.raises(ValueError, match="of 2 items needs one value per item, got"):
            rb.update_priority([0, 1], [1.0, 1.0], **given)


def test_a_load_that_is_refused_changes_nothing(rb: ShardedReplayBuffer, tmp_path: Path) -> None:
    rb.extend(items(0, 10))
    with pytest.raises(FileNotFoundError, match=r"shards\.json: no such file"):
        rb.loads(tmp_path)
    one = TensorDictPrioritizedReplayBuffer(storage=LazyMemmapStorage(3_000), alpha=0.7, beta=1.0)
    one.extend(items(0, 3_000))  # more than fits into a shard
    one.dumps(tmp_path / "storage" / "z")
    (tmp_path / "storage" / "shards.json").write_text('{"nodes": ["z"]}')
    with pytest.raises(ValueError, match=r"capacity of 2000"):
        rb.loads(tmp_path)
    assert len(rb) == 10


@pytest.mark.full
def test_actors_that_do_not_start_are_named_and_ended(
    cluster: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_buffer, "START_S", 0.0)
    said = r"has not started its map within 0 s; .* are free\..* set RAY_worker_niceness=0"
    with pytest.raises(TimeoutError, match=said):
        ShardedReplayBuffer(name="late", **options(tmp_path))
    with pytest.raises(ValueError, match="no sharded buffer 'late'"):
        ShardedReplayBuffer.find("late")


@pytest.mark.full
def test_a_save_loads_on_the_same_nodes_and_on_others(
    rb: ShardedReplayBuffer, sizes: Sizes, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="nothing was written"):
        rb.dumps(tmp_path / "save")
    fill(rb, sizes)
    rb.dumps(tmp_path / "save")
    (first,) = (tmp_path / "save").glob("shards-*")
    rb.dumps(tmp_path / "save")
    (second,) = (tmp_path / "save").glob("shards-*")
    assert first != second
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(EmptyBufferError, match="empty buffer"):
        rb.sample(8)
    rb.loads(tmp_path / "save")
    assert len(rb) == sum(sizes.values())
    require_its_priorities(rb.sample(1_024))
    with ShardedReplayBuffer(nodes=["a", "b"], **options(tmp_path / "two")) as two:
        two.loads(tmp_path / "save")
        assert len(two) == sum(sizes.values())
        after = two.sample(1_024)
        assert len(set(after["shard"].tolist())) == 2
        require_its_priorities(after)
        two.empty()
        two.extend(items(0, 100))
        # A node without a shard writes into the shard with the most space.
        where, shard, path = ray.get(written.options(**on("c")).remote(two.client(), items(0, 10)))
        assert where == "c"
        assert two.shards[shard] == "b"
        assert path == "its owner runs on the node b"
    for use in (
        two.client,
        lambda: two.sample(8),
        lambda: len(two),
        lambda: two.extend(items(0, 1)),
    ):
        with pytest.raises(BufferClosedError):
            use()
    (second / "c").rename(second / "d")
    rb.extend(items(0, 10))
    with pytest.raises(FileNotFoundError, match="no save of the shards of c"):
        rb.loads(tmp_path / "save")
    assert len(rb) > 10, "nothing was changed"
    with ShardedReplayBuffer(nodes=2, **options(tmp_path / "two")) as two:
        assert len(two) == 110, "what was in the directories of the nodes is there again"


def require_its_priorities(sample: TensorDict) -> None:
    product = sample["_weight"] * mass_of(sample["a"])
    assert product.min().item() == pytest.approx(product.max().item(), rel=1e-5)


def mass_of(a: torch.Tensor) -> torch.Tensor:
    """Returns the masses of items that `fill` wrote."""
    scale = 10.0 ** ((a >= 1_000).double() + (a >= 1_200).double())
    return ((a % 13 + 1.0) * scale + 1e-8) ** 0.7
