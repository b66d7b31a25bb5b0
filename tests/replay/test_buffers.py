"""Buffers: writing, sampling, and what a buffer reports about itself."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from shmbuffer import (
    Compose,
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)

pytestmark = pytest.mark.product(few=4)


def items(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(start, start + n)}, [n])


def test_two_buffers_on_one_storage_share_its_cursor(make: Any) -> None:
    storage = make(4)
    one, other = ReplayBuffer(storage=storage), ReplayBuffer(storage=storage)
    assert one.extend(items(2)).tolist() == [0, 1]
    assert other.extend(items(2)).tolist() == [2, 3]
    assert one.write_count == other.write_count == 4


def test_lanes_have_coordinates(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(12, ndim=2), batch_size=5, dim_extend=0)
    index = rb.extend(TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2, 3]))
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    added = rb.add(TensorDict({"a": torch.arange(6, 9)}, [3]))
    assert added.tolist() == [[2, 0], [2, 1], [2, 2]]  # type: ignore[union-attr]
    assert len(rb) == 9
    sample = rb.sample()
    assert sample["index"].shape == (5, 2)
    assert torch.equal(sample["index"][:, 0] * 3 + sample["index"][:, 1], sample["a"])


def test_dim_extend_keeps_the_order_of_the_users_dimensions(make: Any) -> None:
    data = torch.arange(12).reshape(3, 4)
    rb = ReplayBuffer(storage=make(24, ndim=2))
    assert rb.dim_extend == 1
    rb.extend(data)
    rb.extend(data + 100)
    whole = torch.cat([data, data + 100], 1)
    assert torch.equal(rb[:], whole)
    assert torch.equal(rb[1], whole[1])
    assert torch.equal(rb[:, 2:5], whole[:, 2:5])
    assert torch.equal(rb[torch.tensor([2, 0])], whole[[2, 0]])
    rb[:, 3] = torch.tensor([-1, -2, -3])
    whole[:, 3] = torch.tensor([-1, -2, -3])
    assert torch.equal(rb[:], whole)
    with pytest.raises(ValueError, match="dim_extend"):
        ReplayBuffer(storage=make(24, ndim=2), dim_extend=2)


def test_write_all_wants_as_many_items_as_there_are(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(6))
    rb.extend(items(4))
    rb.write_all(items(2, 10), end=2)
    assert rb.read_all_in_order(3)["a"].tolist() == [10, 11, 2]
    with pytest.raises(ValueError, match="3 items cannot be written to 4 slots"):
        rb.write_all(items(3))
    assert [chunk["a"].tolist() for chunk in rb.iter_in_order(3)] == [[10, 11, 2], [3]]


def test_emptying_forgets_the_items_and_keeps_the_leaves(make: Any) -> None:
    rb = ReplayBuffer(storage=make(4))
    rb.extend(items(3))
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 3)
    rb.empty()
    assert rb.write_count == 0
    assert rb.extend(items(2, 5)).tolist() == [0, 1]
    with pytest.raises(IndexError):
        rb[2]
    with pytest.raises(SchemaMismatchError):
        rb.extend(torch.zeros(2))


def test_a_batch_size_of_no_items_is_warned_of_or_refused(make: Any) -> None:
    rb = ReplayBuffer(storage=make(4))
    rb.extend(items(3))
    with pytest.warns(UserWarning, match=r"batch_size=0.*returns an empty batch.*at") as said:
        assert rb.sample(0).batch_size == torch.Size([0])
    assert [one.filename for one in said] == [__file__]
    with pytest.raises(ValueError, match="batch_size"):
        rb.sample(-1)
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBuffer(storage=make(4), batch_size=0)


def test_iteration_goes_on_until_the_sampler_has_run_out(make: Any) -> None:
    class Three(RandomSampler):
        drawn = 0

        @property
        def ran_out(self) -> bool:
            return self.drawn == 3

        @ran_out.setter
        def ran_out(self, value: bool) -> None:
            self.drawn = 0

        def sample(self, storage: Any, batch_size: int) -> Any:
            self.drawn += 1
            return super().sample(storage, batch_size)

    rb = ReplayBuffer(storage=make(4), sampler=Three(), batch_size=2)
    rb.extend(items(3))
    assert [len(sample) for sample in rb] == [2, 2, 2]
    assert [len(sample) for sample in rb] == [2, 2, 2]


def test_a_collate_fn_gets_what_the_storage_gives(make: Any) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(4), collate_fn=lambda data: data.set("extra", data["a"] + 1), batch_size=2
    )
    rb.extend(items(3))
    sample = rb.sample()
    assert torch.equal(sample["extra"], sample["a"] + 1)
    assert set(sample.keys()) - {"index_generation"} == {"a", "extra", "index"}
    assert "extra" in rb[:2].keys()  # noqa: SIM118 - a TensorDict iterates over its rows
    assert "extra" not in rb[0].keys()  # noqa: SIM118


# -- transforms ------------------------------------------------------------------------------------


class AddOne:
    def __call__(self, data: Any) -> Any:
        return data.set("a", data["a"] + 1)

    def inv(self, data: Any) -> Any:
        return data.clone().set("a", data["a"] - 1)


class Double(nn.Module):
    def forward(self, data: Any) -> Any:
        return data.set("a", data["a"] * 2)


def test_a_sample_knows_its_index_after_the_transforms(make: Any) -> None:
    seen = []
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7,
        beta=0.9,
        storage=make(4),
        batch_size=2,
        transform=lambda data: seen.append(set(data.keys())) or data,
    )
    rb.extend(items(3))
    assert set(rb.sample().keys()) == {"a", "index", "_weight", "priority_weight"} | (
        {"index_generation"} if rb.shared else set()
    )
    assert seen == [{"a"}]


def test_a_transform_that_changes_the_batch_size_is_told_how_to_go_on(make: Any) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(4), batch_size=2, transform=lambda data: torch.cat([data, data])
    )
    rb.extend(items(3))
    with pytest.raises(RuntimeError, match="include_info=False"):
        rb.sample()
    data, info = rb.sample(return_info=True, include_info=False)
    assert (len(data), len(info["index"])) == (4, 2)


def test_a_locked_tensordict_is_unlocked_for_a_transform() -> None:
    data = TensorDict({"a": torch.zeros(2)}, []).lock_()
    Compose(lambda td: td.set("b", torch.ones(2)))(data)
    assert data.is_locked
    assert data["b"].tolist() == [1, 1]


def test_a_transform_is_something_to_call() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        ReplayBuffer().append_transform(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transform_factory"):
        ReplayBuffer(transform=AddOne(), transform_factory=AddOne)
    assert len(ReplayBuffer(transform=[AddOne(), Double()]).transform) == 2
    assert len(ReplayBuffer(transform_factory=Double).transform) == 1


# -- TensorDicts -----------------------------------------------------------------------------------


def test_a_dict_of_arrays_is_the_tensordict_with_these_entries(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(8), batch_size=2)
    rb.extend({"a": torch.arange(2).numpy(), ("n", "b"): torch.zeros(2, 3).numpy()})
    rb.extend({"a": torch.arange(2), "n": {"b": torch.ones(2, 3).numpy()}})
    rb.extend(TensorDict({"a": torch.arange(2), "n": {"b": torch.ones(2, 3)}}, [2]))
    rb.add({"a": 7, ("n", "b"): torch.ones(3)})
    sample = rb.sample()
    assert isinstance(sample, TensorDict)
    assert sample["n", "b"].shape == (2, 3)
    assert rb[:]["a"].tolist() == [0, 1, 0, 1, 0, 1, 7]


@pytest.mark.product("first then")
@pytest.mark.parametrize(
    ("first", "then", "dtype"),
    [
        (1.0, np.float64(2.5), torch.float32),
        (np.float64(1.0), 0.1, torch.float64),
        (np.float32(1.0), np.int64(2), torch.float32),
        (0.5, 3, torch.float32),
        (np.int64(1), np.uint8(3), torch.int64),
        (np.int32(1), 7, torch.int32),
        (1j, 2.0, torch.complex64),
    ],
    ids=repr,
)
def test_a_plain_number_takes_the_dtype_of_the_leaf(
    make: Any, first: Any, then: Any, dtype: torch.dtype
) -> None:
    for kind in (TensorDictReplayBuffer, ReplayBuffer):
        rb = kind(storage=make(8))
        rb.add({"r": first})
        rb.add({"r": then})
        rb.extend([{"r": first}, {"r": then}])
        rb[0] = {"r": then}
        expected = torch.tensor([then, then, first, then], dtype=dtype)
        assert rb[:]["r"].dtype is dtype
        assert torch.equal(rb[:]["r"], expected)


@pytest.mark.product("first then")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (1, 2.5),
        (np.uint8(1), 300),
        (np.uint8(1), -1),
        (True, 1),
        (np.float32(1.0), np.float64(1e300)),
        (1.0, np.array(1.0)),
        (1.0, torch.tensor(1.0).double()),
        (1.0, "1.0"),
    ],
    ids=repr,
)
def test_a_number_that_the_leaf_cannot_hold_and_arrays_of_another_dtype_are_refused(
    make: Any, first: Any, then: Any
) -> None:
    rb = TensorDictReplayBuffer(storage=make(8))
    rb.add({"r": first})
    with pytest.raises(SchemaMismatchError, match=r"leaf 'r' is .*, but this write has"):
        rb.add({"r": then})
    assert len(rb) == 1


def test_lists_of_numbers_are_arrays_as_in_a_tensordict(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=2)
    rb.extend({"rew": [1.0, 2.0], "obs": [np.zeros(3), np.ones(3)], "td_error": [3.0, 4.0]})
    rb.extend({"rew": [np.float64(3.0), 4], "obs": torch.ones(2, 3).double(), "td_error": [1, 2]})
    rb.add({"rew": 5.0, "obs": (0.5, 0.5, 1), "td_error": 5})
    # as many items as each entry has elements
    rb.extend([{"rew": 6.0, "obs": [1, 2, 3], "td_error": 6}] * 3)
    assert rb[:]["rew"].tolist() == [1, 2, 3, 4, 5, 6, 6, 6]
    assert rb[5:8]["obs"].tolist() == [[1, 2, 3]] * 3
    assert rb.sampler.state_dict()["_priorities"][:6].tolist() == [3, 4, 1, 2, 5, 6]
    with pytest.raises(SchemaMismatchError, match=r"'rew' is float32\[2\], but this write has"):
        rb.extend({"rew": ["a", "b"], "obs": torch.ones(2, 3).double(), "td_error": [1.0, 2.0]})
    with pytest.raises(
        SchemaMismatchError,
        match=r"leaf 'rew' has 2 items in this write, but other leaves have 1|has 1 items",
    ):
        rb.extend({"rew": [1.0, 2.0], "obs": [[1, 2, 3]], "td_error": [1.0]})


def test_a_list_in_a_pytree_is_a_node_and_the_error_says_so(make: Any) -> None:
    rb = ReplayBuffer(storage=make(8))
    with pytest.raises(ValueError, match=r"entry 'x.rew' is a list, .* write np.asarray\(...\)"):
        rb.extend({"obs": np.zeros((2, 3)), "x": {"rew": [1.0, 2.0]}})
    with pytest.raises(ValueError, match=r"leaf 'data' has shape \[\]"):
        rb.extend(3)
    assert rb.storage.ring() is None


class Protocol:
    """An array of another library, such as JAX, that is recognized only by its protocol."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape, self.dtype = tuple(values.shape), str(values.dtype)


class OfNumpy(Protocol):
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values.numpy()


class OfDlpack(Protocol):
    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


@pytest.mark.parametrize("kind", [OfNumpy, OfDlpack])
def test_arrays_of_other_libraries_are_arrays(make: Any, kind: type[Protocol]) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=2)
    batch = {"obs": kind(torch.arange(6.0).view(2, 3)), "td_error": kind(torch.tensor([3.0, 4.0]))}
    rb.extend(batch)
    index = rb.extend(batch)
    rb.add({"obs": kind(torch.ones(3)), "td_error": kind(torch.tensor(5.0))})
    assert rb[2:]["obs"].tolist() == [[0, 1, 2], [3, 4, 5], [1, 1, 1]]
    assert rb.sampler.state_dict()["_priorities"][:5].tolist() == [3, 4, 3, 4, 5]
    rb.update_priority(index, OfNumpy(torch.tensor([7.0, 8.0])))
    assert rb.sampler.state_dict()["_priorities"][2:4].tolist() == [7, 8]
    with pytest.raises(SchemaMismatchError, match=r"float32\[2, 3\], but this write has float64"):
        rb.extend({**batch, "obs": kind(torch.zeros(2, 3).double())})
    of_lists = ReplayBuffer(storage=make(8))
    of_lists.extend([{"obs": kind(torch.ones(3))}] * 2)
    assert of_lists[:]["obs"].tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_tuple_has_no_names_for_a_tensordict_buffer(storage: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage(8), batch_size=2)
    pair = (torch.zeros(2, 3), torch.ones(2))
    for _ in range(2):
        for write, data in ((rb.add, pair), (rb.extend, pair), (rb.extend, [pair, pair])):
            with pytest.raises(
                (TypeError, SchemaMismatchError),
                match=r"is a tuple, .* write a dict, .* ReplayBuffer",
            ):
                write(data)  # type: ignore[operator]
        assert len(rb) < 2
        rb.add({"obs": torch.zeros(3)})
    assert ReplayBuffer(storage=LazyTensorStorage(8)).extend(pair).tolist() == [0, 1]


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_nothing_is_no_item(kind: type[ReplayBuffer], storage: Any) -> None:
    rb = kind(storage=storage(8))
    for call in ("add", "extend"):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.{call}\(None\): there is nothing"):
            getattr(rb, call)(None)


@pytest.mark.parametrize("transforms", [[], [lambda data: data]])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("storage", [CompressedListStorage, LazyStackStorage, ListStorage])
def test_lists_take_dicts_as_rows_do(
    tmp_path: Path, storage: Any, shared: bool, transforms: list[Any]
) -> None:
    """Samples of lists have the form of TensorDicts and include the index."""
    options: dict[str, Any] = {}
    if shared and storage is not ListStorage:
        options = {"scratch_dir": tmp_path, "shared_init": True, "max_bytes": 2**20}
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=storage(8, **options), batch_size=20, transform=transforms
    )
    obs = np.arange(6, dtype=np.float32).reshape(2, 3)
    rb.extend({"obs": obs, ("next", "rew"): [1.0, 2.0], "td_error": np.array([3.0, 4.0])})
    rb.add({"obs": obs[0], "next": {"rew": 3.0}, "td_error": 5.0})
    rb.extend([{"obs": obs[1], ("next", "rew"): np.float32(4.0), "td_error": 6.0}])
    assert rb.sampler.state_dict()["_priorities"][:4].tolist() == [3, 4, 5, 6]
    sample = rb.sample()
    assert isinstance(sample, TensorDictBase)
    assert {"index", "_weight", "priority_weight"} <= set(sample.keys())
    assert torch.equal(sample["next", "rew"], sample["index"] + 1.0)
    sample["td_error"] = torch.full((20,), 9.0)
    assert rb.update_tensordict_priority(sample).applied == 20
    with pytest.raises(
        ValueError, match=r"leaf 'rew' has shape \[\], but the batch is \[2\] in leaf"
    ):
        rb.extend({"obs": obs, "rew": 1.0})
    with pytest.raises(ValueError, match="the number of items is unknown"):
        rb.extend({"text": ["a", "b"]})
    assert len(rb) == 4
    rb.storage.close()


def test_a_list_buffer_names_the_leaf_that_no_tensor_can_be_made_of() -> None:
    class Broken:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise ValueError("not ready")

    rb = TensorDictReplayBuffer(storage=ListStorage(10))
    for data in ({"obs": Broken()}, {"act": torch.ones(3), "obs": Broken()}):
        with pytest.raises(TypeError, match="leaf 'obs' of the batch is a Broken, which cannot"):
            rb.extend(data)
    assert len(rb) == 0


def test_the_data_are_not_changed_by_writing_them(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=2)
    data, item = items(3), items(1)[0]
    rb.extend(data)
    rb.add(item)
    assert set(data.keys()) == set(item.keys()) == {"a"}


def test_priorities_may_come_with_data_that_do_not_store_them(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=3)
    rb.extend(items(1))
    rb.extend(items(2).set("td_error", torch.tensor([3.0, 0.5])))
    rb.extend({"a": torch.arange(1), "td_error": torch.tensor([[0.125]])})
    assert rb.sampler.state_dict()["_priorities"][1:4].tolist() == [3.0, 0.5, 0.125]
    assert "td_error" not in rb.sample().keys()  # noqa: SIM118


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("first", [True, False])
def test_a_bad_initial_priority_is_refused_before_anything_is_written(
    make: Any, bad: float, first: bool
) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=3)
    if not first:
        rb.extend(items(2).set("td_error", torch.ones(2)))
    before = len(rb), rb.write_count
    with pytest.raises(ValueError, match="priorit"):
        rb.extend(items(2).set("td_error", torch.tensor([1.0, bad])))
    assert (len(rb), rb.write_count) == before


def test_updating_without_priorities_gives_the_default_one(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=30)
    rb.update_priority(rb.extend(items(3)), torch.tensor([5.0, 1.0, 1.0]))
    sample = rb.sample()
    sample["td-error"] = torch.rand(30)
    with pytest.warns(
        UserWarning, match=r"no entry 'td_error', .* has the entries \['a', 'td-error'\]"
    ) as said:
        rb.update_tensordict_priority(sample)
    rb.update_tensordict_priority(sample)  # any further warning is an error here
    assert [one.filename for one in said] == [__file__]
    assert rb.sampler.state_dict()["_priorities"][:3].tolist() == [5.0] * 3


def test_updating_wants_an_index(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(8), batch_size=3)
    rb.extend(items(3))
    with pytest.raises(KeyError, match="index"):
        rb.update_tensordict_priority(items(3))
    uniform = TensorDictReplayBuffer(storage=make(8))
    uniform.extend(items(3))
    assert uniform.update_tensordict_priority(uniform.sample(2)) == (0, 0)


def test_include_info_leaves_index_and_weights_out(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(8), batch_size=3)
    rb.extend(items(3))
    assert set(rb.sample(include_info=False).keys()) == {"a"}
    data, info = rb.sample(return_info=True)
    assert torch.equal(data["index"], info["index"])


def test_the_default_buffer_of_tensordicts_works_on_a_list() -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, batch_size=3)
    assert isinstance(rb.storage, ListStorage)
    assert isinstance(rb.writer, TensorDictRoundRobinWriter)
    rb.extend(items(4))
    sample = rb.sample()
    assert set(sample.keys()) == {"a", "index", "_weight", "priority_weight"}
    sample["td_error"] = torch.ones(3)
    assert rb.update_tensordict_priority(sample).applied == 3


# -- whole -----------------------------------------------------------------------------------------


def test_stats_are_one_flat_dict_with_torchrls_keys(make: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=2)
    before = rb.stats()
    assert (before["size"], before["initialized"]) == (0, True)
    rb.extend(items(4))
    rb.sample()
    stats = rb.stats()
    assert stats["size"] == 4
    assert stats["capacity"] == 10
    assert stats["utilization"] == 0.4
    assert stats["write_count"] == 4
    assert stats["initialized"] is True
    assert stats["prefetch_queue_size"] == 0
    assert stats["items_sampled"] == 2
    assert all(isinstance(value, (int, float)) for value in stats.values())


@pytest.mark.parametrize("given", ["a part", "None", "another sampler's"])
def test_what_is_no_state_of_the_buffer_changes_nothing(make: Any, given: str) -> None:
    sampler = SamplerWithoutReplacement()
    rb = TensorDictReplayBuffer(storage=make(5), batch_size=2, sampler=sampler)
    rb.extend(items(3))
    state = rb.state_dict()
    before = rb[:].clone()
    rb.extend(items(2))
    wrong: dict[str, Any] = {
        "a part": {"_storage": state["_storage"]},
        "None": None,
        "another sampler's": {**state, "_sampler": RandomSampler().state_dict()},
    }
    lacks = "_sample_list" if given == "another sampler's" else "_writer"
    with pytest.raises(KeyError, match=f"'{lacks}'.* Nothing was changed"):
        rb.load_state_dict(wrong[given])
    assert len(rb) == 5
    rb.load_state_dict(state)
    assert (rb[:] == before).all()


def test_a_state_dict_brings_the_whole_buffer_back(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7,
        beta=0.9,
        storage=make(5),
        batch_size=50,
        generator=torch.Generator().manual_seed(3),
    )
    rb.extend(items(7).set("td_error", torch.rand(7)))
    state = pickle.loads(pickle.dumps(rb.state_dict()))
    other = TensorDictPrioritizedReplayBuffer(alpha=0.1, beta=0.1, storage=make(5), batch_size=1)
    other.load_state_dict(state)
    assert len(other) == 5
    assert other.write_count == 7
    assert (other[:] == rb[:]).all()
    assert other.batch_size == 50
    drawn, expected = other.sample(), rb.sample()
    assert torch.equal(drawn["index"], expected["index"])
    assert torch.equal(drawn["_weight"], expected["_weight"])
    assert other.extend(items(1).set("td_error", torch.rand(1))).tolist() == [2]


def test_a_closed_buffer_says_so(directory: Any) -> None:
    rb = ReplayBuffer(storage=directory(), batch_size=2)
    rb.extend(items(3))
    rb.flush()
    rb.close()
    rb.close()
    with pytest.raises(RuntimeError, match="closed"):
        rb.extend(items(3))
    with pytest.raises(RuntimeError, match="closed"):
        rb.sample()


@pytest.mark.product(few=2)
@pytest.mark.parametrize("held", [False, True], ids=["native", "held by torch"])
def test_a_buffer_may_be_used_from_several_threads(make: Any, held: bool) -> None:
    zeros = TensorDict({"a": torch.zeros(64), "b": torch.zeros(64)}, [64])
    storage = TensorStorage(zeros.clone()) if held else make(64)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=storage, batch_size=16)
    if not held:
        rb.extend(zeros)
    before = rb.write_count

    def work(thread: int) -> int:
        for step in range(100):
            value = torch.full((8,), float(thread * 1000 + step))
            rb.extend(TensorDict({"a": value, "b": value}, [8]))
            sample = rb.sample()
            assert torch.equal(sample["a"], sample["b"])
            sample["td_error"] = torch.rand(16)
            rb.update_tensordict_priority(sample)
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(work, range(4))) == [0, 1, 2, 3]
    assert rb.write_count == before + 4 * 100 * 8


# -- arguments -------------------------------------------------------------------------------------

ACCEPTED = {
    "prefetch": None,
    "sample_unit": None,
    "checkpointer": None,
    "consume_after_n_samples": None,
    "delayed_init": False,
    "service_backend": "direct",
    "service_backend_options": None,
    "transport": "auto",
    "transport_options": None,
    "compilable": False,
    "collate_fn": None,
    "pin_memory": False,
    "transform": None,
    "transform_factory": None,
    "batch_size": None,
    "dim_extend": None,
    "generator": None,
    "shared": False,
}
PRIORITIZED = {"alpha": 0.6, "beta": 0.4, "eps": 1e-8, "sync": True, "sampler_device": None}


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (ReplayBuffer, {**ACCEPTED, "storage": None, "sampler": None, "writer": None}),
        (TensorDictReplayBuffer, {**ACCEPTED, "priority_key": "td_error"}),
        (PrioritizedReplayBuffer, {**ACCEPTED, **PRIORITIZED, "dtype": torch.float}),
        (
            TensorDictPrioritizedReplayBuffer,
            {**ACCEPTED, **PRIORITIZED, "priority_key": "td_error", "reduction": "max"},
        ),
    ],
)
def test_every_argument_of_torchrl_is_accepted(cls: Any, arguments: dict[str, Any]) -> None:
    cls(**arguments)
    with pytest.raises(TypeError, match="no_such_argument"):
        cls(**arguments, no_such_argument=1)


@pytest.mark.parametrize(
    "asked",
    [
        {"service_backend": "ray"},
        {"transport": "distributed"},
    ],
)
def test_an_argument_that_comes_later_says_so(asked: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(asked))):
        ReplayBuffer(storage=LazyTensorStorage(10), **asked)


def test_a_prioritized_buffer_makes_its_own_sampler() -> None:
    with pytest.raises(ValueError, match="makes its own sampler"):
        PrioritizedReplayBuffer(
            alpha=0.6,
            beta=0.4,
            storage=LazyMemmapStorage(10),
            sampler=PrioritizedSampler(10, 0.6, 0.4),
        )


def test_a_priority_may_come_along_with_what_goes_into_the_callers_tensors() -> None:
    data = TensorDict({"a": torch.arange(4)}, [4])
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=TensorStorage(data), batch_size=16
    )
    rb.extend({"a": torch.tensor([10, 11]), "td_error": torch.tensor([0.0, 1e9])})
    assert data["a"].tolist() == [10, 11, 2, 3]
    assert set(rb.sample()["a"].tolist()) == {11}


def test_an_index_goes_on_in_the_items_own_dimensions(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(4), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(12).view(3, 4)}, [3, 4]))
    assert rb[:, 0]["a"].tolist() == [0, 4, 8]
    assert rb[0, 1]["a"].item() == 1
    assert rb[1:, 2:]["a"].tolist() == [[6, 7], [10, 11]]
    plain = ReplayBuffer(storage=make(4), batch_size=2)
    plain.extend({"x": torch.arange(6).view(2, 3)})
    assert plain[1, 2]["x"].item() == 5
    lists = TensorDictReplayBuffer(storage=ListStorage(4), batch_size=2)
    lists.extend(TensorDict({"a": torch.arange(12).view(3, 4)}, [3, 4]))
    assert lists[:, 0]["a"].tolist() == [0, 4, 8]


def test_a_list_of_nothing_writes_nothing(make: Any) -> None:
    rb = ReplayBuffer(storage=make(4), batch_size=2)
    assert rb.extend([]).shape == (0,)
    assert len(rb) == 0


def test_an_object_that_is_not_a_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"storage, sampler and writer must be .*got 3"):
        ReplayBuffer(storage=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_size=4\): the tensors have 5 rows"):
        TensorStorage(torch.zeros(5), max_size=4)
    with pytest.raises(
        ValueError, match=r"TensorStorage\(None\): pass the tensors that the storage should use"
    ):
        TensorStorage(None)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_tensor_storage_without_entries_gets_those_of_the_first_write(ndim: int) -> None:
    given = TensorDict({}, [10, 3][:ndim])
    rb = TensorDictReplayBuffer(storage=TensorStorage(given, ndim=ndim), batch_size=6)
    assert len(rb) == 10 * 3 ** (ndim - 1)
    # time is the last dimension
    number = torch.arange(4 * 3 ** (ndim - 1)).view([3, 4][2 - ndim :])
    rb.extend(TensorDict({"a": number, "b": {"c": number[..., None]}}, number.shape))
    assert given["a"][:4].tolist() == number.movedim(-1, 0).tolist()
    assert given["b", "c"][4:].count_nonzero() == 0
    assert {"a", "b", "index"} <= set(rb.sample().keys())
    with pytest.raises(SchemaMismatchError, match="'a' is missing"):
        rb.extend(TensorDict({"d": number}, number.shape))


def test_a_sample_that_is_put_back_into_a_list_leaves_its_own_keys_behind() -> None:
    rb = TensorDictReplayBuffer(storage=ListStorage(4), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
    sample = rb.sample()
    rb[sample["index"]] = sample
    assert all(set(rb[i].keys()) == {"a"} for i in range(3))


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("form", [dict, TensorDict.copy], ids=["dict", "tensordict"])
def test_one_item_for_extend_and_a_batch_for_add_name_the_other_call(
    make: Any, lanes: bool, form: Any
) -> None:
    one = TensorDict({"a": torch.zeros(3), "b": torch.zeros(())})
    batch = torch.stack([one, one, one, one])
    if lanes:
        one, batch = torch.stack([one, one]), torch.stack([batch, batch])
    rb = TensorDictReplayBuffer(storage=make(16, ndim=1 + lanes))
    with pytest.raises(ValueError, match=r"add\(\)"):
        rb.extend(form(one))
    rb.extend(form(batch))
    with pytest.raises((SchemaMismatchError, ValueError), match=r"one item, write it with add\(\)"):
        rb.extend(form(one))
    with pytest.raises(SchemaMismatchError, match=r"a batch, write it with extend\(\)"):
        rb.add(form(batch))
    with pytest.raises(SchemaMismatchError, match="convert it"):
        rb.add(form(one.double()))
    rb.add(form(one))
    assert len(rb) == (5 * (1 + lanes))


def test_one_item_as_a_dict_names_add_in_a_list_storage() -> None:
    rb = TensorDictReplayBuffer(storage=ListStorage(8))
    with pytest.raises(ValueError, match=r"one item, write it with add\(\)"):
        rb.extend({"a": torch.zeros(3), "b": torch.zeros(())})
