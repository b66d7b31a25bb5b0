"""How many batches per second can a learner sample from the shards of other nodes?

A Ray cluster has three nodes on the loopback interface, each with a raylet, an object store and
workers. A cycle is a sample of 256 items and the update of their priorities. The learner's node has
none, one or all of the shards. For comparison, empty calls of actors on the same nodes return as
many bytes as the shards do; torchrl's buffer is in one actor; and Reverb has one server. Further
rows show a write on a node with a shard, and a write to a buffer of the same form without an actor.

The loopback interface is not a network, and three nodes share the processors of one machine. The
model in benchmarks/README.md estimates the results of other clusters.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.comparison import Setting
from benchmarks.items import Kind
from benchmarks.library import ALPHA, BETA, INDEX, TENSORDICT, Library, Operation
from benchmarks.measure import Contender, Series, Timed, interleave
from shmbuffer import (
    LazyMemmapStorage,
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)

ITEMS = ("S", "M", "L")
DRAWN, WRITTEN = 256, 32
DEPTHS = {"S": (1, 4, 16), "M": (1, 4, 16), "L": (1, 4)}  # 16 batches of L are 0.2 GB
NODES = 3
REMOTE = {0: ["node-1"], 1: ["node-2"], 2: ["node-2", "node-3"]}
"""Nodes with a shard, by the number of shards that are not on the learner's node."""
SHARDED, LOCAL, EMPTY, ALONE = "sharded", "sharded, local", "empty calls", "one buffer"
PEERS = {"ray": "one actor", "reverb": "one server"}
_AT_MOST = 100_000  # items of a shard; what is drawn is the same in a larger one


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    from shmbuffer.examples.loopback import Loopback  # needs Ray

    with ExitStack() as stack:
        scratch = stack.enter_context(setting.scratch())
        stack.enter_context(Loopback(NODES))
        contenders: list[Contender] = []
        for remote, nodes in REMOTE.items():
            options = _options(setting, scratch / f"{remote}")
            rb = stack.enter_context(ShardedReplayBuffer(nodes=nodes, **options))
            _fill(rb, setting.kind, min(setting.capacity, _AT_MOST), nodes)
            for depth in DEPTHS[setting.kind.name]:
                contenders.append(_learner(setting, rb, remote, depth))
                if remote:
                    contenders.append(_echoes(setting, rb, remote, depth, stack))
            if not remote:
                contenders += _writers(setting, rb, scratch / "alone", stack)
        for library in setting.libraries:
            if library.name in PEERS:
                contenders += _one_server(setting, library, stack)
        return interleave(setting.rounds, contenders, setting.load)


def _options(setting: Setting, path: Path) -> dict[str, Any]:
    capacity = min(setting.capacity, _AT_MOST)
    return {
        "replay_buffer_cls": TensorDictPrioritizedReplayBuffer,
        "storage": partial(LazyMemmapStorage, capacity, scratch_dir=path, shared_init=True),
        "alpha": ALPHA,
        "beta": BETA,
        "answer_timeout": 60.0,
    }


def _fill(rb: ShardedReplayBuffer, kind: Kind, count: int, nodes: list[str]) -> None:
    """Fills each shard with ``count`` items, in a task on its node."""
    import ray

    @ray.remote(num_cpus=0)
    def fill(client: Any) -> None:
        kind.fill(client.extend, count, TENSORDICT)
        client.detach()

    ray.get([fill.options(**_on(node)).remote(rb.client()) for node in nodes])


def _on(name: str) -> dict[str, Any]:
    """Returns options for a task or an actor on a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from shmbuffer.distributed.runtime import living_nodes

    where = NodeAffinitySchedulingStrategy(living_nodes()[name], soft=False)
    return {"scheduling_strategy": where, "num_cpus": 0}


def _name(remote: int, depth: int) -> str:
    shards = {0: "its own shard", 1: "1 remote shard"}.get(remote, f"{remote} remote shards")
    return f"cycles({DRAWN}), {shards}, depth {depth}"


def _rate(setting: Setting, cycle: Callable[[], object]) -> list[list[float]]:
    """Returns the number of calls per second, and the CPU time of this process per call."""
    cycle()
    began, used, calls = time.perf_counter(), time.process_time(), 0
    while (took := time.perf_counter() - began) < setting.contest_s or not calls:
        cycle()
        calls += 1
    return [[calls / took], [(time.process_time() - used) / calls]]


def _rates(remote: int, depth: int, form: str) -> tuple[Series, Series]:
    name = _name(remote, depth)
    return (
        Series(name, "shmbuffer", form, "1/s"),
        Series(f"{name}: processor time of the learner", "shmbuffer", form, "s"),
    )


def _learner(setting: Setting, rb: ShardedReplayBuffer, remote: int, depth: int) -> Contender:
    learner = ShardedReplayBuffer.find(rb.name, prefetch=depth - 1, answer_timeout=60.0)
    priorities = torch.from_numpy(1 - np.random.default_rng(0).random((64, DRAWN), np.float32))
    turns = _turns(list(priorities))

    def cycle() -> None:
        sample = learner.sample(DRAWN)
        learner.update_tensordict_priority(sample.set("td_error", next(turns)))

    return Contender(_rates(remote, depth, SHARDED), lambda: _rate(setting, cycle))


def _turns(of: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from of


def _echoes(
    setting: Setting, rb: ShardedReplayBuffer, remote: int, depth: int, stack: ExitStack
) -> Contender:
    """Measures actors instead of keepers, with requests and answers of the same size."""
    import ray

    from shmbuffer.distributed.keeper import send_request

    share = DRAWN // remote
    orders = [(share, 1, BETA, 0.0)]
    keeper = next(iter(rb._members)).keeper
    size = len(ray.get(send_request(keeper, "step", [], orders)))
    update = (1, np.zeros(share, np.int64), np.zeros(share), np.zeros(share, np.int64))

    @ray.remote
    class Echo:
        def __init__(self) -> None:
            self.message = np.zeros(size, np.uint8)

        def answer(self, request: bytes) -> Any:
            pickle.loads(request)
            return self.message

    echoes = [Echo.options(**_on(node)).remote() for node in REMOTE[remote]]
    for echo in echoes:
        stack.callback(ray.kill, echo)
    waiting: deque[Any] = deque()

    def cycle() -> None:
        while len(waiting) < depth:
            waiting.append([send_request(echo, "step", [update], orders) for echo in echoes])
        ray.get(waiting.popleft())

    return Contender(_rates(remote, depth, EMPTY), lambda: _rate(setting, cycle))


def _writers(
    setting: Setting, rb: ShardedReplayBuffer, path: Path, stack: ExitStack
) -> list[Contender]:
    """Measures a write on a node with a shard, and a write to a buffer without an actor."""
    storage = LazyMemmapStorage(min(setting.capacity, _AT_MOST), scratch_dir=path)
    alone = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage)
    stack.callback(alone.close)
    setting.kind.fill(alone.extend, len(rb), TENSORDICT)
    inputs = [(batch,) for batch in setting.kind.batches(WRITTEN, TENSORDICT)]
    contenders = []
    assert rb.local is not None
    for form, write in ((SHARDED, rb.extend), (LOCAL, rb.local.extend), (ALONE, alone.extend)):
        timed = Timed(write, inputs, setting.block_s)
        series = Series(f"extend({WRITTEN}) on a node with a shard", "shmbuffer", form, "s")
        contenders.append(Contender((series,), partial(_blocks, timed, setting.blocks)))
    return contenders


def _blocks(timed: Timed, count: int) -> list[list[float]]:
    return [timed.blocks(count)]


def _one_server(setting: Setting, library: Library, stack: ExitStack) -> list[Contender]:
    """Measures a peer: a buffer in an actor of another Ray cluster, or in one server."""
    operation = Operation("cycle", DRAWN, INDEX)
    stack.enter_context(setting.open(library, prioritized=True))
    if not library.prepare(operation, setting.block_s):
        return []
    series = Series(f"cycles({DRAWN}), {PEERS[library.name]}", library.name, operation.form, "1/s")

    def measure() -> list[list[float]]:
        return [[1 / seconds for seconds in library.round(operation, setting.blocks)]]

    return [Contender((series,), measure)]
