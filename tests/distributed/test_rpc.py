"""Tests with real processes in a torch RPC group."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import rpc

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RemoteTensorDictReplayBuffer,
    SamplerWithoutReplacement,
    SchemaMismatchError,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.distributed.rpc import RemoteClient
from tests.distributed.group import Group
from tests.distributed.parts import Noting, Oldest, OwnedByRpc, doubled, items, stopped


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    try:
        yield made
        made.end()
    except BaseException:
        made.kill()
        raise


def owned(storage: Callable[[], Any], **options: Any) -> Any:
    """Runs in the learner: makes an RRef to a buffer of the other process with items 0 to 7."""
    rref = rpc.remote("buffer", OwnedByRpc, kwargs={"storage": storage, "batch_size": 4, **options})
    rref.rpc_sync().extend(items(0, 8))
    return rref


def in_files(path: Path) -> partial[LazyMemmapStorage]:
    return partial(LazyMemmapStorage, 20, scratch_dir=path / "buffer", shared_init=True)


@pytest.fixture(params=["a directory", "memory of the owner"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes a storage that the learner can open, and one that it cannot."""
    if request.param == "a directory":
        return in_files(tmp_path)
    return partial(LazyTensorStorage, 20)


def saves_and_tells(storage: Callable[[], Any], path: Path) -> tuple[int, int]:
    rref = owned(storage)
    RemoteTensorDictReplayBuffer.client(rref).dumps(
        path / "save", on_progress=Noting(path / "notes")
    )
    return os.getpid(), rpc.rpc_sync("buffer", os.getpid)


def test_the_owner_of_a_buffer_reports_the_progress_of_a_save(
    group: Group, storage: Callable[[], Any], tmp_path: Path
) -> None:
    mine, owner = group.run(saves_and_tells, storage, tmp_path)
    assert mine != owner
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert {pid for pid, _, _ in notes} == {str(owner)}
    assert [what for _, what, fraction in notes if fraction == "1.0"] == ["copy", "sync"]
    assert (tmp_path / "save" / "storage").is_dir()


# -- every way to call -----------------------------------------------------------------------------


def calls_every_way(storage: Callable[[], Any]) -> dict[str, Any]:
    rref = owned(storage)
    buffer = RemoteTensorDictReplayBuffer
    client = buffer.client(rref)
    return {
        "by proxy": rref.rpc_sync().read_all_in_order(5)["a"].tolist(),
        "by name": rpc.rpc_sync("buffer", buffer.read_all_in_order, (rref, 3))["a"].tolist(),
        "later": rref.rpc_async().read_all_in_order(2).wait()["a"].tolist(),
        "with the RRef": buffer.read_all_in_order(rref, 4)["a"].tolist(),
        "with a client": client[5]["obs"].tolist(),
        "writes": [
            rref.rpc_sync().extend(items(8, 1)).tolist(),
            rpc.rpc_sync("buffer", buffer.add, (rref, items(9, 1)[0])),
            buffer.extend(rref, items(10, 2)).tolist(),
            client.add(items(12, 1)[0]),
        ],
        "all": client[:]["a"].tolist(),
        "len": len(client),
        "count": client.write_count,
        "drawn": [
            set(rref.rpc_sync().sample()["a"].tolist()) <= set(range(13)),
            set(buffer.sample(rref)["a"].tolist()) <= set(range(13)),
            set(client.sample()["a"].tolist()) <= set(range(13)),
        ],
    }


def test_every_way_to_call_reaches_the_same_buffer(
    group: Group, storage: Callable[[], Any]
) -> None:
    assert group.run(calls_every_way, storage) == {
        "by proxy": [0, 1, 2, 3, 4],
        "by name": [0, 1, 2],
        "later": [0, 1],
        "with the RRef": [0, 1, 2, 3],
        "with a client": [5.0, -5.0],
        "writes": [[8], 9, [10, 11], 12],
        "all": list(range(13)),
        "len": 13,
        "count": 13,
        "drawn": [True, True, True],
    }


def samples_with_info(storage: Callable[[], Any]) -> list[bool]:
    rref = owned(storage)
    buffer = RemoteTensorDictReplayBuffer
    found = []
    for sample in (
        lambda *args, **kwargs: rpc.rpc_sync("buffer", buffer.sample, (rref, *args), kwargs),
        partial(buffer.sample, rref),
        buffer.client(rref).sample,
    ):
        data, info = sample(4, True)
        found.append(torch.equal(info["index"], data["a"]) and "index" in data)
        data, info = sample(return_info=True, include_info=False)
        found.append(torch.equal(info["index"], data["a"]) and "index" not in data)
    return found


def test_the_arguments_of_sample_are_in_the_order_of_the_base_class(
    group: Group, storage: Callable[[], Any]
) -> None:
    assert group.run(samples_with_info, storage) == [True] * 6


def errs(storage: Callable[[], Any]) -> list[str]:
    client = RemoteTensorDictReplayBuffer.client(owned(storage))
    found = []
    for use in (
        lambda: client.extend(items(0, 2).exclude("a")),
        lambda: (client.empty(), client.sample()),
        lambda: client.no_such_thing,
        lambda: client.close,
    ):
        try:
            use()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_errors_are_those_of_the_buffer(group: Group, storage: Callable[[], Any]) -> None:
    mismatch, empty, unknown, life = group.run(errs, storage)
    assert mismatch.startswith(SchemaMismatchError.__name__)
    assert "leaf 'a' is missing in this write" in mismatch
    assert empty.startswith(EmptyBufferError.__name__)
    assert unknown == "AttributeError: 'OwnedByRpc' object has no attribute 'no_such_thing'"
    assert life == (
        "AttributeError: RemoteClient has no 'close', because it is a handle and the buffer "
        "belongs to its creator; call detach() to stop using it"
    )


# -- on the buffer's machine -----------------------------------------------------------------------


def looks_for_a_path(storage: Callable[[], Any]) -> tuple[bool, dict[str, str], str]:
    client = RemoteTensorDictReplayBuffer.client(owned(storage))
    return client.direct, client.paths, repr(client)


def test_the_way_is_visible(group: Group, tmp_path: Path) -> None:
    assert group.run(looks_for_a_path, in_files(tmp_path)) == (
        True,
        dict.fromkeys(("read", "write", "sample"), "direct"),
        f"RemoteClient({tmp_path}/buffer)",
    )
    reason = "its LazyTensorStorage is in the private memory of its owner"
    assert group.run(looks_for_a_path, partial(LazyTensorStorage, 20)) == (
        False,
        dict.fromkeys(("read", "write", "sample"), reason),
        "RemoteClient(RPC to buffer)",
    )


def uses_a_stopped_buffer(storage: Callable[[], Any]) -> list[Any]:
    rref = owned(storage, sampler=partial(PrioritizedSampler, 20, 1.0, 1.0, eps=0.0))
    buffer, pid = RemoteTensorDictReplayBuffer, rref.rpc_sync().pid()
    assert pid != os.getpid()
    client = buffer.client(rref)
    assert client.direct
    assert buffer.read_all_in_order(rref, 0).batch_size == (0,)  # its handle knows the way too
    with stopped(pid):
        client.extend(items(8, 1))
        buffer.update_priority(rref, torch.arange(9), torch.tensor([0.0] * 8 + [2.0]))
        sample = client.sample()
        sample["td_error"] = torch.full((4,), 3.0)
        update = client.update_tensordict_priority(sample)
        while_stopped = [sample["a"].tolist(), tuple(update), len(client), client[:]["a"].tolist()]
    return [*while_stopped, rref.rpc_sync().state_dict()["_sampler"]["_priorities"][8].item()]


def test_a_direct_client_does_not_need_the_owner(group: Group, tmp_path: Path) -> None:
    assert group.run(uses_a_stopped_buffer, in_files(tmp_path)) == [
        [8] * 4,
        (4, 0),
        9,
        list(range(9)),
        3.0,
    ]


def sees_changes(storage: Callable[[], Any]) -> list[Any]:
    rref = owned(storage)
    client = RemoteTensorDictReplayBuffer.client(rref)
    found: list[Any] = ["twice" in client.sample()]
    rref.rpc_sync().append_transform(doubled)
    sample = client.sample()
    found += [torch.equal(sample["twice"], 2 * sample["a"]), client.direct]
    rref.rpc_sync().set_sampler(Oldest())  # a user's sampler stays in the process of the owner
    found += [client.paths["sample"], client.sample()["a"].tolist(), client.sample()["a"].tolist()]
    return found


def test_a_change_of_the_buffer_reaches_the_handles(group: Group, tmp_path: Path) -> None:
    assert group.run(sees_changes, in_files(tmp_path)) == [
        False,
        True,
        True,
        "Oldest is not one of shmbuffer's samplers, "
        "and may keep track of the items that it has sampled",
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def counts_clients(storage: Callable[[], Any]) -> list[int]:
    rref = owned(storage)
    proxy = rref.rpc_sync()
    counts = [proxy.stats()["clients_alive"]]
    RemoteTensorDictReplayBuffer.sample(rref)
    client = RemoteTensorDictReplayBuffer.client(rref)
    client.sample()
    counts.append(proxy.stats()["clients_alive"])
    client.detach()
    counts.append(proxy.stats()["clients_alive"])
    return counts


def test_a_handle_leaves_when_its_holder_is_gone(group: Group, tmp_path: Path) -> None:
    assert group.run(counts_clients, in_files(tmp_path)) == [1, 3, 2]
    # The RRef is gone, and the handle behind it. The owner drops the buffer when it is notified.
    length, clients = group.run(len_of_what_is_left, tmp_path / "buffer")
    assert length == 8
    assert clients in (1, 2)


def len_of_what_is_left(path: Path) -> tuple[int, int]:
    with attach(path) as buffer:
        return len(buffer), buffer.stats()["clients_alive"]


def passes_a_client_on(storage: Callable[[], Any]) -> tuple[bool, bool, list[int]]:
    client = RemoteTensorDictReplayBuffer.client(owned(storage))
    return rpc.rpc_sync("buffer", uses_a_client, (client,))


def uses_a_client(client: RemoteClient) -> tuple[bool, bool, list[int]]:
    return client.direct, isinstance(client, RemoteClient), client[:]["a"].tolist()


def test_a_client_can_be_passed_in_a_call(group: Group, tmp_path: Path) -> None:
    assert group.run(passes_a_client_on, in_files(tmp_path)) == (True, True, list(range(8)))


def reads_after_a_kill(storage: Callable[[], Any]) -> list[Any]:
    rref = owned(storage)
    client = RemoteTensorDictReplayBuffer.client(rref)
    assert client.direct
    os.kill(rref.rpc_sync().pid(), signal.SIGKILL)
    client.extend(items(8, 2))
    return [client.sample()["a"].shape[0], client[:]["a"].tolist()]


def test_an_owner_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    group = Group(tmp_path)
    try:
        assert group.run(reads_after_a_kill, in_files(tmp_path)) == [4, list(range(10))]
    finally:
        group.kill()  # without one of its members, the group cannot end normally
    with attach(tmp_path / "buffer") as buffer:
        assert type(buffer) is TensorDictReplayBuffer
        assert buffer[:]["a"].tolist() == list(range(10))
        assert buffer.write_count == 10


# -- without RPC -----------------------------------------------------------------------------------


def test_locally_it_is_a_buffer_like_any_other(tmp_path: Path) -> None:
    with RemoteTensorDictReplayBuffer(storage=in_files(tmp_path), batch_size=4) as buffer:
        assert isinstance(buffer, TensorDictReplayBuffer)
        assert buffer.client() is buffer
        assert buffer.extend(items(0, 8)).tolist() == list(range(8))
        assert buffer.append_transform(doubled) is buffer
        sample = buffer.sample()
        assert torch.equal(sample["twice"], 2 * sample["a"])
        with pickle.loads(pickle.dumps(buffer)) as copy:
            copy.extend(items(8, 1))
        assert len(buffer) == 9


def test_every_public_method_can_be_named_in_a_call() -> None:
    cls = RemoteTensorDictReplayBuffer
    names = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    assert {"sample", "extend", "empty", "mark_update", "set_sampler", "dumps"} <= set(names)
    for name in names:
        method = getattr(cls, name)
        assert pickle.loads(pickle.dumps(method)) == method


def test_it_can_be_made_of_a_parquet_file(tmp_path: Path) -> None:
    with RemoteTensorDictReplayBuffer(storage=in_files(tmp_path), batch_size=4) as buffer:
        buffer.extend(items(0, 8))
        buffer.to_parquet(tmp_path / "items.parquet")
    with RemoteTensorDictReplayBuffer.from_parquet(tmp_path / "items.parquet") as buffer:
        assert type(buffer) is RemoteTensorDictReplayBuffer
        assert torch.equal(buffer[:]["a"], items(0, 8)["a"])


def test_it_takes_what_makes_its_parts() -> None:
    with RemoteTensorDictReplayBuffer(
        storage=partial(LazyTensorStorage, 5), sampler=SamplerWithoutReplacement, batch_size=2
    ) as buffer:
        buffer.extend(TensorDict({"a": torch.arange(4)}, [4]))
        assert sorted(i for batch in buffer for i in batch["a"].tolist()) == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="no_such_argument"):
        RemoteTensorDictReplayBuffer(no_such_argument=1)
