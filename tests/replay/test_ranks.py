"""Learners with one seed: each rank draws its own batches, and rank 0 those of a lone learner."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.samplers.rank import mixed

ITEMS = 200
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(ITEMS, 1.0, 1.0),
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(ITEMS, alpha=1.0, beta=1.0, slice_len=4),
}


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def episodes() -> TensorDict:
    number = torch.arange(ITEMS)
    return TensorDict({"number": number, "episode": number // 10}, [ITEMS])


@pytest.fixture
def shared(fast_path: Path) -> Iterator[Path]:
    """Makes the directory of a buffer."""
    path = fast_path / "buffer"
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(ITEMS, scratch_dir=path)) as rb:
        rb.extend(episodes())
        yield path


def drawn(path: Path, sampler: Callable[[], Any] = RandomSampler, **options: Any) -> list[int]:
    """Returns the numbers in the first two batches of a handle, after ``torch.manual_seed(0)``."""
    torch.manual_seed(0)
    with attach(path, sampler=sampler(), batch_size=20, **options) as rb:
        return [*rb.sample()["number"].tolist(), *rb.sample()["number"].tolist()]


def in_another_process(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Runs a call in a forked child; returns its result or its first warning."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        try:
            there.send(call(*arguments, **options))
        except BaseException as error:
            there.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    assert here.poll(60)
    found = here.recv()
    process.join(60)
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
def test_one_seed_gives_each_rank_its_own_batches_and_rank_0_todays(
    shared: Path, kind: str
) -> None:
    sampler = SAMPLERS[kind]
    seeded = torch.Generator().manual_seed(0)  # the same bits as torch.manual_seed(0)
    alone = drawn(shared, sampler, generator=seeded)
    by_rank = [drawn(shared, sampler, rank=rank) for rank in range(3)]
    assert by_rank[0] == alone == drawn(shared, sampler)
    assert by_rank[1] != alone
    assert by_rank[2] not in (alone, by_rank[1])
    assert drawn(shared, sampler, rank=1) == by_rank[1]


def test_the_rank_comes_from_the_argument_then_torch_distributed_then_the_environment(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rank = [drawn(shared, rank=rank) for rank in range(3)]
    monkeypatch.setenv("RANK", "2")
    assert drawn(shared) == by_rank[2]
    assert drawn(shared, rank=1) == by_rank[1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert drawn(shared) == by_rank[1]
    assert drawn(shared, rank=0) == by_rank[0]


def test_a_generator_is_mixed_with_a_rank_that_is_given_beside_it_and_with_no_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(**options: Any) -> list[int]:
        return drawn(shared, generator=torch.Generator().manual_seed(3), **options)

    alone = one()
    assert one(rank=0) == alone
    by_rank = [one(rank=rank) for rank in (1, 2)]
    assert alone not in by_rank
    assert by_rank[0] != by_rank[1]
    assert one(rank=1) == by_rank[0]
    monkeypatch.setenv("RANK", "1")
    assert one() == alone


@pytest.mark.parametrize("text", ["²", "٣", "-1", "one"])
def test_a_variable_rank_that_is_no_number_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ValueError, match=f"the environment variable RANK must be .*, got '{text}'"):
        drawn(shared)


def test_the_rank_is_asked_for_at_the_first_draw(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner may attach before it knows its rank. Its rank does not change afterwards."""
    expected = drawn(shared, rank=1)
    with attach(shared, sampler=RandomSampler(), batch_size=20) as rb:
        monkeypatch.setenv("RANK", "1")
        torch.manual_seed(0)
        first = rb.sample()["number"].tolist()
        monkeypatch.setenv("RANK", "2")
        assert [*first, *rb.sample()["number"].tolist()] == expected


def test_a_buffer_of_this_process_alone_knows_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(**options: Any) -> torch.Tensor:
        rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=20, **options)
        rb.extend(torch.arange(50))
        torch.manual_seed(0)
        return rb.sample()

    expected = first()
    monkeypatch.setenv("RANK", "1")
    assert torch.equal(first(), expected)
    assert not torch.equal(first(shared=True), expected)


def test_memory_that_was_passed_on_is_shared() -> None:
    """A forked child that uses its parent's memory has its own handle."""
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=20, rank=1)
    rb.extend(torch.arange(50))

    def first() -> list[int]:
        torch.manual_seed(0)
        return rb.sample().tolist()  # type: ignore[no-any-return]

    alone = first()
    assert in_another_process(first) != alone


def test_an_ensemble_chooses_its_buffers_by_rank(fast_path: Path) -> None:
    def chosen(rank: int) -> list[int]:
        members = []
        for at in range(2):
            storage = LazyMemmapStorage(ITEMS, scratch_dir=fast_path / str(at), existsok=True)
            members.append(TensorDictReplayBuffer(storage=storage, batch_size=4))
            if not len(members[at]):
                members[at].extend(episodes())
        rb = ReplayBufferEnsemble(
            *members, batch_size=32, num_buffer_sampled=16, p=[0.5, 0.5], rank=rank
        )
        torch.manual_seed(0)
        ids: list[int] = rb.sample()["index", "buffer_ids"].flatten().tolist()
        rb.close()
        return ids

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)


@pytest.mark.parametrize(("rank", "says"), [(-1, "-1"), (1.0, "1.0"), (True, "True"), ("0", "'0'")])
def test_what_is_no_rank_is_refused(rank: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"rank must be the number of this learner.*got {says}"):
        ReplayBuffer(rank=rank)


def test_a_variable_that_is_no_rank_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"got 'first'; correct or unset it, or pass rank="):
        drawn(shared)


def test_keys_of_ranks_differ_and_look_random() -> None:
    keys = [0, 1, 2**62, *torch.randint(2**62, (500,)).tolist()]
    found = {mixed(key, rank) for key in keys for rank in range(8)}
    assert len(found) == 8 * len(set(keys))
    assert all(0 <= key < 2**63 for key in found)
    assert [mixed(key, 0) for key in keys] == keys
    bits = [mixed(key, rank) >> bit & 1 for key in keys for rank in (1, 2) for bit in range(63)]
    assert 0.48 < sum(bits) / len(bits) < 0.52


# -- learners that draw the same ------------------------------------------------------------------


@pytest.mark.product(few=2)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_learner_that_draws_what_another_draws_is_warned_once(shared: Path, kind: str) -> None:
    sampler = SAMPLERS[kind]()
    torch.manual_seed(0)
    with attach(shared, sampler=SAMPLERS[kind](), batch_size=20) as rb:
        rb.sample()

        def other() -> list[str]:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.manual_seed(0)
                with attach(shared, sampler=sampler, batch_size=20) as mine:
                    mine.sample()
                    mine.sample()
            return [str(one.message) for one in seen]

        (said,) = in_another_process(other)
    assert f"this process samples the same batches as process {os.getpid()}" in said
    assert "pass rank= to attach(), set the environment variable RANK" in said


def test_equal_generators_of_two_processes_are_warned_of_too(shared: Path) -> None:
    with attach(shared, batch_size=20, generator=torch.Generator().manual_seed(1)) as rb:
        rb.sample()

        def other(seed: int) -> list[int] | str:
            return drawn(shared, generator=torch.Generator().manual_seed(seed))

        assert "use another seed for each generator=, or pass rank=" in in_another_process(other, 1)
        assert isinstance(in_another_process(other, 2), list)


def test_ranks_other_seeds_and_the_dead_are_no_reason_to_warn(shared: Path) -> None:
    alone = in_another_process(drawn, shared)  # this process has ended since
    torch.manual_seed(0)
    with attach(shared, sampler=RandomSampler(), batch_size=20) as rb:
        assert [*rb.sample()["number"].tolist(), *rb.sample()["number"].tolist()] == alone
        assert in_another_process(drawn, shared, rank=1) != alone

        def seeded() -> list[int]:
            torch.manual_seed(1)
            with attach(shared, batch_size=20) as mine:
                return mine.sample()["number"].tolist()  # type: ignore[no-any-return]

        assert isinstance(in_another_process(seeded), list)
        torch.manual_seed(0)
        with attach(shared, sampler=RandomSampler(), batch_size=20) as second:
            # a single process gets no warning
            assert second.sample()["number"].tolist() == alone[:20]


# -- passes that are shared -----------------------------------------------------------------------


def passes(rbs: list[Any], number: int = 1) -> list[list[list[int]]]:
    """Returns what each learner drew in each pass."""
    found = []
    for _ in range(number):
        found.append([[n for batch in rb for n in batch["number"].tolist()] for rb in rbs])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [ITEMS, 10, 7])
def test_learners_share_a_pass_without_overlap(
    fast_path: Path, world_size: int, items: int
) -> None:
    storage = LazyMemmapStorage(ITEMS, scratch_dir=fast_path / "buffer")
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(episodes()[:items])
        rbs = [
            attach(
                fast_path / "buffer",
                batch_size=4,
                sampler=SamplerWithoutReplacement(world_size=world_size, rank=rank),
            )
            for rank in range(world_size)
        ]
        first, second = passes(rbs, 2)
        for shares in (first, second):
            assert sorted(n for share in shares for n in share) == list(range(items))
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
        assert first != second
        if items == ITEMS:
            assert all(share != sorted(share) for share in first)
        for each in rbs:
            each.close()


def test_the_shares_of_ranks_change_from_pass_to_pass_and_with_the_seed(shared: Path) -> None:
    def shares(seed: int) -> list[set[int]]:
        sampler = SamplerWithoutReplacement(world_size=2, rank=0, seed=seed)
        with attach(shared, batch_size=20, sampler=sampler) as rb:
            return [{n for batch in rb for n in batch["number"].tolist()} for _ in range(2)]

    first, second = shares(0)
    assert first != second
    assert shares(0) == [first, second]
    assert shares(1)[0] != first


def test_without_short_batches_all_learners_make_equally_many(fast_path: Path) -> None:
    """Otherwise the learner with one batch more would wait forever for the others' gradients."""
    with TensorDictReplayBuffer(
        storage=LazyMemmapStorage(ITEMS, scratch_dir=fast_path / "buffer")
    ) as rb:
        rb.extend(episodes()[:9])  # by two learners: 5 and 4, which would be 5 and 4 batches of 1
        rbs = [
            attach(
                fast_path / "buffer",
                batch_size=1,
                sampler=SamplerWithoutReplacement(True, world_size=2, rank=rank),
            )
            for rank in range(2)
        ]
        ((ours, theirs),) = passes(rbs)
        assert (len(ours), len(theirs)) == (4, 4)
        assert not set(ours) & set(theirs)
        for each in rbs:
            each.close()


def test_a_place_that_is_written_over_stays_with_its_learner(shared: Path) -> None:
    rbs = [
        attach(
            shared,
            batch_size=10,
            sampler=SamplerWithoutReplacement(world_size=2, rank=rank),
        )
        for rank in range(2)
    ]
    places = [[rb.sample()["index"].tolist() for _ in range(5)] for rb in rbs]
    with attach(shared) as writer:
        writer.extend(episodes()[:77])
    for at, rb in enumerate(rbs):
        places[at] += [batch["index"].tolist() for batch in rb]
    whole = [place for each in places for batch in each for place in batch]
    assert sorted(whole) == list(range(ITEMS))
    for each in rbs:
        each.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_learners_share_trajectories_without_overlap(shared: Path, shuffle: bool) -> None:
    rbs = [
        attach(
            shared,
            batch_size=12,
            sampler=SliceSamplerWithoutReplacement(
                slice_len=4, world_size=3, rank=rank, shuffle=shuffle
            ),
        )
        for rank in range(3)
    ]
    for shares in passes(rbs, 2):
        seen = [{n // 10 for n in share} for share in shares]
        assert sorted(n for one in seen for n in one) == list(range(ITEMS // 10))
        assert {len(one) for one in seen} == {6, 7}
    for each in rbs:
        each.close()


def test_a_shared_pass_takes_the_rank_of_the_buffer_and_of_the_environment(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(**options: Any) -> set[int]:
        sampler = SamplerWithoutReplacement(world_size=2)
        with attach(shared, batch_size=20, sampler=sampler, **options) as rb:
            return {n for batch in rb for n in batch["number"].tolist()}

    first, second = share(rank=0), share(rank=1)
    assert first | second == set(range(ITEMS))
    monkeypatch.setenv("RANK", "1")
    assert share() == second


def test_a_shared_pass_that_is_saved_goes_on_with_its_share(shared: Path, tmp_path: Path) -> None:
    def learner(rank: int) -> Any:
        sampler = SamplerWithoutReplacement(world_size=2, rank=rank)
        storage = LazyTensorStorage(ITEMS)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=20)

    rb = learner(1)
    rb.extend(episodes())
    rb.sample()
    rb.dumps(tmp_path)
    expected = [rb.sample()["number"].tolist() for _ in range(12)]
    again = learner(1)
    again.loads(tmp_path)
    assert [again.sample()["number"].tolist() for _ in range(12)] == expected


def test_a_share_needs_a_rank_below_the_number_of_learners(shared: Path) -> None:
    with pytest.raises(ValueError, match=r"rank must be between 0 and .*world_size=2\), got 2"):
        SamplerWithoutReplacement(world_size=2, rank=2)
    for wrong in (0, -1, 2.5, "2", True):
        with pytest.raises(ValueError, match=f"world_size must be an integer .* got {wrong!r}"):
            SamplerWithoutReplacement(world_size=wrong)
    for rank, says in (
        (None, "2 learners share .* the rank of this learner is unknown; pass rank= to"),
        (3, "rank must be below world_size=2, .* got 3"),
    ):
        sampler = SamplerWithoutReplacement(world_size=2)
        with (
            attach(shared, batch_size=2, sampler=sampler, rank=rank) as rb,
            pytest.raises(ValueError, match=says),
        ):
            rb.sample()


def test_a_learner_without_a_share_says_so(fast_path: Path) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ITEMS),
        sampler=SamplerWithoutReplacement(shuffle=False, world_size=3, rank=2),
        batch_size=1,
    )
    rb.extend(episodes()[:2])
    with pytest.raises(EmptyBufferError, match="the storage has 2 items for 3 learners"):
        rb.sample()
