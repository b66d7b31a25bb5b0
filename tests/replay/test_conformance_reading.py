"""Reading and in-place changes with every kind of index and every form of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from shmbuffer import ReplayBuffer, TensorDictReplayBuffer
from tests.kit.items import Point
from tests.replay.conformance import LISTS, RINGS, Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)


@tensorclass
class Step:
    id: torch.Tensor
    obs: torch.Tensor


PLAIN = {"samplers": ("random",), "writers": ("round robin",)}
every_storage = pytest.mark.parametrize("maker", cases(**PLAIN), indirect=True, ids=str)
every_ring = pytest.mark.parametrize("maker", cases(RINGS, **PLAIN), indirect=True, ids=str)
every_list = pytest.mark.parametrize("maker", cases(LISTS, **PLAIN), indirect=True, ids=str)


# -- by index -------------------------------------------------------------------------------------


@every_storage
@pytest.mark.parametrize(
    "index",
    [
        [1, 3],
        [4],
        (2, 0, 2),
        range(1, 5, 2),
        torch.tensor([0, 5, -1]),
        np.array([0, 5, -1]),
        slice(2, 4),
        slice(None),
        slice(None, None, 2),
        slice(-3, None),
        slice(None, None, -1),
        slice(4, 0, -2),
        torch.tensor([True, False, True, False, False, True]),
        np.array([True, False, True, False, False, True]),
    ],
    ids=lambda index: f"{type(index).__name__}-{len(getattr(index, 'shape', 'ab'))}",
)
def test_any_index_of_the_first_dimension_reads_what_numpy_would(maker: Maker, index: Any) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    if isinstance(index, tuple):
        index = list(index)
    expected = np.arange(6)[np.asarray(index) if not isinstance(index, slice) else index].tolist()
    assert_are_steps(rb[index], expected)
    assert list(rb[index].batch_size) == [len(expected)]


@every_storage
@pytest.mark.parametrize("index", [0, 5, -1, -6, np.int64(3), torch.tensor(3)])
def test_one_index_reads_one_item(maker: Maker, index: Any) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    item = rb[index]
    assert list(item.batch_size) == []
    assert item["id"].item() == list(range(6))[int(index)]
    assert item["obs"].tolist() == [float(item["id"]), 10.0 * float(item["id"])]


@every_storage
def test_a_place_without_an_item_is_an_index_error(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    for index in (6, 10, -7, -11):
        with pytest.raises(IndexError, match=str(index)):
            rb[index]
    with pytest.raises(IndexError, match="7"):
        rb[[0, 7]]
    with pytest.raises(IndexError, match="12"):
        rb[torch.tensor([0, 12])]


@every_storage
def test_a_slice_reads_as_far_as_there_are_items(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    assert numbers(rb[4:9]) == [4, 5]
    assert numbers(rb[:100]) == [0, 1, 2, 3, 4, 5]
    assert numbers(rb.read_all_in_order()) == [0, 1, 2, 3, 4, 5]
    assert numbers(rb.read_all_in_order(end=2)) == [0, 1]


@every_storage
def test_a_buffer_that_wrapped_is_read_in_storage_order(maker: Maker) -> None:
    rb = maker.buffer(5)
    rb.extend(steps(0, 5))
    rb.extend(steps(5, 8))
    assert_are_steps(rb[:], [5, 6, 7, 3, 4])
    assert_are_steps(rb[1:4], [6, 7, 3])
    assert numbers(rb.read_all_in_order(end=4)) == [5, 6, 7, 3]


@every_storage
def test_storage_and_buffer_read_the_same(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    assert rb.storage[3]["id"] == rb[3]["id"] == rb.storage.get(3)["id"] == 3
    assert [int(item["id"]) for item in rb.storage.get([4, 2])] == [4, 2]
    assert len(rb.storage) == len(rb) == 6
    assert rb.storage.contains(5)
    assert not rb.storage.contains(6)


@every_ring
def test_a_key_reads_that_entry_of_every_item(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    assert rb["id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(rb["next", "obs"], steps(0, 6)["next", "obs"])


# -- in place -------------------------------------------------------------------------------------


@every_storage
@pytest.mark.parametrize(
    ("index", "places"),
    [
        (slice(1, 3), [1, 2]),
        ([0, 4], [0, 4]),
        (torch.tensor([5, 2]), [5, 2]),
        (np.array([5, 2]), [5, 2]),
        (range(2, 4), [2, 3]),
        (slice(None), [0, 1, 2, 3, 4, 5]),
        (..., [0, 1, 2, 3, 4, 5]),
        (slice(None, None, -2), [5, 3, 1]),
        (torch.tensor([True, False, False, True, False, False]), [0, 3]),
    ],
    ids=["slice", "list", "tensor", "array", "range", "all", "ellipsis", "backwards", "mask"],
)
def test_items_are_changed_where_they_are(maker: Maker, index: Any, places: list[int]) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    rb[index] = steps(20, 20 + len(places))
    expected = list(range(6))
    for new, place in enumerate(places, 20):
        expected[place] = new
    assert_are_steps(rb[:], expected)
    assert (len(rb), rb.write_count, rb.writer._cursor) == (6, 6, 6)


@every_storage
@pytest.mark.parametrize("index", [[0.5, 1.5], [True, True], [[True] * 6] * 2])
def test_what_is_no_index_of_the_items_changes_nothing(maker: Maker, index: Any) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    for wrong in (index, np.array(index), torch.tensor(index)):
        with pytest.raises(IndexError, match=r"index|mask|is not an index of a list"):
            rb[wrong] = steps(20, 22)
    assert_are_steps(rb[:], [0, 1, 2, 3, 4, 5])


@every_storage
def test_one_item_is_changed_by_its_index(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    rb[2] = steps(9, 10)[0]
    rb[-1] = steps(8, 9)[0]
    assert_are_steps(rb[:], [0, 1, 9, 8])


@every_storage
def test_a_list_of_items_is_assigned_item_by_item(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    rb[[3, 1]] = list(steps(20, 22).unbind(0))
    assert_are_steps(rb[:], [0, 21, 2, 20])


@every_storage
def test_a_read_item_can_be_written_back(maker: Maker) -> None:
    rb = maker.buffer(10, batch_size=3)
    rb.extend(steps(0, 6))
    everything = rb[:].clone()
    everything["obs"] *= 2
    rb.write_all(everything)
    assert torch.equal(rb[:]["obs"], 2 * steps(0, 6)["obs"])
    rb.write_all(steps(10, 13), end=3)
    assert numbers(rb[:]) == [10, 11, 12, 3, 4, 5]
    sample = rb.sample()
    rb[sample["index"]] = sample
    assert sorted(numbers(rb[:])) == [3, 4, 5, 10, 11, 12]


@every_ring
def test_set_and_update_change_entries_of_stored_items(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 6))
    rb.set_at_("rank", torch.tensor([70.0, 80.0]), torch.tensor([1, 3]))
    assert rb["rank"].tolist() == [0, 70, 2, 80, 4, 5]
    assert rb["id"].tolist() == [0, 1, 2, 3, 4, 5]


# -- the form of the data -------------------------------------------------------------------------


def forms(start: int, stop: int) -> dict[str, Any]:
    """Returns one batch in every form."""
    number = torch.arange(start, stop)
    obs = number.unsqueeze(-1) * torch.tensor([1.0, 10.0])
    return {
        "tensor": number,
        "tensordict": TensorDict({"id": number, "obs": obs}, [stop - start]),
        "tensorclass": Step(id=number, obs=obs, batch_size=[stop - start]),
        "tuple": (number, obs),
        "namedtuple": Point(number, obs),
        "dict": {"id": number, 7: (obs, [number + 1])},
        "nested": ({"a": number, "b": (obs, {"c": number * 2})}, [number]),
    }


def leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if hasattr(data, "batch_size"):
        return [data.get("id"), data.get("obs")]
    if isinstance(data, dict):
        return [leaf for key in sorted(data, key=str) for leaf in leaves(data[key])]
    return [leaf for part in data for leaf in leaves(part)]


def assert_same(got: Any, expected: Any) -> None:
    """Checks that two values have the same form and equal leaves."""
    assert type(got) is type(expected) or isinstance(got, torch.Tensor)
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        for one, other in zip(leaves(got), leaves(expected), strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


FORMS = sorted(forms(0, 1))


@every_ring
@pytest.mark.parametrize("form", FORMS)
def test_data_come_back_in_the_form_in_which_they_were_written(maker: Maker, form: str) -> None:
    rb = maker.buffer(10, cls="ReplayBuffer", batch_size=None)
    assert rb.extend(forms(0, 6)[form]).tolist() == [0, 1, 2, 3, 4, 5]
    assert_same(rb[:], forms(0, 6)[form])
    assert_same(rb[2:5], forms(2, 5)[form])
    assert_same(rb[[3]], forms(3, 4)[form])
    data, info = rb.sample(5, return_info=True)
    assert_same(data, rb[info["index"]])
    rb[2:4] = forms(20, 22)[form]
    assert_same(rb[2:4], forms(20, 22)[form])
    assert_same(rb[4:], forms(4, 6)[form])


@pytest.mark.product("form storage")
@every_storage
@pytest.mark.parametrize("form", ["tensor", "tensordict", "tensorclass"])
def test_what_has_a_first_dimension_is_split_along_it_everywhere(maker: Maker, form: str) -> None:
    if maker.case.storage == "lazy stack" and form == "tensor":
        pytest.skip("a LazyStackStorage stacks TensorDicts")
    rb = maker.buffer(10, cls="ReplayBuffer", batch_size=None)
    assert len(rb.extend(forms(0, 4)[form])) == len(rb) == 4
    assert leaves(rb[:])[0].tolist() == [0, 1, 2, 3]
    rb.add(forms(4, 5)[form][0])
    assert leaves(rb[:])[0].tolist() == [0, 1, 2, 3, 4]


@every_ring
@pytest.mark.parametrize("form", ["tuple", "dict", "nested"])
def test_a_tuple_or_dict_is_one_tree_whose_leading_dimension_is_split(
    maker: Maker, form: str
) -> None:
    rb = maker.buffer(10, cls="ReplayBuffer", batch_size=None)
    assert rb.extend(forms(0, 4)[form]).tolist() == [0, 1, 2, 3]
    assert len(rb) == 4
    assert [leaf.tolist() for leaf in leaves(rb[2])] == [
        leaf[2].tolist() for leaf in leaves(forms(0, 4)[form])
    ]
    rb.extend(forms(4, 14)[form])
    assert len(rb) == 10
    assert leaves(rb[:])[0].tolist() == [
        number.tolist() for number in leaves(forms(10, 14)[form])[0]
    ] + [number.tolist() for number in leaves(forms(4, 10)[form])[0]]


@pytest.mark.parametrize("maker", cases(("list", *RINGS), **PLAIN), indirect=True, ids=str)
def test_a_list_at_the_root_is_a_stack_of_items(maker: Maker) -> None:
    rb = maker.buffer(10, cls="ReplayBuffer", batch_size=None)
    rb.extend([TensorDict({"a": torch.ones(2, 3)}, [2])])
    assert len(rb) == 1
    assert list(rb[:].batch_size) == [1, 2]
    items = [(torch.tensor(float(at)), {"b": [torch.full((2,), at)]}) for at in range(4)]
    other = ReplayBuffer(storage=maker.storage(10, name="other"))
    assert other.extend(items).tolist() == [0, 1, 2, 3]
    first, second = other[:]
    assert first.tolist() == [0, 1, 2, 3]
    assert second["b"][0].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    first, second = other.sample(20)
    assert torch.equal(second["b"][0][:, 0].float(), first)


@every_ring
def test_a_ragged_list_does_not_fit_a_tensor_storage(maker: Maker) -> None:
    rb = maker.buffer(10, cls="ReplayBuffer", batch_size=None)
    with pytest.raises(RuntimeError, match=r"stack|Stack"):
        rb.extend([torch.zeros(4), torch.zeros(1)])
    with pytest.raises(RuntimeError, match=r"stack|Stack"):
        rb.extend([(torch.zeros(4), torch.zeros(2)), (torch.zeros(1), torch.zeros(2))])
    assert len(rb) == 0


@pytest.mark.parametrize("maker", cases(("list",), **PLAIN), indirect=True, ids=str)
def test_a_list_keeps_any_object(maker: Maker) -> None:
    things = ["text", None, {1, 2}, len, (1, "a")]
    rb = ReplayBuffer(storage=maker.storage(10), collate_fn=list)
    assert rb.extend(things).tolist() == [0, 1, 2, 3, 4]
    assert rb[:] == things
    assert rb[1] is None
    assert rb[3] is len
    data, info = rb.sample(10, return_info=True)
    assert data == [things[at] for at in info["index"].tolist()]
    rb.add(things)
    assert rb[5] is things


@pytest.mark.parametrize("maker", cases(("lazy stack",), **PLAIN), indirect=True, ids=str)
def test_a_lazy_stack_keeps_items_of_different_shapes_and_their_strings(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(10), batch_size=3)
    rb.add(TensorDict(a=torch.zeros(10), b=torch.zeros(4), c="a string"))
    rb.add(TensorDict(a=torch.ones(11), b=torch.ones(4), c="another string"))
    stack = rb[:]
    assert list(stack.batch_size) == [2]
    assert stack["b"].tolist() == [[0.0] * 4, [1.0] * 4]
    assert [list(item["a"].shape) for item in stack.unbind(0)] == [[10], [11]]
    assert stack["c"] == ["a string", "another string"]
    assert list(stack.exclude("c").densify(layout=torch.jagged)["a"].offsets()) == [0, 10, 21]
    sample = rb.sample()
    for row, index in zip(sample.unbind(0), sample["index"].tolist(), strict=True):
        assert row["a"].tolist() == [float(index)] * (10 + index)


@pytest.mark.parametrize("maker", cases(("compressed",), **PLAIN), indirect=True, ids=str)
def test_compression_gives_back_every_dtype_and_shape(maker: Maker) -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    ]  # fmt: skip
    data = TensorDict(
        {str(dtype): torch.arange(24).reshape(4, 2, 3).to(dtype) for dtype in dtypes}, [4]
    )
    data["nested"] = TensorDict({"scalar": torch.arange(4), "empty": torch.zeros(4, 0)}, [4])
    rb = maker.buffer(10)
    rb.extend(data)
    assert (rb[:] == data).all()
    for key in data.keys(include_nested=True, leaves_only=True):
        assert rb[2][key].dtype is data[key].dtype
        assert rb[2][key].shape == data[key].shape[1:]


# -- what does not fit ----------------------------------------------------------------------------


@every_ring
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.exclude("obs"), "obs"),
        (lambda data: data.set("new", torch.zeros(3)), "new"),
        (lambda data: data.set("obs", torch.zeros(3, 5)), "obs"),
        (lambda data: data.set("obs", data["obs"].double()), "obs"),
        (lambda data: data.set(("next", "obs"), torch.zeros(3, 2, dtype=torch.int64)), "next"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "nested"],
)
def test_a_batch_of_other_leaves_is_refused_and_changes_nothing(
    maker: Maker, change: Any, named: str
) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    with pytest.raises(RuntimeError, match=named):
        rb.extend(change(steps(4, 7)))
    assert (len(rb), rb.write_count, rb.writer._cursor) == (4, 4, 4)
    assert_are_steps(rb[:], [0, 1, 2, 3])
