"""Flow control over three nodes of a Ray cluster, also under kills."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.items import numbered

ray = pytest.importorskip("ray")

from shmbuffer import (  # noqa: E402 - Ray is an extra
    LazyMemmapStorage,
    RateLimiter,
    RateLimitError,
    RateLimitTimeout,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.distributed.shards.shard_saves import Gate, _save_at_once  # noqa: E402
from shmbuffer.examples.loopback import Loopback  # noqa: E402
from tests.distributed.cluster import cluster_of, kill, on, pid_of, stop  # noqa: E402

pytestmark = pytest.mark.full

CAPACITY = 20_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with cluster_of("abc") as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Checks at the end of the module only, because Ray restarts killed actors of its buffer."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def buffer(cluster: Loopback, directory: Path) -> Iterator[ShardedReplayBuffer]:
    storage = partial(LazyMemmapStorage, CAPACITY, scratch_dir=directory, shared_init=True)
    with ShardedReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=storage,
        name="flow",
        answer_timeout=20.0,
        rate_limiter=limiter(100),
    ) as made:
        yield made


@pytest.fixture
def rb(buffer: ShardedReplayBuffer) -> Iterator[ShardedReplayBuffer]:
    yield buffer
    buffer.set_rate(None)
    buffer.empty()
    buffer.detach()


def limiter(error_buffer: float, ratio: float = 2, **options: Any) -> RateLimiter:
    return RateLimiter(ratio, error_buffer=error_buffer, when_no_peer="wait", **options)


class Peer:
    """A writer and a learner on a node."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def pid(self) -> int:
        return os.getpid()

    def write(self, count: int, size: int, timeout: float | None = 0.0) -> int:
        """Writes up to ``count`` batches; returns the number of items written."""
        written = 0
        for _ in range(count):
            try:
                self.client.extend(numbered(0, size), timeout=timeout)
            except RateLimitTimeout:
                break
            written += size
        return written

    def write_one(self, number: int) -> None:
        self.client.extend(numbered(number, 1))

    def draw(self, count: int, size: int, timeout: float) -> int:
        """Draws up to ``count`` samples; returns the number of items drawn."""
        for at in range(count):
            try:
                self.client.sample(size, timeout=timeout)
            except RateLimitTimeout:
                return at * size
        return count * size


def peer(rb: ShardedReplayBuffer, node: str) -> Any:
    made = ray.remote(Peer).options(**on(node)).remote(rb.client())
    ray.get(made.__ray_ready__.remote())
    return made


@pytest.fixture(scope="module")
def peers(buffer: ShardedReplayBuffer) -> Iterator[dict[str, Any]]:
    """Makes a peer on each node."""
    made = {node: peer(buffer, node) for node in "abc"}
    yield made
    for one in made.values():
        ray.kill(one)


def counts(rb: ShardedReplayBuffer) -> tuple[int, int]:
    """Returns the items written and drawn since the shards exist."""
    shards = rb.stats()["shards"].values()
    return sum(int(one["inserts"]) for one in shards), sum(
        int(one["items_sampled"]) for one in shards
    )


def wait_until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)


LONG = 60.0  # for calls that must succeed, on however slow a machine
VAIN = 0.5  # for calls that must not succeed


def repeat(count: int, call: Callable[[], Any]) -> None:
    for _ in range(count):
        call()


def require_in_step(
    rb: ShardedReplayBuffer, inserts: int, drawn: int, ratio: float, most: float
) -> int:
    """Compares the counts since these values with the ratio; returns the number of items drawn."""
    # the counts are read at several times, but they only grow
    before, after = counts(rb), counts(rb)
    assert (before[0] - inserts) * ratio - (after[1] - drawn) <= most
    assert (after[0] - inserts) * ratio - (before[1] - drawn) >= -most
    return after[1] - drawn


def test_writers_and_learners_on_three_nodes_keep_the_ratio(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    """A node writes much more than another one, and a third node draws."""
    rb.set_rate(limiter(400, ratio=4, min_size=100))
    inserts, drawn = counts(rb)
    writing = [
        peers["b"].write.remote(100, 10, LONG),
        peers["c"].write.remote(150, 1, LONG),
    ]
    drawing = peers["a"].draw.remote(60, 64, LONG)
    wait_until(lambda: require_in_step(rb, inserts + 100, drawn, 4, 400) == 60 * 64)
    assert ray.get([*writing, drawing]) == [1_000, 150, 60 * 64]
    assert counts(rb) == (inserts + 1_150, drawn + 60 * 64)
    assert ray.get(peers["b"].write.remote(1, 11, VAIN)) == 0, "it would be 1161"
    assert ray.get(peers["c"].write.remote(10, 1, LONG)) == 10, "what others do not need"


def test_a_sample_waits_for_items_of_all_shards_and_says_what_it_waits_for(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(40, min_size=30))
    assert rb.rate_limiter == limiter(40, min_size=30)
    assert ray.get(peers["b"].write.remote(1, 20, LONG)) == 20
    with pytest.raises(
        RateLimitTimeout, match=r"the shards have 20 items, but 30 are needed; after 0\.5 s"
    ):
        rb.sample(4, timeout=VAIN)
    assert ray.get(peers["c"].write.remote(1, 12, LONG)) == 12
    assert len(rb.sample(4, timeout=LONG)) == 4
    waits = r"sample waits: 2 samples per insert are required, .* \(32 items written, \d+ sampled"
    with pytest.raises(RateLimitTimeout, match=waits):
        repeat(20, lambda: rb.sample(8, timeout=2.0))
    with pytest.raises(RateLimitTimeout, match="the quota of this shard is"):
        repeat(20, lambda: rb.extend(numbered(0, 4), timeout=2.0))
    with pytest.raises(RateLimitError, match="must be at least 50 to sample 100"):
        rb.sample(100)
    assert rb.set_rate(samples_per_insert=4) == limiter(40, ratio=4, min_size=30)
    with pytest.raises(ValueError, match="min_size must be at most 60,000"):
        rb.set_rate(min_size=70_000)
    with pytest.raises(ValueError, match="must not have max_times_sampled"):
        rb.set_rate(RateLimiter(max_times_sampled=1))
    assert rb.set_rate(None) is None
    assert len(rb.sample(100, timeout=LONG)) == 100
    rb.extend(numbered(0, 1_000), timeout=LONG)


def test_who_writes_from_elsewhere_waits_without_holding_up_the_keeper(
    rb: ShardedReplayBuffer, peers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on a node without a shard writes batches larger than a part of a quota."""
    rb.set_rate(limiter(200, ratio=1))
    monkeypatch.setattr("shmbuffer.distributed.shards.sharded_client.own_node", lambda: "elsewhere")
    other = rb.client()
    for _ in range(4):
        other.extend(numbered(0, 50), timeout=LONG)
    with pytest.raises(RateLimitTimeout, match="the quota of this shard is"):
        other.extend(numbered(0, 50), timeout=VAIN)
    for _ in range(5):
        rb.sample(10, timeout=LONG)
    other.extend(numbered(0, 50), timeout=LONG)
    other.detach()


def test_the_next_map_goes_on_where_the_last_one_was(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(200))
    inserts, drawn = counts(rb)
    assert ray.get(peers["b"].write.remote(10, 10, LONG)) == 100
    ray.kill(rb._map, no_restart=False)
    assert rb.rate_limiter == limiter(200)
    assert ray.get(peers["b"].write.remote(1, 10, VAIN)) == 0
    for _ in range(20):
        rb.sample(10, timeout=LONG)
    assert ray.get(peers["b"].write.remote(10, 10, LONG)) == 100
    assert ray.get(peers["b"].write.remote(1, 10, VAIN)) == 0
    assert require_in_step(rb, inserts + 1, drawn, 2, 200) == 200


def test_who_writes_in_memory_keeps_to_the_quota_while_the_keeper_is_dead(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(240))
    inserts, drawn = counts(rb)
    assert ray.get(peers["b"].write.remote(60, 1, LONG)) == 60
    keeper = next(one.keeper for one in rb._members if one.node == "b")
    ray.kill(keeper, no_restart=False)
    by_quota = ray.get(peers["b"].write.remote(1_000, 1, 0.0))
    assert by_quota <= 61
    assert ray.get(peers["b"].write.remote(61 - by_quota, 1, LONG)) == 61 - by_quota
    assert ray.get(peers["b"].write.remote(1, 1, VAIN)) == 0
    for _ in range(10):
        rb.sample(10, timeout=LONG)
    assert ray.get(peers["b"].write.remote(50, 1, LONG)) == 50
    assert ray.get(peers["b"].write.remote(1, 1, VAIN)) == 0
    assert require_in_step(rb, inserts + 1, drawn, 2, 240) == 100


def test_what_a_killed_learner_had_been_granted_others_draw(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(400, ratio=1))
    inserts, drawn = counts(rb)
    assert ray.get(peers["b"].write.remote(10, 10, LONG)) == 100
    learner = peer(rb, "c")
    assert ray.get(learner.draw.remote(1, 10, LONG)) == 10
    os.kill(ray.get(learner.pid.remote()), signal.SIGKILL)
    for _ in range(48):
        rb.sample(10, timeout=LONG)
    with pytest.raises(RateLimitTimeout):
        rb.sample(10, timeout=VAIN)
    assert require_in_step(rb, inserts + 1, drawn, 1, 400) == 490


def test_a_save_of_one_moment_has_what_was_before_what_it_has(
    rb: ShardedReplayBuffer, peers: dict[str, Any], tmp_path: Path
) -> None:
    """Item n is written on one node, then on the next node, and only then item n + 1."""
    rb.set_rate(None)
    chain = [peers["b"], peers["c"], peers["a"]]
    for one in chain:
        ray.get(one.write_one.remote(0))
    link = in_turn.options(**on("a")).remote(chain, tmp_path / "enough")
    wait_until(lambda: len(rb) > 10)
    rb.dumps(tmp_path / "save", consistent=True)
    there = len(rb)
    wait_until(lambda: len(rb) > there)
    (tmp_path / "enough").touch()
    ray.get(link)
    newest = {}
    folder = json.loads((tmp_path / "save" / "shards.json").read_text())["folder"]
    for node in "bca":
        one = TensorDictReplayBuffer(storage=LazyMemmapStorage(CAPACITY))
        one.loads(tmp_path / "save" / folder / node)
        newest[node] = int(one[:]["number"].max())
        one.close()
    assert newest["b"] >= newest["c"] >= newest["a"] >= newest["b"] - 1
    assert newest["b"] > 0
    rb.extend(numbered(0, 10), timeout=LONG)  # the gate is open


@ray.remote
def in_turn(chain: list[Any], enough: Path) -> None:
    number = 0
    while not enough.exists():
        number += 1
        for one in chain:
            ray.get(one.write_one.remote(number))


@pytest.mark.full
def test_a_gate_that_nobody_keeps_opens_by_itself(rb: ShardedReplayBuffer) -> None:
    rb.set_rate(None)
    rb.extend(numbered(0, 1), timeout=LONG)
    assert ray.get(rb._map.flow.remote("hold", "somebody who dies")) == ""
    with pytest.raises(RateLimitTimeout):
        rb.extend(numbered(0, 1), timeout=VAIN)
    assert "another" in ray.get(rb._map.flow.remote("hold", "another"))
    rb.extend(numbered(0, 1), timeout=LONG)
    assert not ray.get(rb._map.flow.remote("renew", "somebody who dies"))


def test_a_keeper_that_dies_in_a_save_of_one_moment_leaves_the_one_before(
    rb: ShardedReplayBuffer, peers: dict[str, Any], tmp_path: Path
) -> None:
    rb.set_rate(None)
    for one in peers.values():
        assert ray.get(one.write.remote(1, 10, LONG)) == 10
    path, folder = tmp_path / "save", tmp_path / "given up"
    rb.dumps(path, consistent=True)
    before = (path / "shards.json").read_bytes()
    rb._members.refresh(all_of_them=True)
    keeper = pid_of(rb, "c")
    killer = threading.Timer(1.0, kill, [keeper])
    with Gate(rb._members) as gate:
        stop(keeper)  # it can no longer save
        killer.start()
        with pytest.raises(RuntimeError, match=r"of node c does not answer .* was discarded"):
            _save_at_once(list(rb._members), folder, gate)
    killer.join()
    rb.extend(numbered(10, 10), timeout=LONG)  # the gate is open
    wait_until(lambda: not rb.stats()["missing"])
    assert (path / "shards.json").read_bytes() == before
    assert (path / json.loads(before)["folder"] / "c").is_dir()
    rb.dumps(path, consistent=True)
    assert len(list(path.glob("shards-*"))) == 1


def test_a_keeper_that_dies_with_an_order_for_its_quota_is_in_step_when_it_is_back(
    rb: ShardedReplayBuffer, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(240, ratio=1, min_size=10))
    inserts, drawn = counts(rb)
    assert ray.get(peers["c"].write.remote(1, 15, LONG)) == 15
    keeper = pid_of(rb, "c")
    stop(keeper)
    # The quota of c is requested back for b, but c does not obey the order.
    written = ray.get(peers["b"].write.remote(1_000, 1, VAIN))
    assert written <= 240 + 10 - 15
    kill(keeper)
    wait_until(lambda: not rb.stats()["missing"])
    repeat(10, lambda: rb.sample(10, timeout=LONG))
    assert ray.get(peers["c"].write.remote(20, 1, LONG)) == 20
    assert ray.get(peers["b"].write.remote(20, 1, LONG)) == 20
    assert require_in_step(rb, inserts + 10, drawn, 1, 240) >= 100


def test_a_dead_node_has_spent_its_quota_until_it_is_back(
    rb: ShardedReplayBuffer, cluster: Loopback, peers: dict[str, Any]
) -> None:
    rb.set_rate(limiter(240, ratio=1, min_size=10))
    inserts, drawn = counts(rb)
    assert ray.get(peers["c"].write.remote(1, 15, LONG)) == 15
    cluster.kill("c")
    # 10 are free and 240 may be ahead; 15 are written, and a quota is a third of half of 240.
    assert ray.get(peers["b"].write.remote(195, 1, LONG)) == 195
    assert ray.get(peers["b"].write.remote(1_000, 1, VAIN)) <= 40
    # This may take long: the map may have been on c, and is restarted first.
    repeat(20, lambda: rb.sample(10, timeout=LONG))
    with pytest.raises(RateLimitTimeout, match="no answer from the shards of c"):
        repeat(100, lambda: rb.sample(10, timeout=5.0))
    cluster.start("c")
    wait_until(lambda: not rb.stats()["missing"])
    assert ray.get(peers["b"].write.remote(40, 1, LONG)) == 40
    rb.sample(10, timeout=LONG)
    # Items that were drawn again because c had died count twice until it is back.
    assert require_in_step(rb, inserts + 10, drawn, 1, 240) >= 200
