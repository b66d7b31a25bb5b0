"""Ensembles: from which buffer each sample comes, and how ensembles are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)

pytestmark = pytest.mark.product(few=3)


def items(buffer: int, count: int) -> TensorDict:
    """Makes items whose ids identify their buffer."""
    number = torch.arange(count) + 100 * buffer
    return TensorDict({"id": number, "obs": number.unsqueeze(-1).float()}, [count])


@pytest.fixture(
    params=[LazyTensorStorage, LazyMemmapStorage, ListStorage], ids=lambda c: c.__name__
)
def storage(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["buffers", "parts"])
def ensemble(request: pytest.FixtureRequest, storage: Any) -> Any:
    """Makes an ensemble of three buffers with 5, 6 and 7 items."""

    def made(**options: Any) -> Any:
        options = {"batch_size": 6, "sample_from_all": True, **options}
        if request.param == "buffers":
            members = [TensorDictReplayBuffer(storage=storage(10)) for _ in range(3)]
            rb = ReplayBufferEnsemble(*members, **options)
        else:
            sampling = {
                name: options.pop(name)
                for name in ("p", "sample_from_all", "num_buffer_sampled")
                if name in options
            }
            rb = ReplayBufferEnsemble(
                storages=StorageEnsemble(*(storage(10) for _ in range(3)), transforms=[None] * 3),
                samplers=SamplerEnsemble(*(RandomSampler() for _ in range(3)), **sampling),
                writers=WriterEnsemble(*(TensorDictRoundRobinWriter() for _ in range(3))),
                **options,
            )
        for number in range(3):
            rb[number].extend(items(number, 5 + number))
        return rb

    return made


def test_a_sample_has_a_row_for_each_buffer(ensemble: Any) -> None:
    rb = ensemble()
    for _ in range(5):
        sample = rb.sample()
        assert list(sample.batch_size) == [3, 2]
        for number in range(3):
            assert set((sample["id"][number] // 100).tolist()) == {number}
        assert torch.equal(sample["obs"].squeeze(-1), sample["id"].float())


def test_a_sample_says_from_which_buffer_and_from_where(ensemble: Any) -> None:
    sample = ensemble().sample()
    assert sample["index", "buffer_ids"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert torch.equal(sample["index", "index"], sample["id"] % 100)


def test_the_info_says_it_too(ensemble: Any) -> None:
    data, info = ensemble().sample(return_info=True)
    index = info["index"]["index"] if "index" in info else info["index", "index"]
    assert torch.equal(index, data["id"] % 100)


@pytest.mark.parametrize("p", [[0.5, 0.5, 0.0], torch.tensor([1.0, 3.0, 0.0])])
def test_a_buffer_of_probability_zero_never_appears(ensemble: Any, p: Any) -> None:
    rb = ensemble(p=p, sample_from_all=False, num_buffer_sampled=2)
    counts: Counter[int] = Counter()
    for _ in range(100):
        sample = rb.sample()
        assert list(sample.batch_size) == [2, 3]
        for row in sample["id"] // 100:
            assert len(set(row.tolist())) == 1
            counts[int(row[0])] += 1
    assert set(counts) == {0, 1}
    if isinstance(p, list):
        assert counts[0] > 60
        assert counts[1] > 60
    else:
        assert counts[1] > counts[0]


def test_without_probabilities_buffers_are_drawn_alike(ensemble: Any) -> None:
    rb = ensemble(sample_from_all=False, num_buffer_sampled=1)
    counts = Counter(int(rb.sample()["id"][0, 0]) // 100 for _ in range(150))
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 20


def test_as_many_buffers_as_there_are_unless_said_otherwise(ensemble: Any) -> None:
    rb = ensemble(sample_from_all=False)
    for _ in range(10):
        assert list(rb.sample().batch_size) == [3, 2]


def test_the_batch_is_divided_among_the_buffers_or_refused(ensemble: Any) -> None:
    rb = ensemble(batch_size=7)
    with pytest.raises(ValueError, match=r"7|divi"):
        rb.sample()
    rb = ensemble(batch_size=12)
    assert list(rb.sample().batch_size) == [3, 4]


def test_the_same_seed_draws_the_same(ensemble: Any) -> None:
    def drawn(seed: int) -> list[Any]:
        rb = ensemble(
            p=[0.2, 0.5, 0.3], sample_from_all=False, num_buffer_sampled=2,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        return [rb.sample()["id"].tolist() for _ in range(5)]

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first


def test_one_buffer_is_taken_out_by_its_index(ensemble: Any) -> None:
    rb = ensemble()
    assert len(rb[1]) == 6
    assert isinstance(rb[1], ReplayBuffer)
    assert rb[2][:]["id"].tolist() == [200, 201, 202, 203, 204, 205, 206]
    assert rb[-1].storage is rb[2].storage
    with pytest.raises(IndexError):
        rb[5]


def test_several_are_an_ensemble_again(ensemble: Any) -> None:
    rb = ensemble()
    for index in (slice(1, 3), [1, 2], torch.tensor([1, 2])):
        part = rb[index]
        assert isinstance(part, ReplayBufferEnsemble)
        assert part[0].storage is rb[1].storage
        assert part[1].storage is rb[2].storage
    assert rb[:][2].storage is rb[2].storage


def test_items_of_several_buffers_are_read_at_once(ensemble: Any) -> None:
    rb = ensemble()
    assert rb[1, 3]["id"] == 103
    assert rb[0, :]["id"].tolist() == [0, 1, 2, 3, 4]
    assert rb[:, :2]["id"].tolist() == [[0, 1], [100, 101], [200, 201]]
    assert rb[1:, 2]["id"].tolist() == [102, 202]
    assert rb[:, torch.tensor([4, 0])]["id"].tolist() == [[4, 0], [104, 100], [204, 200]]


def test_an_ensemble_is_written_through_its_buffers(ensemble: Any) -> None:
    rb = ensemble()
    for write in (lambda: rb.extend(items(0, 2)), lambda: rb.add(items(0, 1)[0])):
        with pytest.raises(RuntimeError):
            write()
    rb[0].extend(items(0, 8) + 20)
    assert 27 in rb[0][:]["id"].tolist()
    assert 27 in {int(number) for _ in range(80) for number in rb.sample()["id"][0]}


def test_transforms_of_buffers_and_of_the_ensemble(storage: Any) -> None:
    members = [
        TensorDictReplayBuffer(
            storage=storage(10), transform=lambda td, n=n: td.set("of", td["obs"] * 0 + n)
        )
        for n in range(2)
    ]
    rb = ReplayBufferEnsemble(
        *members,
        transform=lambda td: td.set("sum", td["of"] + td["obs"]),
        batch_size=4,
        sample_from_all=True,
    )
    for number in range(2):
        rb[number].extend(items(number, 5))
    sample = rb.sample()
    assert sample["of"].squeeze(-1).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert torch.equal(sample["sum"], sample["of"] + sample["obs"])


def test_samplers_may_differ(storage: Any) -> None:
    members = [
        TensorDictReplayBuffer(storage=storage(10), sampler=sampler)
        for sampler in (PrioritizedSampler(10, 1.0, 1.0), PrioritizedSampler(10, 1.0, 1.0))
    ]
    rb = ReplayBufferEnsemble(*members, batch_size=40, sample_from_all=True)
    for number in range(2):
        rb[number].extend(items(number, 5))
    rb[0].update_priority(torch.arange(5), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
    sample = rb.sample()
    assert set(sample["id"][0].tolist()) == {2}
    assert set(sample["id"][1].tolist()) == {100, 101, 102, 103, 104}
    assert list(sample["priority_weight"].shape) == [2, 20]


def test_saving_and_loading_every_buffer(ensemble: Any, tmp_path: Any) -> None:
    rb = ensemble()
    rb.dumps(tmp_path / "ensemble")
    other = ensemble()
    for number in range(3):
        other[number].empty()
    for name in ("²", "٣"):  # names that another program may have left
        (tmp_path / "ensemble" / "storage" / name).mkdir()
    other.loads(tmp_path / "ensemble")
    for number in range(3):
        assert torch.equal(other[number][:]["id"], items(number, 5 + number)["id"])
