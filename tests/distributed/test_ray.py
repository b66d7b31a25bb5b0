"""Tests with a real local cluster: its node, its workers and its actors."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

ray = pytest.importorskip("ray")

from shmbuffer import (  # noqa: E402 - Ray is an extra
    BufferClosedError,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PriorityUpdate,
    RandomSampler,
    RayReplayBuffer,
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.distributed.far_handle import LIFECYCLE  # noqa: E402
from shmbuffer.distributed.ray import RayClient  # noqa: E402
from shmbuffer.distributed.runtime import PATIENT, RayUse  # noqa: E402
from shmbuffer.extras import command  # noqa: E402
from tests.conftest import _command_of  # noqa: E402
from tests.distributed.parts import Owned, items, stopped  # noqa: E402
from tests.kit.rings import ring_of  # noqa: E402

SMALL = {"num_cpus": 0}  # an actor that needs no CPU
ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(16),  # otherwise Ray writes one into the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    **PATIENT,
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Starts a node with one CPU on the loopback interface; it ends with this module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # The folder is in /tmp, because the names of sockets must be short.
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        config = {
            "num_cpus": 1,
            "object_store_memory": 80 * 1024**2,
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "error",
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": folder,
        }
        handler = signal.getsignal(signal.SIGTERM)
        ray_use = RayUse(config)
        try:
            yield
            ray_use.release()
            assert not ray.is_initialized(), "the last use ends what the first one has started"
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)  # Ray leaves its own handler
            os.environ.pop("RAY_AUTH_MODE", None)  # Ray sets it
            shutil.rmtree(folder)


@contextlib.contextmanager
def made(*args: Any, **options: Any) -> Iterator[RayReplayBuffer]:
    options = {"remote_config": SMALL, **options}
    with RayReplayBuffer(*args, **options) as buffer:
        yield buffer


def memmap(path: Path, capacity: int = 20) -> partial[LazyMemmapStorage]:
    return partial(LazyMemmapStorage, capacity, scratch_dir=path, shared_init=True)


PRIORITIZED = {
    "replay_buffer_cls": Owned,
    "alpha": 1.0,
    "beta": 1.0,
    "eps": 0.0,
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RayReplayBuffer]]:
    """Makes two prioritized buffers that differ only in how batches are transferred."""
    path = tmp_path_factory.mktemp("both")
    ways = {"direct": "auto", "through Ray": "ray"}

    def start(way: str) -> RayReplayBuffer:
        options = {"transport": ways[way], "remote_config": SMALL, **PRIORITIZED}
        return RayReplayBuffer(storage=memmap(path / way), **options)

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor() as threads:  # each waits for its process for seconds
            started = list(threads.map(start, ways))
        direct, through_ray = map(stack.enter_context, started)
        assert direct.direct
        yield {"direct": direct, "through Ray": through_ray}


@pytest.fixture(params=["direct", "through Ray"])
def rb(both: dict[str, RayReplayBuffer], request: pytest.FixtureRequest) -> RayReplayBuffer:
    """Returns one of the two buffers with the items 0 to 7."""
    buffer = both[request.param]
    buffer.empty()
    buffer.extend(items(0, 8))
    buffer.update_priority(torch.arange(8), torch.ones(8))
    return buffer


@pytest.fixture
def direct(both: dict[str, RayReplayBuffer]) -> RayReplayBuffer:
    buffer = both["direct"]
    buffer.empty()
    buffer.extend(items(0, 8))
    return buffer


@pytest.fixture(scope="module")
def plain() -> Iterator[RayReplayBuffer]:
    """Makes a buffer in the memory of its actor."""
    with made(
        storage=partial(LazyTensorStorage, 20),
        replay_buffer_cls=TensorDictReplayBuffer,
        batch_size=4,
    ) as buffer:
        buffer.extend(items(0, 10))
        yield buffer


# -- both ways give the same -----------------------------------------------------------------------


@pytest.mark.full
def test_the_way_is_visible(both: dict[str, RayReplayBuffer]) -> None:
    assert both["direct"].direct
    assert both["direct"].paths == {"read": "direct", "write": "direct", "sample": "direct"}
    assert not both["through Ray"].direct
    assert both["through Ray"].paths == dict.fromkeys(
        ("read", "write", "sample"), "transport='ray' was requested"
    )


def test_what_is_written_is_there(rb: RayReplayBuffer) -> None:
    assert rb.extend(items(8, 3)).tolist() == [8, 9, 10]
    assert rb.add(items(11, 1)[0]) == 11
    assert len(rb) == 12
    assert rb.write_count == 12
    assert rb[:]["a"].tolist() == list(range(12))
    assert rb[3]["obs"].tolist() == [3.0, -3.0]
    assert rb[[1, 5]]["a"].tolist() == [1, 5]
    assert rb["a"].tolist() == list(range(12))
    assert rb.read_all_in_order(2)["a"].tolist() == [0, 1]
    assert [chunk["a"].tolist() for chunk in rb.iter_in_order(5)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
    ]


def test_a_change_in_place_is_visible(rb: RayReplayBuffer) -> None:
    rb[0] = items(80, 1)[0]
    rb[1:3] = items(81, 2)
    assert rb[:]["a"].tolist() == [80, 81, 82, 3, 4, 5, 6, 7]
    rb.write_all(items(20, 8))
    assert rb[:]["a"].tolist() == list(range(20, 28))
    assert rb.set_at_("a", torch.tensor([70, 71]), [0, 5]) is rb
    assert rb["a"].tolist() == [70, 21, 22, 23, 24, 71, 26, 27]
    sample = rb.sample()
    updated = rb.update_if_present(
        index=sample["index"],
        generation=sample["index_generation"],
        patch={"a": torch.full((4,), -1)},
    ).updated
    assert (rb["a"] == -1).sum() == len(set(sample["index"].tolist()))
    assert updated.any()
    assert rb.write_count == 8


def test_a_change_is_submitted_and_a_sample_can_be_foreseen(rb: RayReplayBuffer) -> None:
    rb.empty()
    assert not rb.can_sample()
    index = rb.extend(items(0, 3))
    assert rb.can_sample()
    sample = rb.sample()
    handle = {"index": sample["index"], "generation": sample["index_generation"]}
    patch = {"a": -sample["a"]}
    result = rb.submit_update_if_present(**handle, patch=patch).result(timeout=50)
    assert result.updated.all()
    rb.synchronize()
    drawn = set(sample["a"].tolist())
    assert rb[:]["a"].tolist() == [-at if at in drawn else at for at in range(3)]
    failed = rb.submit_update_if_present(**handle, patch={"nothing": index})
    assert isinstance(failed.exception(timeout=50), KeyError)
    assert rb.service_backend == "ray"


@pytest.mark.full
def test_the_class_of_a_buffer_is_an_actor() -> None:
    actor = TensorDictReplayBuffer.as_remote()
    assert actor.is_remote
    handle = actor.remote(batch_size=2)
    ray.get(handle.extend.remote(items(0, 3)))
    assert len(ray.get(handle.sample.remote())) == 2
    ray.kill(handle)


def test_a_sample_follows_the_priorities(rb: RayReplayBuffer) -> None:
    rb.update_priority(torch.arange(8), torch.tensor([0.0, 1.0, 0.0, 3.0, 0, 0, 0, 0]))
    seen = torch.cat([rb.sample()["a"] for _ in range(100)])
    assert set(seen.tolist()) == {1, 3}
    assert 0.65 < (seen == 3).float().mean() < 0.85  # 3/4 of 400: six standard deviations
    sample = rb.sample()
    expected = torch.where(sample["a"] == 1, 1.0, 1 / 3)
    torch.testing.assert_close(sample["_weight"], expected)
    sample["td_error"] = torch.where(sample["a"] == 1, 0.0, 2.0)
    assert rb.update_tensordict_priority(sample) == PriorityUpdate(4, 0)
    assert rb.update_priority(sample) == PriorityUpdate(4, 0)


def test_a_priority_of_an_item_that_was_written_over_is_stale(rb: RayReplayBuffer) -> None:
    sample = rb.sample()
    rb.extend(items(8, 20))
    sample["td_error"] = torch.ones(4)
    assert rb.update_tensordict_priority(sample) == PriorityUpdate(0, 4)


def test_a_sample_says_where_its_rows_come_from(rb: RayReplayBuffer) -> None:
    data, info = rb.sample(return_info=True)
    assert torch.equal(info["index"], data["index"])
    assert torch.equal(data["a"], data["index"])
    assert "index" not in rb.sample(include_info=False)


def test_properties_are_those_of_the_buffer(rb: RayReplayBuffer) -> None:
    assert rb.batch_size == 4
    assert rb.priority_key == "td_error"
    assert rb.dim_extend == 0
    assert rb.initialized
    assert rb.shared
    assert (rb.sampler.alpha, rb.sampler.beta) == (1.0, 1.0)
    storage = rb.storage
    assert storage.max_size == 20
    if not rb.direct:
        storage.close()  # it was pickled and has its own handle
    assert rb.generator is None
    assert len(rb.transform) == 0
    stats = rb.stats()
    assert (stats["size"], stats["capacity"], stats["write_count"]) == (8, 20, 8)


def test_a_property_can_be_set(rb: RayReplayBuffer) -> None:
    rb.priority_key = "other"
    try:
        rb.update_tensordict_priority(
            TensorDict({"index": torch.arange(8), "other": torch.tensor([0.0] * 7 + [1.0])}, [8])
        )
        assert rb.sample()["a"].tolist() == [7] * 4
    finally:
        rb.priority_key = "td_error"
    assert rb.priority_key == "td_error"


def test_emptied_is_empty(rb: RayReplayBuffer) -> None:
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(items(0, 1))
    assert rb.sample()["a"].tolist() == [0] * 4


def test_errors_are_those_of_the_buffer(rb: RayReplayBuffer) -> None:
    with pytest.raises(SchemaMismatchError, match="leaf 'a' is missing in this write"):
        rb.extend(items(0, 2).exclude("a"))
    with pytest.raises(IndexError):
        rb[15]
    with pytest.raises(ValueError, match="nan"):
        rb.update_priority([0], [float("nan")])
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = rb.no_such_thing


def test_state_dict_and_back(rb: RayReplayBuffer) -> None:
    rb.update_priority([2], [0.5])
    state = rb.state_dict()
    rb.extend(items(8, 5))
    rb.load_state_dict(state)
    assert rb[:]["a"].tolist() == list(range(8))
    assert rb.state_dict()["_sampler"]["_priorities"][:4].tolist() == [1.0, 1.0, 0.5, 1.0]


def test_saved_and_loaded(rb: RayReplayBuffer, tmp_path: Path) -> None:
    rb.dumps(tmp_path / "saved")
    rb.extend(items(8, 5))
    rb.loads(tmp_path / "saved")
    assert rb[:]["a"].tolist() == list(range(8))


def test_what_the_class_has_beyond_the_family(rb: RayReplayBuffer) -> None:
    assert rb.motto == "nothing is lost"
    assert rb.pid() != os.getpid()
    assert _command_of(rb.pid()).startswith("ray::Keeper")


def test_an_error_that_cannot_travel_arrives_in_words(rb: RayReplayBuffer) -> None:
    with pytest.raises(RuntimeError, match="UnmadeError: 1 and 2") as caught:
        rb.fails()
    assert "in fails" in caught.value.__notes__[0]


# -- a client on the same machine ------------------------------------------------------------------


def elsewhere(buffer: RayReplayBuffer) -> RayClient:
    """Makes a handle as a process on another machine would."""
    return RayClient(buffer._actor, buffer.has_gpu, None, "on another machine")


def test_a_direct_client_does_not_need_the_actor(direct: RayReplayBuffer) -> None:
    client = direct.client()
    with stopped(direct.pid()):
        assert client.extend(items(8, 2)).tolist() == [8, 9]
        assert len(client) == len(direct) == client.write_count == 10
        client.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [1.0]))
        sample = direct.sample()
        assert sample["a"].tolist() == [9] * 4
        sample["td_error"] = torch.full((4,), 2.0)
        assert direct.update_tensordict_priority(sample) == PriorityUpdate(4, 0)
        assert direct[:]["a"].tolist() == list(range(10))
        direct[0] = items(50, 1)[0]
        assert next(iter(direct))["a"].tolist() == [9] * 4
        assert direct.stats()["size"] == 10
        # The copy of a handle has its information and finds the directory without the actor.
        copy = pickle.loads(ray.cloudpickle.dumps(client))
        assert copy.direct
        assert copy[0]["a"] == 50
        copy.detach()
    client.detach()
    assert elsewhere(direct)[:]["a"].tolist() == [50, *range(1, 10)]


def test_a_detached_handle_comes_back(direct: RayReplayBuffer) -> None:
    alive = direct.stats()["clients_alive"]
    client = direct.client()
    assert client.direct
    assert direct.stats()["clients_alive"] == alive + 1
    client.detach()
    assert direct.stats()["clients_alive"] == alive
    assert client.sample()["a"].shape == (4,)
    client.detach()


@pytest.mark.full
@pytest.mark.parametrize("handle", ["client", "buffer"])
def test_a_task_that_gets_a_handle_attaches_on_arrival(
    direct: RayReplayBuffer, handle: str
) -> None:
    @ray.remote(num_cpus=0)
    def collect(buffer: Any) -> tuple[bool, int, list[int]]:
        with contextlib.closing(buffer) if handle == "buffer" else contextlib.nullcontext():
            index = buffer.extend(items(8, 2)).tolist()
            return buffer.direct, os.getpid(), index

    sent = direct.client() if handle == "client" else direct
    is_direct, pid, index = ray.get(collect.remote(sent))
    assert is_direct
    assert pid not in (os.getpid(), direct.pid())
    assert index == [8, 9]
    assert direct[:]["a"].tolist() == list(range(10))  # the copy's close() ended nothing


@pytest.mark.full
def test_an_actor_that_gets_a_handle_attaches_on_arrival(direct: RayReplayBuffer) -> None:
    class Learner:
        def __init__(self, buffer: RayClient) -> None:
            self.buffer = buffer

        def learn(self) -> tuple[bool, list[int]]:
            sample = self.buffer.sample()
            sample["td_error"] = torch.full((4,), 7.0)
            self.buffer.update_tensordict_priority(sample)
            return self.buffer.direct, sample["a"].tolist()

    direct.update_priority(torch.arange(8), torch.tensor([0.0] * 5 + [1.0] + [0.0] * 2))
    learner = ray.remote(num_cpus=0)(Learner).remote(direct.client())
    assert ray.get(learner.learn.remote()) == (True, [5] * 4)
    assert direct.state_dict()["_sampler"]["_priorities"][5] == 7.0
    ray.kill(learner)


def test_a_client_cannot_end_the_buffer(direct: RayReplayBuffer) -> None:
    client = direct.client()
    for name in sorted(LIFECYCLE):
        with pytest.raises(AttributeError, match=f"RayClient has no '{name}'.*detach"):
            getattr(client, name)


def test_clients_are_independent(direct: RayReplayBuffer) -> None:
    one, other = direct.clients(2)
    one.extend(items(8, 1))
    other.extend(items(9, 1))
    sources = ring_of(one).live.sources
    assert sources[8] != sources[9]
    for client in (one, other):
        client.detach()
    with pytest.raises(TypeError, match="num_clients must be an int, got True"):
        direct.clients(True)
    with pytest.raises(ValueError, match="num_clients must be at least 1, got 0"):
        direct.clients(0)


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_actor_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    storage = memmap(tmp_path / "buffer")
    with made(storage=storage, **PRIORITIZED) as buffer:
        buffer.extend(items(0, 8))
        buffer.update_priority(torch.arange(8), torch.tensor([0.0] * 6 + [2.0, 0.0]))
        client = buffer.client()
        assert client.direct
        os.kill(buffer.pid(), signal.SIGKILL)

        with pytest.raises(ray.exceptions.RayActorError) as caught:
            buffer.empty()
        assert caught.value.__notes__ == [
            f"The buffer still exists in {tmp_path}/buffer: open it with shmbuffer.attach(), "
            "or create a new RayReplayBuffer with a storage in that directory."
        ]
        assert client.sample()["a"].tolist() == [6] * 4
        assert client.extend(items(8, 1)).tolist() == [8]

        with made(storage=storage, **PRIORITIZED) as successor:
            assert successor[:]["a"].tolist() == list(range(9))
            assert successor.write_count == 9
            # The item that was written after the kill has the largest priority ever.
            assert successor.state_dict()["_sampler"]["_priorities"][:9].tolist() == (
                [0.0] * 6 + [2.0, 0.0, 2.0]
            )
            successor.extend(items(9, 1))
            assert client[:]["a"].tolist() == list(range(10))  # the same memory, under any owner
        client.detach()


@pytest.mark.full
def test_an_actor_that_ray_restarts_finds_its_items(tmp_path: Path) -> None:
    config = {**SMALL, "max_restarts": 1, "max_task_retries": -1}
    with made(
        storage=memmap(tmp_path / "buffer"), remote_config=config, transport="ray", **PRIORITIZED
    ) as buffer:
        buffer.extend(items(0, 8))
        first = buffer.pid()
        os.kill(first, signal.SIGKILL)
        assert buffer[:]["a"].tolist() == list(range(8))
        assert buffer.extend(items(8, 1)).tolist() == [8]
        assert buffer.pid() != first


@pytest.mark.full
def test_without_a_directory_the_items_die_with_the_actor() -> None:
    with made(storage=partial(LazyTensorStorage, 20), **PRIORITIZED) as buffer:
        buffer.extend(items(0, 8))
        os.kill(buffer.pid(), signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError) as caught:
            len(buffer)
        assert caught.value.__notes__ == [
            "The buffer was in the memory of this actor, so its items are lost."
        ]


# -- a buffer in the actor's memory ----------------------------------------------------------------


@pytest.mark.full
def test_memory_of_the_actor_is_served_by_the_actor(plain: RayReplayBuffer) -> None:
    assert not plain.direct
    assert plain.paths["read"] == "its LazyTensorStorage is in the private memory of its owner"
    assert plain[2:5]["a"].tolist() == [2, 3, 4]
    assert set(plain.sample()["a"].tolist()) <= set(range(10))
    plain[0] = items(30, 1)[0]
    plain[0] = items(0, 1)[0]
    with pytest.raises(TypeError, match="the result of storage, a LazyTensorStorage, cannot"):
        _ = plain.storage


@pytest.mark.full
def test_a_part_that_is_set_may_be_made_by_the_actor(plain: RayReplayBuffer) -> None:
    # the former storage cannot leave the actor
    assert plain.set_storage(partial(ListStorage, 20)) is None
    plain.extend([torch.arange(3).numpy() + i for i in range(2)])
    found = plain[1]
    assert found.tolist() == [1, 2, 3]
    found += 1  # Ray's own views of its object store are read-only
    assert plain[1].tolist() == [1, 2, 3]


@pytest.mark.full
def test_a_view_of_a_memory_map_arrives_as_a_copy(plain: RayReplayBuffer) -> None:
    plain.set_storage(partial(LazyMemmapStorage, 20))
    plain.extend(items(0, 5))
    assert plain[1:3]["a"].tolist() == [1, 2]
    assert plain[4]["obs"].tolist() == [4.0, -4.0]


# -- life ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_closed_buffer_says_so_and_its_temporary_directory_is_gone() -> None:
    storage = partial(LazyMemmapStorage, 20, shared_init=True)
    buffer = RayReplayBuffer(storage=storage, remote_config=SMALL)
    assert buffer.is_alive
    assert buffer.start() is buffer
    assert inspect.signature(buffer.sample) == inspect.signature(
        TensorDictReplayBuffer(storage=LazyTensorStorage(1)).sample
    )
    assert (buffer.service_backend, buffer.transport_kind, buffer.has_gpu) == ("ray", "ray", False)
    assert isinstance(buffer, ReplayBuffer)
    buffer.extend(items(0, 3))
    assert buffer.direct
    path = buffer.storage.scratch_dir
    assert path.is_dir()
    buffer.close()
    assert not path.exists()
    buffer.shutdown()  # idempotent
    assert not buffer.is_alive
    for use in (buffer.sample, buffer.client, buffer.start, buffer.empty, lambda: len(buffer)):
        with pytest.raises(BufferClosedError, match="this RayReplayBuffer was closed"):
            use()
    assert ray.is_initialized()  # it was initialized before, so it must stay


@pytest.mark.full
def test_the_constructor_raises_what_the_buffers_constructor_raises() -> None:
    options = {**PRIORITIZED, "alpha": -1}
    with ThreadPoolExecutor() as threads:
        unknown = threads.submit(RayReplayBuffer, no_such_argument=1, remote_config=SMALL)
        negative = threads.submit(RayReplayBuffer, **options, remote_config=SMALL)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_argument'"):
        unknown.result()
    with pytest.raises(ValueError, match=r"alpha.*-1"):
        negative.result()


def test_a_part_that_is_made_already_is_pickled_if_possible() -> None:
    storage = LazyTensorStorage(20)
    storage.set(range(2), torch.zeros(2))
    with pytest.raises(TypeError) as caught:
        RayReplayBuffer(sampler=RandomSampler(), storage=storage, remote_config=SMALL)
    message = str(caught.value)
    assert message.startswith(
        "RayReplayBuffer(storage=...): this LazyTensorStorage cannot be sent to the actor "
        "(RuntimeError: "
    )
    assert message.endswith(
        "pass a function that creates it there, such as "
        "storage=partial(LazyTensorStorage, 100), or transform_factory=... for a transform"
    )


def test_transports() -> None:
    with pytest.raises(ValueError, match="must be 'auto' or 'ray', got 'pigeon'"):
        RayReplayBuffer(transport="pigeon")
    with pytest.raises(ValueError, match=r"transport_options=\{'a': 1\}.*omit transport_options"):
        RayReplayBuffer(transport_options={"a": 1})
    with pytest.raises(NotImplementedError, match="is not supported; pass transport='auto'"):
        RayReplayBuffer(transport="distributed")


@pytest.mark.full
def test_parts_can_be_made_at_the_first_use(tmp_path: Path) -> None:
    storage, sampler = memmap(tmp_path / "buffer"), RandomSampler()
    with made(storage=storage, sampler=sampler, delayed_init=True) as buffer:
        assert not (tmp_path / "buffer").exists()
        buffer.extend(items(0, 3))
        assert (tmp_path / "buffer").exists()
        assert len(buffer) == 3


def test_everything_that_a_buffer_can_do_is_asked_of_the_actor() -> None:
    own = {
        name
        for name in dir(TensorDictPrioritizedReplayBuffer)
        if not name.startswith("_") and not isinstance(getattr(ReplayBuffer, name, None), type)
    } - {"family", "as_remote", "prioritized_sampler"}  # of the class; and beyond the family
    for name in own:
        found = next(vars(cls)[name] for cls in RayReplayBuffer.__mro__ if name in vars(cls))
        assert not any(
            found is vars(cls).get(name) for cls in TensorDictPrioritizedReplayBuffer.__mro__
        ), f"{name} would work on the handle itself"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError) as caught:
        RayReplayBuffer()
    assert str(caught.value) == (
        f"RayReplayBuffer needs Ray, which is not installed: {command('ray')}"
    )


def test_a_slow_start_says_what_ray_does_to_slow_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shmbuffer.distributed.keeper.START_S", 0.0)
    monkeypatch.setattr("shmbuffer.distributed.keeper.SLOW_START_S", 0.0)
    with made(storage=partial(LazyTensorStorage, 4)) as buffer:
        assert buffer.is_alive
    waits, killed = caplog.messages
    assert waits.startswith("a RayReplayBuffer that requests {'num_cpus': 0}: Ray has not started")
    assert waits.endswith("pass remote_config={'num_cpus': 0} to request fewer resources")
    assert "set RAY_worker_niceness=0 and RAY_worker_register_timeout_seconds=600" in killed
