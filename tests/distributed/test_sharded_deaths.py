"""Deaths in a buffer over several nodes: a keeper, a node, the map, a learner. Real kills on Ray.

The shards are on the nodes b and c. This process belongs to a, so that it sends messages for
everything. The keeper is stopped first, so that the death happens at a known point.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from shmbuffer.distributed.shards.shard_map import NAMESPACE, keeper_name, map_name  # noqa: E402
from shmbuffer.distributed.shards.shard_saves import save_shards  # noqa: E402
from shmbuffer.distributed.shards.sharded_client import ShardedClient  # noqa: E402
from shmbuffer.examples.loopback import Loopback  # noqa: E402
from tests.distributed.cluster import cluster_of, kill, on, pid_of, state_of, stop, until  # noqa: E402

pytestmark = pytest.mark.full

NAME = "mortal"
ITEMS = {"b": range(600), "c": range(600, 800)}
BATCH = 256


class Hand:
    """A process on a node that writes and learns there."""

    def __init__(self, name: str) -> None:
        self.client = ShardedReplayBuffer.find(name, answer_timeout=60.0)

    def pid(self) -> int:
        return os.getpid()

    def write(self, data: TensorDict) -> tuple[int, str]:
        """Writes a batch; returns the shard and the path of the data."""
        out = self.client.extend(data)
        (member,) = (one for one in self.client._members if one.identity == out.shard)
        return out.shard, member.handle.paths["write"]

    def draw(self) -> set[int]:
        """Returns the shards of a sample."""
        self.sample = self.client.sample(BATCH)
        return set(self.sample["shard"].tolist())

    def send(self) -> None:
        """Sends ten times the priorities of the sample, without waiting for the answer."""
        self.update = self.client.update_tensordict_priority(
            self.sample.set("p", 10 * self.sample["p"])
        )
        self.client._members.send_what_waits()

    def settled(self) -> tuple[int, ...]:
        """Returns the result of the update."""
        return tuple(self.update)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Allows processes that are restarted for later tests; see `cluster`."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with cluster_of("abc") as made:
        yield made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def buffer(cluster: Loopback, directory: Path) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        name=NAME,
        nodes=["b", "c"],
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        storage=partial(LazyMemmapStorage, 2_000, scratch_dir=directory / "run", shared_init=True),
        alpha=1.0,
        beta=1.0,
        priority_key="p",
        answer_timeout=60.0,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def hand(buffer: ShardedReplayBuffer) -> Any:
    """Makes a worker on b, where it reaches the shard in memory."""
    return ray.remote(Hand).options(**on("b")).remote(NAME)


@pytest.fixture
def rb(buffer: ShardedReplayBuffer) -> Iterator[ShardedReplayBuffer]:
    """Fills the buffer with the items of `ITEMS`."""
    buffer.empty()
    for node, numbers in ITEMS.items():
        member = buffer._members.at(node)
        assert member is not None
        member.handle.extend(items(numbers))
    buffer._members.refresh(all_of_them=True)
    return buffer


def items(numbers: range) -> TensorDict:
    """Makes items with ``a`` i and a priority that follows from it; the smallest is in c."""
    a = torch.tensor(list(numbers))
    return TensorDict({"a": a, "p": priority_of(a)}, [len(a)])


def priority_of(a: torch.Tensor) -> torch.Tensor:
    return torch.where(is_of_c(a), 1.0, 2.0) * (a % 7 + 1.0)


def is_of_c(a: torch.Tensor) -> torch.Tensor:
    """True for the items of c; later writes of the tests go to b."""
    return (a >= 600) & (a < 800)


def numbers_of(rb: ShardedClient) -> dict[str, int]:
    """Returns the number of each shard in samples, by node."""
    return {node: number for number, node in rb.shards.items()}


def kill_map() -> None:
    """Kills the map, which may just be restarting if its node has died."""
    found = ray.get_actor(map_name(NAME), namespace=NAMESPACE)
    while True:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            pid = ray.get(found.__ray_call__.remote(lambda _: os.getpid()))
            break
    kill(pid)


def require_of_one_shard(sample: Any, node: str, number: int) -> None:
    """Checks that all items are of this shard, with weights computed for this shard alone."""
    assert set(sample["shard"].tolist()) == {number}
    a = sample["a"]
    assert (is_of_c(a) == (node == "c")).all()
    least = priority_of(torch.tensor(list(ITEMS[node]))).min()
    # Not exact: an item may have been written between the two draws.
    assert torch.allclose(sample["_weight"].double(), (least / priority_of(a)).double(), rtol=0.01)


def require_everything(rb: ShardedClient, numbers: dict[str, int]) -> None:
    """Checks that both shards have all their items, under their former numbers."""
    until(lambda: not rb.stats()["missing"])
    assert numbers_of(rb) == numbers
    assert len(rb) == sum(map(len, ITEMS.values()))
    sample = rb.sample(2_000)
    assert set(sample["shard"].tolist()) == set(numbers.values())
    assert torch.allclose(sample["_weight"].double(), (1 / priority_of(sample["a"])).double())
    assert tuple(rb.update_tensordict_priority(sample)) == (2_000, 0, 0)


class InFlight:
    """Calls that wait for the stopped keeper of c when it dies: draw, update, write and save."""

    def __init__(self, rb: ShardedReplayBuffer, path: Path) -> None:
        self.learner, self.idle, self.writer, self.saver = self.all = [
            ShardedReplayBuffer.find(NAME, answer_timeout=60.0) for _ in range(4)
        ]
        self.numbers = numbers_of(rb)
        for one in self.all:
            one._members.refresh(all_of_them=True)
        sample = self.learner.sample(BATCH)
        self.ours = int((sample["shard"] == self.numbers["b"]).sum())
        assert 0 < self.ours < BATCH
        self.keeper = pid_of(rb, "c")
        stop(self.keeper)
        for one in self.all:
            for member in one._members:
                member.seen = time.monotonic() + 3600.0  # no client asks for its mass
        self.update = self.learner.update_tensordict_priority(sample)
        self.begun = self.learner._batches.begin(BATCH, [1, 2], 1.0)
        pool = ThreadPoolExecutor(3)
        self.drawn: Future[Any] = pool.submit(self.learner._batches.finish, self.begun[0])
        self.written: Future[Any] = pool.submit(self.writer.extend, items(range(800, 801)))
        self.saved: Future[Any] = pool.submit(save_shards, self.saver._members, path)
        pool.shutdown(wait=False)
        until(lambda: all(future.running() for future in self._all()))
        # lets the calls wait for the answers; the test also passes if they do not yet
        time.sleep(0.5)
        assert not any(future.done() for future in self._all())

    def _all(self) -> list[Future[Any]]:
        return [self.drawn, self.written, self.saved]

    def require_the_rest(self, caplog: pytest.LogCaptureFixture) -> None:
        """Checks that no call hangs, that b continues, and that the missing node was logged."""
        b = self.numbers["b"]
        for data, info in (self.drawn.result(), self.learner._batches.finish(self.begun[1])):
            require_of_one_shard({"a": data["a"], **info}, "b", b)
        assert tuple(self.update) == (self.ours, 0, BATCH - self.ours)
        require_of_one_shard(self.learner.sample(BATCH), "b", b)
        again = self.learner.update_tensordict_priority(self.learner.sample(BATCH))
        assert tuple(again) == (BATCH, 0, 0)
        assert self.written.result().shard == b
        with pytest.raises(RuntimeError, match=r"dumps\(\) failed on node c"):
            self.saved.result()
        for one in (self.learner, self.writer, self.saver):
            assert one.stats()["missing"] == ["c"]
            with pytest.raises(RuntimeError, match="no answer from the shards of c"):
                one.empty()
        assert "the shard of node c does not answer" in caplog.text
        for one in self.all:
            one.detach()


def test_everybody_goes_on_without_a_keeper_that_dies_and_with_it_when_it_is_back(
    rb: ShardedReplayBuffer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rb.dumps(tmp_path)
    flight = InFlight(rb, tmp_path)
    kill(flight.keeper)
    flight.require_the_rest(caplog)
    until(lambda: not rb.stats()["missing"])
    rb.loads(tmp_path)  # the earlier save
    require_everything(rb, flight.numbers)


def test_a_node_that_dies_is_missing_to_all_and_is_the_same_shard_when_it_is_back(
    rb: ShardedReplayBuffer, cluster: Loopback, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rb.dumps(tmp_path)
    flight = InFlight(rb, tmp_path)
    cluster.kill("c")
    flight.require_the_rest(caplog)
    until(lambda: all(not node["Alive"] for node in ray.nodes() if node["NodeName"] == "c"))
    kill_map()
    require_of_one_shard(rb.sample(BATCH), "b", flight.numbers["b"])
    new = ShardedReplayBuffer.find(NAME, answer_timeout=60.0)  # waits for the map
    require_of_one_shard(new.sample(BATCH), "b", flight.numbers["b"])
    assert new.stats()["missing"] == ["c"], "though this map has never seen it"
    with pytest.raises(
        RuntimeError, match=r"shards of c; the shards can only be saved together\. .* without="
    ):
        new.dumps(tmp_path / "rest")
    with pytest.raises(ValueError, match=r"without=\['d'\]: there are only shards on b, c"):
        new.dumps(tmp_path / "rest", without=["c", "d"])
    new.dumps(tmp_path / "rest", without=["c"])
    cluster.start("c")
    for one in (new, rb):
        until(lambda one=one: not one.stats()["missing"])
    new.loads(tmp_path / "rest")
    assert len(new) == len(ITEMS["b"]) + 1  # with the item that was in flight
    new.loads(tmp_path)
    for one in (new, rb):
        require_everything(one, flight.numbers)
    new.detach()


def test_a_node_that_is_stopped_is_missing_until_it_is_started_again(
    rb: ShardedReplayBuffer, cluster: Loopback, tmp_path: Path
) -> None:
    """Simulates a machine that hangs: Ray declares it dead, whatever it does later."""
    numbers = numbers_of(rb)
    rb.dumps(tmp_path)
    keeper = pid_of(rb, "c")
    stop(cluster.pid("c"))
    until(lambda: all(not node["Alive"] for node in ray.nodes() if node["NodeName"] == "c"))
    until(lambda: rb.stats()["missing"] == ["c"])
    require_of_one_shard(rb.sample(BATCH), "b", numbers["b"])
    os.kill(cluster.pid("c"), signal.SIGCONT)
    until(lambda: state_of(keeper) in "ZX")
    assert rb.stats()["missing"] == ["c"]
    cluster.kill("c")
    cluster.start("c")
    until(lambda: not rb.stats()["missing"])
    rb.loads(tmp_path)
    require_everything(rb, numbers)


def test_the_node_of_a_dead_keeper_writes_and_learns_on_in_memory(
    rb: ShardedReplayBuffer, hand: Any
) -> None:
    numbers = numbers_of(rb)
    ray.get(hand.draw.remote())
    kill(pid_of(rb, "b"))
    require_of_one_shard(rb.sample(BATCH), "c", numbers["c"])
    shard, path = ray.get(hand.write.remote(items(range(800, 900))))
    assert (shard, path) == (numbers["b"], "direct")
    assert ray.get(hand.draw.remote()) == set(numbers.values())
    ray.get(hand.send.remote())
    assert ray.get(hand.settled.remote()) == (BATCH, 0, 0)
    until(lambda: not rb.stats()["missing"])
    assert numbers_of(rb) == numbers
    assert len(rb) == sum(map(len, ITEMS.values())) + 100
    assert (rb.sample(2_000)["a"] >= 800).any()


def test_a_learner_that_dies_with_updates_in_flight_is_followed_by_one_that_finds_the_buffer(
    rb: ShardedReplayBuffer, hand: Any, directory: Path
) -> None:
    numbers, keeper = numbers_of(rb), pid_of(rb, "c")
    assert ray.get(hand.draw.remote()) == set(numbers.values())
    stop(keeper)
    ray.get(hand.send.remote())
    kill(ray.get(hand.pid.remote()))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(hand.pid.remote())
    os.kill(keeper, signal.SIGCONT)
    new = ray.remote(Hand).options(**on("b")).remote(NAME)
    assert ray.get(new.draw.remote()) == set(numbers.values())
    before = priority_of(torch.tensor(list(ITEMS["c"]))).double()
    with attach(directory / "run" / "c") as shard:
        now = shard.sampler.state_dict()["_priorities"][:200]
    assert ((now == before) | (now == 10 * before)).all()
    ray.get(new.send.remote())
    assert ray.get(new.settled.remote()) == (BATCH, 0, 0)
    assert len(rb) == sum(map(len, ITEMS.values()))


@pytest.mark.full  # test_members.py covers this, too
def test_an_answer_after_its_deadline_is_dropped(
    rb: ShardedReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    numbers, keeper = numbers_of(rb), pid_of(rb, "c")
    learner = ShardedReplayBuffer.find(NAME, answer_timeout=5.0)
    learner.sample(BATCH)
    stop(keeper)
    for member in learner._members:
        member.seen = time.monotonic() + 3600.0  # no client asks for its mass
    (first,), (second,) = (learner._batches.begin(BATCH, [key], 1.0) for key in (1, 2))
    data, info = learner._batches.finish(first)
    require_of_one_shard({"a": data["a"], **info}, "b", numbers["b"])
    assert "the shard of node c does not answer (no answer within 5 s)" in caplog.text
    os.kill(keeper, signal.SIGCONT)
    until(lambda: not learner.stats()["missing"])
    (member, late) = next((one, answer.sent) for one, _, answer in second.asked if one.node == "c")
    ray.wait([late.ref])
    assert not list(learner._members.answers([(member, late)]))
    data, _ = learner._batches.finish(second)
    assert len(data) == BATCH
    require_everything(learner, numbers)
    learner.detach()


@pytest.mark.full
def test_a_shard_whose_directory_was_removed_comes_back_empty_as_another_one(
    rb: ShardedReplayBuffer, directory: Path
) -> None:
    hand = ray.remote(Hand).options(**on("b")).remote(NAME)
    before = numbers_of(rb)
    late = rb.sample(BATCH)
    assert ray.get(hand.write.remote(items(range(800, 900)))) == (before["b"], "direct")
    for node in ITEMS:
        shutil.rmtree(directory / "run" / node)

    def everybody_is_back() -> bool:
        with contextlib.suppress(EmptyBufferError):  # both are away
            # the keeper closes the removed directory
            ray.get(hand.write.remote(items(range(800, 900))))
            rb.extend(items(range(600, 700)))  # into c, which has the most space
        rb.update_tensordict_priority(late)
        now = numbers_of(rb)
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    until(everybody_is_back)
    assert tuple(rb.update_tensordict_priority(late)) == (0, 0, BATCH)
    there = numbers_of(rb)["b"], "direct"
    until(lambda: ray.get(hand.write.remote(items(range(800, 900)))) == there)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_in_which_anything_dies_at_any_time_loses_no_item(
    rb: ShardedReplayBuffer, cluster: Loopback, seed: int
) -> None:
    """A writer and a learner continue whatever dies, and all written items are there in the end."""
    rb.empty()
    random, ended = np.random.default_rng(seed), threading.Event()
    acknowledged: list[int] = []
    sampled = [0]

    def write() -> None:
        client = ShardedReplayBuffer.find(NAME, answer_timeout=60.0)
        while not ended.is_set() and len(acknowledged) < 1_900:
            first = len(acknowledged)
            with contextlib.suppress(EmptyBufferError):  # both are dead: try again
                client.extend(items(range(first, first + 5)))
                acknowledged.extend(range(first, first + 5))
            time.sleep(0.05)
        client.detach()

    def learn() -> None:
        client = ShardedReplayBuffer.find(NAME, answer_timeout=60.0, prefetch=4)
        while not ended.is_set():
            with contextlib.suppress(EmptyBufferError):
                sample = client.sample(64)
                assert (priority_of(sample["a"]) == sample["p"]).all()
                client.update_tensordict_priority(sample)
                sampled[0] += 1
        client.detach()

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(write), pool.submit(learn)]
        try:
            for victim in random.permutation(["b", "c", "both", "map", "node", "b", "c", "map"]):
                time.sleep(random.uniform(0.5, 3.0))
                if victim == "map":
                    kill_map()
                elif victim == "node":
                    cluster.kill("c")
                    cluster.start("c")
                for node in {"b": "b", "c": "c", "both": "bc"}.get(victim, ""):
                    with contextlib.suppress(ray.exceptions.RayError):  # it may be dead already
                        kill(pid_of(rb, node))
                before = sampled[0]
                until(lambda before=before: sampled[0] > before + 20 or any_done(running))
        finally:
            ended.set()
        for one in running:
            one.result()
    until(lambda: not rb.stats()["missing"])
    found: list[int] = []
    for _ in range(200):
        found += rb.sample(1_000)["a"].tolist()
    assert set(found) >= set(acknowledged)
    assert len(acknowledged) <= len(rb) <= len(acknowledged) + 5 * 9, "what was in doubt is twice"


def any_done(running: list[Future[Any]]) -> bool:
    return any(one.done() for one in running)


def test_the_end_comes_to_all_though_the_map_and_a_keeper_are_dead(
    rb: ShardedReplayBuffer,
) -> None:
    keepers = {pid_of(rb, node) for node in ITEMS}
    names = [map_name(NAME)] + [
        keeper_name(NAME, node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeName"] in ITEMS
    ]
    learner = rb.client()
    kill(pid_of(rb, "b"))
    kill_map()
    rb.close()
    for name in names:
        with pytest.raises(ValueError, match=name):
            ray.get_actor(name, namespace=NAMESPACE)
    until(lambda: all(state_of(pid) in "ZX" for pid in keepers))
    with pytest.raises(ValueError, match="no sharded buffer"):
        ShardedReplayBuffer.find(NAME)
    with pytest.raises(ValueError, match="no sharded buffer"):
        learner.sample(8)
    with pytest.raises(BufferClosedError):
        rb.sample(8)
