"""Buffers as data sets: the workers of a DataLoader are learners with independent draws."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from shmbuffer import (
    Coordinator,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    attach,
)
from tests.kit.programs import Program


def items(count: int) -> TensorDict:
    numbers = torch.arange(count)
    return TensorDict({"obs": torch.randn(count, 3), "next": {"number": numbers}}, [count])


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Makes a directory with a prioritized buffer of 100 items."""
    with Coordinator(tmp_path / "replay", capacity=100, batch_size=8) as coordinator:
        coordinator.buffer.extend(items(100))
        yield tmp_path / "replay"


def loader(buffer: Any, workers: int = 2, context: str | None = "fork", **options: Any) -> Any:
    """Makes a DataLoader of a buffer; ``batches`` has the arguments of ``as_dataset``."""
    data = buffer.as_dataset(**options.pop("batches", {}))
    return DataLoader(
        data,
        batch_size=None,
        collate_fn=data.collate_fn,
        num_workers=workers,
        multiprocessing_context=context if workers else None,
        **options,
    )


def drawn(buffer: Any, count: int = 4, seed: int = 0, **options: Any) -> list[list[int]]:
    """Returns the indices of the first batches."""
    torch.manual_seed(seed)
    return [batch["index"].tolist() for batch in islice(loader(buffer, **options), count)]


def test_without_workers_it_is_an_iteration_over_the_buffer(path: Path) -> None:
    with attach(path) as rb:
        torch.manual_seed(1)
        wanted = [batch["index"].tolist() for batch in islice(rb, 3)]
        assert [len(one) for one in wanted] == [8, 8, 8]
        seen = iter(loader(rb, 0, generator=torch.Generator()))  # no worker is seeded
        torch.manual_seed(1)
        assert [next(seen)["index"].tolist() for _ in range(3)] == wanted


def test_a_batch_comes_whole_and_as_it_was_written(path: Path) -> None:
    with attach(path) as rb:
        everything = rb[:]
        batch = next(iter(loader(rb, 1)))
        assert (type(batch), batch.batch_size) == (TensorDict, torch.Size([8]))
        assert batch["next", "number"].tolist() == batch["index"].tolist()
        assert torch.equal(batch["obs"], everything[batch["index"]]["obs"])
        assert batch["_weight"].shape == (8,)
    with attach(path, batch_size=3) as rb:
        assert next(iter(loader(rb, 1))).shape == (3,)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize("kind", ["small", "nested batch", "bfloat16", "text"])
def test_a_batch_of_any_kind_arrives_as_it_was_drawn(rows: int, kind: str) -> None:
    """Small batches of plain tensors are sent differently from large ones and from all others."""
    data: Any = TensorDict({"x": torch.randn(rows, 1024, 2), "flag": torch.ones(rows) > 0}, [rows])
    if kind == "nested batch":
        data["deep"] = TensorDict({"y": torch.zeros(rows, 3, 2)}, [rows, 3])
    elif kind == "bfloat16":
        data["half"] = torch.randn(rows, 2).bfloat16()
    sampler = SamplerWithoutReplacement(shuffle=False)
    storage = LazyTensorStorage(rows)
    with TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=rows) as rb:
        rb.extend(data)
        if kind == "text":
            rb.append_transform(lambda batch: batch.set("task", "the same for all"))
        wanted = rb.sample()
        (batch,) = loader(rb, 1)
    assert type(batch) is type(wanted)
    assert (batch.device, batch.names) == (wanted.device, wanted.names)
    for key in wanted.keys(True):
        leaf, found = wanted[key], batch[key]
        if isinstance(leaf, torch.Tensor):
            assert (found.dtype, found.tolist()) == (leaf.dtype, leaf.tolist())
        elif isinstance(leaf, TensorDict):
            assert found.batch_size == leaf.batch_size
        else:
            assert found == leaf


def test_workers_draw_differently_and_a_seed_repeats_them(path: Path) -> None:
    with attach(path) as rb:
        first = drawn(rb)
        assert len({tuple(batch) for batch in first}) == 4
        assert drawn(rb) == first
        assert drawn(rb, seed=1) != first


@pytest.mark.full
def test_ranks_with_one_seed_draw_differently(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(rank: int | None, count: int) -> set[tuple[int, ...]]:
        with attach(path, rank=rank) as rb:
            return {tuple(one) for one in drawn(rb, count)}

    both = [batches(rank, 4) for rank in (0, 1)]
    assert len(both[0] | both[1]) == 8
    monkeypatch.setenv("RANK", "1")
    assert batches(None, 4) == both[1]


def test_a_generator_of_the_buffer_is_not_that_of_its_workers(path: Path) -> None:
    """All workers would have the same copy of the generator and draw the same items."""
    generator = torch.Generator().manual_seed(0)
    with attach(path, generator=generator) as rb:
        assert len({tuple(batch) for batch in drawn(rb)}) == 4


@pytest.mark.product(few=1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_is_shared_among_the_workers(path: Path, workers: int) -> None:
    with attach(path, sampler=SamplerWithoutReplacement()) as rb:
        orders = []
        for seed in range(2):
            batches = drawn(rb, 100, seed=seed, workers=workers)
            orders.append([index for batch in batches for index in batch])
            assert sorted(orders[-1]) == list(range(100))
        assert orders[0] != orders[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "sampler", [None, pytest.param(SamplerWithoutReplacement, marks=pytest.mark.full)]
)
def test_spawned_workers_draw_as_forked_ones(path: Path, sampler: Any) -> None:
    options = {} if sampler is None else {"sampler": sampler()}
    with attach(path, rank=1, **options) as rb:
        forked = drawn(rb)
        assert drawn(rb, context="spawn") == forked


def test_a_pass_is_shared_among_the_workers_of_all_ranks(path: Path) -> None:
    found: list[list[int]] = []
    for rank in range(2):
        sampler = SamplerWithoutReplacement(world_size=2, seed=3)
        with attach(path, rank=rank, sampler=sampler) as rb:
            list(islice(rb, 1))  # a pass of this process does not affect the workers
            options = {"persistent_workers": True, "seed": rank}
            found.append([i for batch in drawn(rb, 100, **options) for i in batch])
    assert [len(ours) for ours in found] == [50, 50]
    assert sorted(found[0] + found[1]) == list(range(100))


def test_workers_that_stay_begin_the_next_pass(path: Path) -> None:
    with attach(path, sampler=SamplerWithoutReplacement()) as rb:
        data = loader(rb, persistent_workers=True)
        passes = [[i for batch in data for i in batch["index"].tolist()] for _ in range(2)]
        assert sorted(passes[0]) == sorted(passes[1]) == list(range(100))
        assert passes[0] != passes[1]


def test_priorities_go_back_from_the_loop_and_late_ones_are_counted(path: Path) -> None:
    with attach(path) as rb:
        batch, later = islice(loader(rb), 2)
        batch["td_error"] = torch.full((8,), 50.0)
        assert rb.update_tensordict_priority(batch) == (8, 0)
        assert rb.sampler._max_priority[0] == 50
        rb.extend(items(100))
        later["td_error"] = torch.ones(8)
        assert rb.update_tensordict_priority(later) == (0, 8)


def test_a_plain_prioritized_buffer_gives_its_index_in_pairs() -> None:
    with PrioritizedReplayBuffer(
        alpha=0.5, beta=0.5, storage=LazyTensorStorage(10), batch_size=2, shared=True
    ) as rb:
        rb.extend(torch.arange(10))
        data, info = next(iter(loader(rb, batches={"return_info": True})))
        assert data.tolist() == info["index"].tolist()
        generation = info["index_generation"]
        assert rb.update_priority(info["index"], torch.ones(2), generation=generation) == (2, 0)


def test_workers_leave_the_buffer_with_their_loader(path: Path) -> None:
    with attach(path) as rb:
        running = iter(loader(rb))
        assert [len(next(running)) for _ in range(2)] == [8, 8]  # one batch from each worker
        assert rb.stats()["clients_alive"] == 4  # the coordinator, this handle, two workers
        running._shutdown_workers()
        stats = rb.stats()
        assert (stats["clients_alive"], stats["clients_dead"]) == (2, 0)


KILLED = """
import os, signal, sys, time
from torch.utils.data import DataLoader
from shmbuffer import attach

with attach(sys.argv[1]) as rb:
    data = rb.as_dataset()
    running = iter(DataLoader(data, batch_size=None, collate_fn=data.collate_fn, num_workers=2))
    next(running)
    time.sleep(2)  # they have nothing to do: torch waits for ever for one that dies as it sends
    os.kill(running._workers[0].pid, signal.SIGKILL)
    try:
        for batch in running:
            pass
    except RuntimeError as error:
        print(error, flush=True)
    rb.extend(rb[:10])
    print(len(rb.sample()), rb.stats()["clients_alive"], flush=True)
"""


@pytest.mark.full
def test_a_worker_that_is_killed_ends_the_loop_and_leaves_the_buffer_whole(path: Path) -> None:
    with Program.python(KILLED, path) as program:
        assert "DataLoader worker" in program.line()
        assert program.line() == "8 3"  # the client of the killed worker is gone
        assert program.wait(30) == 0


def test_workers_wait_for_the_first_items(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path / "replay", capacity=100, batch_size=8) as coordinator,
        attach(tmp_path / "replay") as rb,
    ):
        running = iter(loader(rb, 1, batches={"min_size": 20, "timeout": 30.0}))
        coordinator.buffer.extend(items(10))
        coordinator.buffer.extend(items(10))
        assert next(running).shape == (8,)


def test_a_transform_runs_in_the_workers(path: Path) -> None:
    def mark(batch: TensorDict) -> TensorDict:
        return batch.set("pid", torch.full(batch.shape, os.getpid()))

    with attach(path, transform=mark) as rb:
        batches = list(islice(loader(rb), 2))
        pids = {pid for batch in batches for pid in batch["pid"].tolist()}
        assert len(pids) == 2
        assert os.getpid() not in pids


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_batches_are_pinned_where_the_loader_is_asked(path: Path) -> None:
    with attach(path) as rb:
        batch = next(iter(loader(rb, pin_memory=True)))
        assert batch["obs"].is_pinned()
        assert batch["next", "number"].is_pinned()


def test_a_batch_size_is_needed() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(RuntimeError, match="iteration needs a batch size"):
        iter(rb)
    with pytest.raises(RuntimeError, match=r"batch size was specified; pass batch_size to"):
        rb.as_dataset()
