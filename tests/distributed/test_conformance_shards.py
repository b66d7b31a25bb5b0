"""A buffer over nodes obeys the contract of every client, for a node and each kind of handle.

The contract is `tests/replay/test_conformance_clients.py`. There is one node, so that an index
identifies an item as in a single buffer; `OneShard` adds the shard number.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

import shmbuffer  # noqa: E402 - Ray is an extra
from shmbuffer import ShardedReplayBuffer, TensorDictPrioritizedReplayBuffer  # noqa: E402
from shmbuffer.examples.loopback import Loopback  # noqa: E402
from tests.distributed.cluster import cluster_of  # noqa: E402
from tests.replay.test_conformance_clients import (  # noqa: E402
    CAPACITY,
    CLIENTS,
    STORAGES,
    steps,
    test_a_batch_of_another_form_is_refused_and_changes_nothing,
    test_a_priority_of_an_item_that_was_written_over_is_dropped_and_counted,
    test_an_index_of_minus_one_is_left_out,
    test_every_client_draws_whole_items_that_any_client_wrote,
    test_priorities_that_one_client_gives_decide_what_another_draws,
)

__all__ = [
    "test_a_batch_of_another_form_is_refused_and_changes_nothing",
    "test_a_priority_of_an_item_that_was_written_over_is_dropped_and_counted",
    "test_an_index_of_minus_one_is_left_out",
    "test_every_client_draws_whole_items_that_any_client_wrote",
    "test_priorities_that_one_client_gives_decide_what_another_draws",
]

pytestmark = pytest.mark.product(few=4)

NODE = "a"


class OneShard:
    """A handle on a buffer over nodes with one shard."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def extend(self, data: Any) -> Any:
        return self._client.extend(data).index

    def add(self, item: Any) -> Any:
        return self._client.add(item).index

    def sample(self, count: int) -> Any:
        return self._client.sample(count)

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> Any:
        (shard,) = self._client.shards
        applied, stale, lost = self._client.update_priority(
            index, priority, shard=shard, generation=generation
        )
        assert lost == 0
        return applied, stale

    def stats(self) -> Any:
        return self._client.stats()["shards"][NODE]

    def __len__(self) -> int:
        return len(self._client)


#: Replacements for the clients of the contract, made from the buffer and its shard's folder.
SHARD_CLIENTS: dict[str, Callable[[ShardedReplayBuffer, Path], Any]] = {
    "the coordinator's": lambda buffer, path: buffer,
    "attached": lambda buffer, path: ShardedReplayBuffer.find(buffer.name, answer_timeout=60.0),
    "pickled": lambda buffer, path: pickle.loads(pickle.dumps(buffer.client())),
    "arrays": lambda buffer, path: shmbuffer.numpy.attach(path),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with cluster_of(NODE) as made:
        yield made


@pytest.fixture(scope="module")
def buffers(
    cluster: Loopback, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[ShardedReplayBuffer, Path]]]:
    """Makes a buffer for each storage, with the directory of its shard."""
    made: dict[str, tuple[ShardedReplayBuffer, Path]] = {}
    for storage in ("rows", "compressed records"):
        options = {"storage": "LazyMemmapStorage", **STORAGES[storage]}
        kind = getattr(shmbuffer, options.pop("storage"))
        path = tmp_path_factory.mktemp("shards")
        buffer = ShardedReplayBuffer(
            name=f"conformance of {storage}",
            replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
            storage=partial(kind, CAPACITY, scratch_dir=path, shared_init=True, **options),
            alpha=0.7,
            beta=1.0,
            answer_timeout=60.0,
        )
        made[storage] = buffer, path / NODE
    yield made
    for buffer, _ in made.values():
        buffer.close()


@pytest.fixture(params=["rows", "compressed records"])
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["prioritized"])
def sampler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shards(
    storage: str, sampler: str, buffers: dict[str, tuple[ShardedReplayBuffer, Path]]
) -> Iterator[tuple[ShardedReplayBuffer, Path]]:
    buffer, path = buffers[storage]
    buffer.extend(steps(0, 3))
    yield buffer, path
    buffer.empty()
    buffer.detach()


@pytest.fixture
def client(
    request: pytest.FixtureRequest, shards: tuple[ShardedReplayBuffer, Path]
) -> Iterator[Any]:
    assert SHARD_CLIENTS.keys() == CLIENTS.keys()
    made = SHARD_CLIENTS[request.param](*shards)
    if request.param == "arrays":  # a client of the shard itself
        yield made
        made.close()
    else:
        yield OneShard(made)
        if made is not shards[0]:
            made.detach()


other = client
