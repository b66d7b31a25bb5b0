"""Writing: add, extend, indices, the cursor, oversized batches, counts and emptying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.replay.conformance import (
    LISTS,
    RECORDS,
    RINGS,
    Maker,
    assert_are_steps,
    cases,
    numbers,
    steps,
)

pytestmark = pytest.mark.product(few=3)

ONE_SAMPLER = cases(samplers=("random",))
IN_ORDER = [case for case in ONE_SAMPLER if case.in_order]


every_case = pytest.mark.parametrize("maker", cases(), indirect=True, ids=str)
every_storage_and_sampler = pytest.mark.parametrize(
    "maker", cases(writers=("round robin", "max value")), indirect=True, ids=str
)
every_storage_and_writer = pytest.mark.parametrize("maker", ONE_SAMPLER, indirect=True, ids=str)
every_ring_of_items = pytest.mark.parametrize("maker", IN_ORDER, indirect=True, ids=str)


TEXTS = ["one", "two", "three"]
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "text": (np.array(TEXTS), TEXTS),
    "bytes": (np.array([b"1", b"22", b"3"]), [b"1", b"22", b"3"]),
    "text as objects": (np.array(TEXTS, object), TEXTS),
    "text and None": (np.array(["one", None, "three"], object), ["one", None, "three"]),
    "a list": (TEXTS, TEXTS),
}


@pytest.mark.parametrize(
    "maker",
    cases((*LISTS, *RECORDS), ("random",), ("round robin",)),
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("cls", ["TensorDictReplayBuffer", "ReplayBuffer"])
@pytest.mark.parametrize(("column", "values"), COLUMNS.values(), ids=COLUMNS)
def test_each_item_gets_its_value_from_a_column_that_is_no_tensor(
    maker: Maker, cls: str, column: Any, values: list[Any]
) -> None:
    rb = maker.buffer(cls=cls, collate_fn=list)
    rb.extend({"id": np.arange(3), "prompt": column, "nested": {"prompt": column}})
    assert [rb[at]["prompt"] for at in range(3)] == values
    assert [rb[at]["nested"]["prompt"] for at in range(3)] == values
    assert [int(rb[at]["id"]) for at in range(3)] == [0, 1, 2]
    assert all(type(rb[at]["prompt"]) is type(value) for at, value in enumerate(values))
    rows = np.array([["a", "b"], ["c", "d"]])
    rb.extend({"id": np.arange(2), "prompt": rows})
    assert [rb[at]["prompt"].tolist() for at in (3, 4)] == rows.tolist()


@pytest.mark.parametrize(
    "maker",
    cases((*LISTS, *RECORDS), ("random", "prioritized"), ("round robin",)),
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("column", [np.array(TEXTS), TEXTS, tuple(TEXTS)], ids=type)
def test_a_column_of_another_length_than_the_batch_is_refused(maker: Maker, column: Any) -> None:
    rb = maker.buffer()
    with pytest.raises(ValueError, match=r"'prompt' .*3.*the batch .*2.* in leaf 'id'"):
        rb.extend({"id": np.arange(2), "prompt": column})
    assert len(rb) == 0
    rb.extend({"id": np.arange(3), "prompt": column})
    assert [rb[at]["prompt"] for at in range(3)] == TEXTS


@pytest.mark.parametrize(
    "maker", cases(RINGS, ("random",), ("round robin",)), indirect=True, ids=str
)
@pytest.mark.parametrize("cls", ["TensorDictReplayBuffer", "ReplayBuffer"])
@pytest.mark.parametrize(("column", "values"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_of_text_in_a_dict_is_no_leaf_of_a_tensor_storage(
    maker: Maker, cls: str, column: Any, values: list[Any]
) -> None:
    rb = maker.buffer(cls=cls)
    with pytest.raises(TypeError, match=r"is not a tensor.*use a ListStorage"):
        rb.extend({"id": np.arange(len(values)), "prompt": column})
    assert len(rb) == 0


@every_case
def test_a_write_is_read_back(maker: Maker) -> None:
    rb = maker.buffer()
    index = rb.extend(steps(0, 7))
    assert index.dtype is torch.int64
    assert index.tolist() == list(range(7))
    assert len(rb) == 7
    assert_are_steps(rb[:], list(range(7)))


@every_storage_and_writer
def test_add_returns_the_index_as_an_int(maker: Maker) -> None:
    rb = maker.buffer()
    for number in range(3):
        index = rb.add(steps(number, number + 1)[0])
        assert type(index) is int
        assert index == number
        assert len(rb) == number + 1
    assert_are_steps(rb[:], [0, 1, 2])


@every_storage_and_writer
def test_the_newest_items_stay_if_not_all_fit(maker: Maker) -> None:
    rb = maker.buffer(8)
    for start in range(0, 20, 5):
        rb.extend(steps(start, start + 5))
    assert len(rb) == 8
    assert sorted(numbers(rb[:])) == list(range(12, 20))
    assert_are_steps(rb[:])


@every_ring_of_items
def test_indices_wrap_and_the_cursor_follows(maker: Maker) -> None:
    rb = maker.buffer(5)
    assert rb.writer._cursor == 0
    assert rb.extend(steps(0, 3)).tolist() == [0, 1, 2]
    assert rb.writer._cursor == 3
    assert rb.extend(steps(3, 7)).tolist() == [3, 4, 0, 1]
    assert rb.writer._cursor == 2
    assert rb.add(steps(7, 8)[0]) == 2
    assert rb.writer._cursor == 3
    assert numbers(rb[:]) == [5, 6, 7, 3, 4]


@every_ring_of_items
@pytest.mark.parametrize(("before", "count"), [(0, 12), (0, 5), (3, 12), (3, 10), (0, 23)])
def test_a_batch_larger_than_the_capacity_leaves_its_last_items_at_their_places(
    maker: Maker, before: int, count: int
) -> None:
    rb = maker.buffer(5)
    if before:
        rb.extend(steps(0, before))
    index = rb.extend(steps(before, before + count))
    assert index.tolist() == [(before + at) % 5 for at in range(count)]
    stored = {number % 5: number for number in range(before + count)}
    assert numbers(rb[:]) == [stored[at] for at in range(5)]
    assert rb.writer._cursor == (before + count) % 5
    assert len(rb) == 5


@every_storage_and_writer
def test_write_count_counts_writes_not_stored_items(maker: Maker) -> None:
    rb = maker.buffer(5)
    assert rb.write_count == 0
    rb.extend(steps(0, 4))
    assert rb.write_count == 4
    rb.add(steps(4, 5)[0])
    rb.extend(steps(5, 9))
    assert rb.write_count == 9
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 9)
    rb.extend(steps(0, 2))
    assert rb.write_count == 11
    rb.empty()
    assert rb.write_count == 0


@pytest.mark.product("storage sampler", few=8)
@every_storage_and_sampler
def test_an_empty_buffer_cannot_be_sampled_and_says_so(maker: Maker) -> None:
    rb = maker.buffer()
    with pytest.raises(RuntimeError, match=r"empty|nothing"):
        rb.sample()
    rb.extend(steps(0, 8))
    rb.sample()
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(RuntimeError, match=r"empty|nothing"):
        rb.sample()


@pytest.mark.product("storage sampler", few=8)
@every_storage_and_sampler
def test_after_empty_writing_starts_at_index_0(maker: Maker) -> None:
    rb = maker.buffer(8)
    rb.extend(steps(0, 11))
    rb.sample()
    rb.empty()
    assert rb.extend(steps(20, 24)).tolist() == [0, 1, 2, 3]
    assert numbers(rb[:]) == [20, 21, 22, 23]
    assert set(numbers(rb.sample())) <= {20, 21, 22, 23}
    assert rb.add(steps(24, 25)[0]) == 4
    assert len(rb) == 5


@every_ring_of_items
def test_an_empty_batch_writes_nothing(maker: Maker) -> None:
    rb = maker.buffer(5)
    rb.extend(steps(0, 3))
    index = rb.extend(steps(3, 3))
    assert index.tolist() == []
    assert index.dtype is torch.int64
    assert (len(rb), rb.write_count, rb.writer._cursor) == (3, 3, 3)


@every_storage_and_writer
def test_writing_leaves_the_callers_data_as_they_are(maker: Maker) -> None:
    rb = maker.buffer()
    data = steps(0, 6)
    before = data.clone()
    rb.extend(data)
    rb.sample()
    assert (data.select(*before.keys()) == before).all()
    if maker.case.storage not in ("list", "lazy stack"):  # these keep the items themselves
        data["obs"] += 100
    assert_are_steps(rb[:], list(range(6)))


@every_storage_and_writer
def test_repr_says_what_the_buffer_is_made_of(maker: Maker) -> None:
    rb = maker.buffer()
    for _ in range(2):
        text = repr(rb)
        assert "TensorDictReplayBuffer" in text
        for part in (rb.storage, rb.sampler, rb.writer):
            assert type(part).__name__ in text
        rb.extend(steps(0, 4))
    rb.close()
    assert repr(rb) == f"{type(rb).__name__}(closed)"


# -- top-k ----------------------------------------------------------------------------------------

best = pytest.mark.parametrize(
    "maker", [case for case in ONE_SAMPLER if not case.in_order], indirect=True, ids=str
)


@best
def test_a_worse_item_evicts_nothing(maker: Maker) -> None:
    rb = maker.buffer(5)
    rb.extend(steps(10, 15))
    assert rb.add(steps(3, 4)[0]) is None
    assert rb.extend(steps(0, 4)).tolist() == [-1, -1, -1, -1]
    assert sorted(numbers(rb[:])) == list(range(10, 15))
    assert rb.write_count == 5


@best
def test_a_better_item_takes_the_place_of_the_worst(maker: Maker) -> None:
    rb = maker.buffer(4)
    rb.extend(steps(0, 20)[torch.tensor([7, 3, 9, 5])])
    worst = numbers(rb[:]).index(3)
    assert rb.add(steps(8, 9)[0]) == worst
    assert sorted(numbers(rb[:])) == [5, 7, 8, 9]
    index = rb.extend(steps(0, 20)[torch.tensor([1, 12])])
    assert index[0] == -1
    assert sorted(numbers(rb[:])) == [7, 8, 9, 12]
    assert rb[int(index[1])]["id"] == 12


@best
def test_within_one_batch_the_best_stay(maker: Maker) -> None:
    rb = maker.buffer(4, batch_size=50)
    rb.extend(steps(0, 20)[torch.randperm(20)])
    assert sorted(numbers(rb[:])) == [16, 17, 18, 19]
    assert_are_steps(rb[:])
    sample = rb.sample()
    assert set(numbers(sample)) == {16, 17, 18, 19}


@best
@pytest.mark.parametrize("data", [torch.ones(3), {"rank": torch.ones(3)}, (torch.ones(3),)])
def test_top_k_needs_tensordicts(maker: Maker, data: Any) -> None:
    rb = maker.buffer(5, cls="ReplayBuffer")
    with pytest.raises(RuntimeError, match=r"TensorDict|tensor collection"):
        rb.extend(data)
    with pytest.raises(RuntimeError, match=r"TensorDict|tensor collection"):
        rb.add(data)
    assert len(rb) == 0


@best
def test_top_k_forgets_its_ranks_when_emptied(maker: Maker) -> None:
    rb = maker.buffer(3)
    rb.extend(steps(50, 60))
    rb.empty()
    assert sorted(rb.extend(steps(0, 3)).tolist()) == [0, 1, 2]
    assert sorted(numbers(rb[:])) == [0, 1, 2]
