"""Data of any form come back in the same form."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PriorityUpdate,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.tensors.form import tensor_structure
from tests.kit.items import Point, Transition
from tests.kit.items import Step as TextStep

pytestmark = pytest.mark.product(few=4)


def rb_of(make: Any, size: int = 8) -> ReplayBuffer:
    return ReplayBuffer(storage=make(size), batch_size=4)


def test_a_tensor_comes_back_as_a_tensor(make: Any) -> None:
    rb = rb_of(make)
    data = torch.randn(6, 3)
    rb.extend(data)
    assert torch.equal(rb[:], data)
    assert rb.sample().shape == (4, 3)


@pytest.mark.parametrize(
    "data",
    [
        {"a": torch.arange(6), "b": {"c": torch.randn(6, 2)}},
        (torch.arange(6), [torch.randn(6, 2), torch.zeros(6)]),
        Point(torch.arange(6), torch.randn(6, 2)),
        {0: torch.arange(6), 1: (torch.zeros(6),)},
    ],
    ids=["dict", "tuple", "namedtuple", "integer keys"],
)
def test_a_pytree_comes_back_as_it_was(make: Any, data: Any) -> None:
    rb = rb_of(make)
    rb.extend(data)
    found = rb[:]
    assert type(found) is type(data)
    torch.testing.assert_close(found, data)
    sample = rb.sample()
    assert type(sample) is type(data)


def test_a_nested_tensordict_keeps_its_own_batch_size(make: Any) -> None:
    rb = rb_of(make)
    inner = TensorDict({"x": torch.randn(6, 5, 2)}, [6, 5])
    rb.extend(TensorDict({"a": torch.zeros(6), "inner": inner}, [6]))
    assert rb.sample()["inner"].batch_size == torch.Size([4, 5])
    assert rb[0]["inner"].batch_size == torch.Size([5])


def test_a_tensorclass_comes_back_as_its_class_and_takes_no_index(make: Any) -> None:
    rb = rb_of(make)
    rb.extend(Transition(obs=torch.randn(6, 3), reward=torch.arange(6.0), batch_size=[6]))
    sample = rb.sample()
    assert type(sample) is Transition
    assert sample.batch_size == torch.Size([4])


def test_a_tensorclass_that_is_not_known_here_comes_back_as_a_tensordict(make: Any) -> None:
    storage = make(8)
    storage.set(range(2), Transition(obs=torch.zeros(2, 3), reward=torch.zeros(2), batch_size=[2]))
    node = storage.mover().leaves.node
    spec = {**node.to_json(), "class": "no.such.module:Transition"}
    built = tensor_structure.from_json(spec).build(
        iter([torch.zeros(2, 3), torch.zeros(2)]), (2,), torch.device("cpu")
    )
    assert isinstance(built, TensorDict)


@pytest.mark.parametrize("make", [dict, TensorDict, TensorDictReplayBuffer])
@pytest.mark.parametrize("shared", [False, True])
def test_entries_stay_in_the_order_of_the_first_write(make: Any, shared: bool) -> None:
    """Every handle returns entries in that order, even if its own writes have another one."""
    cls, kind = (make, dict) if make is TensorDictReplayBuffer else (ReplayBuffer, make)
    with cls(storage=LazyMemmapStorage(8, shared_init=shared), batch_size=2) as rb:
        rb.extend(_of(kind, "z", "a", "m"))
        handles = [rb, pickle.loads(pickle.dumps(rb))] if shared else [rb]
        for one in handles:
            one.extend(_of(kind, "m", "z", "a"))
            for found in (one.sample(), one[0], one[:], one[:]["a"]):
                assert [key for key, _ in found.items() if key in "zam"] == ["z", "a", "m"]
        for one in handles[1:]:
            one.close()


def uneven(n: int, width: int = 3) -> TensorDictBase:
    """Makes ``[n, 2]``: two TensorDicts side by side, one of them wider."""
    parts = [
        TensorDict({"a": torch.rand(n, 4, 8), "b": torch.arange(n)}, [n]),
        TensorDict({"a": torch.rand(n, width, 8), "b": torch.arange(n)}, [n]),
    ]
    return lazy_stack(parts, 1)


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    pairs = zip(one.unbind(1), other.unbind(1), strict=True)
    return all((mine == theirs).all() for mine, theirs in pairs)


def test_a_stack_of_uneven_tensordicts_within_an_item_comes_back(make: Any, tmp_path: Path) -> None:
    """Agents with observations of different shapes produce such data."""
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=make(6), batch_size=4)
    data = uneven(5)
    rb.extend(data)
    assert same(rb[:], data)
    rb.add(uneven(1)[0])
    assert rb[5].batch_size == (2,)
    sample = rb.sample()
    number = sample["index"][:, 0]
    assert [one.shape[1:] for one in (part["a"] for part in sample.unbind(1))] == [(4, 8), (3, 8)]
    assert same(sample.select("a", "b"), rb[number])
    sample["td_error"] = torch.ones(4, 2)
    assert rb.update_tensordict_priority(sample) == PriorityUpdate(4, 0)
    for other in (uneven(5, width=2), uneven(5).unbind(1)[0]):
        with pytest.raises(SchemaMismatchError):
            rb.extend(other)
    rb.dumps(tmp_path / "saved")
    loaded = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
    loaded.loads(tmp_path / "saved")
    assert same(loaded[:], rb[:])


@pytest.mark.parametrize("cls", [LazyTensorStorage, LazyMemmapStorage])
def test_text_in_a_tensorclass_comes_back_where_one_process_has_it(cls: Any) -> None:
    rb = rb_of(cls)
    rb.extend(TextStep(obs=torch.zeros(4), text="hello", batch_size=[4]))
    assert isinstance(rb.sample(), TextStep)
    assert rb[0].text == "hello"
    with pytest.raises(RuntimeError, match="text and other objects"):
        pickle.dumps(rb)


def _of(kind: Any, *names: str) -> Any:
    inner = {name: torch.zeros(2) for name in names}
    data = {name: dict(inner) if name == "a" else torch.zeros(2) for name in names}
    return data if kind is dict else TensorDict(data, [2])


@pytest.mark.parametrize(
    "data",
    [
        NonTensorData("text", batch_size=[3]),
        {"a": torch.zeros(3), "s": "text"},
        {"a": torch.zeros(3), "s": None},
        object(),
    ],
)
def test_a_value_that_is_not_a_tensor_is_refused_with_the_way_out(make: Any, data: Any) -> None:
    with pytest.raises(TypeError, match="ListStorage"):
        rb_of(make).extend(data)


@pytest.mark.product
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ],
)
def test_every_dtype_comes_back_bit_for_bit(make: Any, dtype: torch.dtype) -> None:
    rb = rb_of(make)
    data = torch.randint(0, 2, (6, 3)).to(dtype)
    rb.extend(data)
    assert rb[:].dtype is dtype
    assert torch.equal(rb[:], data)
    assert rb.sample().dtype is dtype


def test_a_leaf_without_bytes_comes_back_with_its_shape(make: Any) -> None:
    rb = rb_of(make)
    rb.extend(TensorDict({"a": torch.zeros(6), "none": torch.zeros(6, 0)}, [6]))
    assert rb.sample()["none"].shape == (4, 0)
    assert rb[:]["none"].shape == (6, 0)


# -- what does not lie right is made right ---------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0).reshape(4, 3).requires_grad_(),
        np.arange(12.0, dtype=np.float32).reshape(4, 3),
        np.asfortranarray(np.arange(12.0, dtype=np.float32).reshape(4, 3)),
    ],
    ids=["transposed", "strided", "expanded", "with grad", "numpy", "fortran order"],
)
def test_data_that_are_not_contiguous_are_stored_as_they_read(make: Any, value: Any) -> None:
    rb = rb_of(make)
    rb.extend({"a": torch.zeros(4, 3)})
    rb.extend({"a": value})
    expected = torch.as_tensor(value).detach().clone()
    assert torch.equal(rb[:]["a"][4:], expected)


def test_a_conjugate_or_negative_view_is_stored_as_it_reads(make: Any) -> None:
    rb = rb_of(make)
    number = torch.tensor([1 + 2j], dtype=torch.complex64)
    rb.extend({"c": number, "i": number.imag.clone()})
    rb.extend({"c": number.conj(), "i": number.conj().imag})
    assert rb[:]["c"].tolist() == [1 + 2j, 1 - 2j]
    assert rb[:]["i"].tolist() == [2.0, -2.0]


@pytest.mark.parametrize("lies", ["read-only", "backwards", "another byte order"])
def test_an_array_that_torch_does_not_take_as_it_lies_is_stored(make: Any, lies: str) -> None:
    rb = rb_of(make, 12)
    array = np.arange(4.0)
    if lies == "read-only":
        array.flags.writeable = False
    elif lies == "backwards":
        array = array[::-1].copy()[::-1]
    else:
        array = array.astype(">f8")
    rb.extend({"a": array})
    rb.extend({"a": array})
    rb.extend({"a": np.zeros(4)})
    rb.set_at_("a", array, slice(8, 12))
    assert rb[:]["a"].tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.zeros(2, 2, device="meta"), torch.zeros(2, 2).to_mkldnn()],
    ids=["sparse", "meta", "mkldnn"],
)
def test_a_tensor_whose_numbers_do_not_lie_in_a_row_is_refused_by_name(
    make: Any, tensor: torch.Tensor
) -> None:
    rb = rb_of(make)
    with pytest.raises(TypeError, match=r"in the data is not a tensor.*not store its numbers"):
        rb.extend({"a": tensor})
    rb.extend({"a": torch.ones(2, 2)})
    with pytest.raises(SchemaMismatchError, match=r"leaf 'a' is .*not store its numbers"):
        rb.extend({"a": tensor})
    assert rb[:]["a"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_are_loaded_and_changed_like_others(
    make: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    rb, other, own = rb_of(make), rb_of(make), TensorStorage(torch.zeros(8, 2, dtype=dtype))
    numbers = torch.arange(20).view(10, 2).to(dtype)
    rb.extend({"a": numbers})
    expected = torch.cat([numbers[8:], numbers[2:8]])
    rb.dumps(tmp_path / "save")
    for load in (
        lambda: other.loads(tmp_path / "save"),
        lambda: other.load_state_dict(rb.state_dict()),
    ):
        other.empty()
        load()
        assert torch.equal(other[:]["a"], expected)
    other.set_at_("a", numbers[:2], [3, 5])
    assert torch.equal(other[:]["a"][[3, 4, 5]], numbers[[0, 4, 1]])
    ReplayBuffer(storage=own).extend(numbers)
    assert torch.equal(own[:], expected)
    column = TensorStorage(numbers[:, 0].clone())
    assert torch.equal(column[[3, 1]], numbers[[3, 1], 0])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_trajectories_may_be_named_by_unsigned_integers(make: Any, dtype: torch.dtype) -> None:
    made = [make(12), LazyStackStorage(12), ListStorage(12)]
    made.append(LazyStackStorage(12, max_bytes=10_000, shared_init=True))
    for storage in made:
        sampler = SliceSampler(slice_len=3, traj_key="traj")
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=12)
        step = torch.arange(12)
        rb.extend(TensorDict({"step": step, "traj": (step // 4).to(dtype)}, [12]))
        drawn = rb.sample()["step"].view(4, 3)
        assert (drawn.diff() == 1).all()
        assert (drawn // 4 == drawn[:, :1] // 4).all()
        storage.close()


def test_numbers_are_items_too(make: Any) -> None:
    rb = rb_of(make)
    rb.add({"a": 1.5, "n": 2, "b": True})
    rb.add({"a": np.float32(2.5), "n": np.int64(3), "b": np.bool_(False)})
    assert rb[:]["a"].tolist() == [1.5, 2.5]
    assert rb[:]["n"].dtype is torch.int64
    assert rb[:]["b"].tolist() == [True, False]


def test_rows_of_the_buffer_can_be_written_to_other_rows(make_private: Any) -> None:
    rb = rb_of(make_private, 6)
    rb.extend(torch.arange(6))
    rb.extend(rb[1:4])  # written to 0, 1, 2, which are being read
    assert rb[:].tolist() == [1, 2, 3, 3, 4, 5]
    rb.extend(rb[0:3])  # to 3, 4, 5
    assert rb[:].tolist() == [1, 2, 3, 1, 2, 3]


# -- what does not fit is refused before anything has changed --------------------------------------


@pytest.mark.parametrize(
    ("data", "leaf", "words"),
    [
        (TensorDict({"a": torch.zeros(3, 2)}, [3]), "n.b", "is missing"),
        (
            TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3)}, "z": 0}, []),
            "z",
            "is not a leaf",
        ),
        (
            TensorDict(
                {"a": torch.zeros(3, 2, dtype=torch.float64), "n": {"b": torch.zeros(3)}}, [3]
            ),
            "a",
            r"float32\[3, 2\], but this write has float64\[3, 2\]",
        ),
        (
            TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3)}}, [3]),
            "a",
            r"float32\[3, 2\], but this write has float32\[3, 4\]",
        ),
        (
            TensorDict({"a": torch.zeros(3, 2), "n": torch.zeros(3)}, [3]),
            "n.b",
            "is missing",
        ),
    ],
    ids=["missing", "extra", "dtype", "shape", "nesting"],
)
def test_other_leaves_are_refused_by_name_and_nothing_changes(
    make: Any, data: Any, leaf: str, words: str
) -> None:
    rb = rb_of(make)
    rb.extend(TensorDict({"a": torch.ones(2, 2), "n": {"b": torch.ones(2)}}, [2]))
    before = rb[:].clone()
    with pytest.raises(SchemaMismatchError, match=words) as caught:
        rb.extend(data)
    assert caught.value.leaf == leaf  # type: ignore[attr-defined]
    assert isinstance(caught.value, RuntimeError)
    assert len(rb) == rb.write_count == 2
    assert (rb[:] == before).all()


def test_another_kind_of_data_is_refused(make: Any) -> None:
    rb = rb_of(make)
    rb.extend((torch.zeros(2), torch.zeros(2)))
    with pytest.raises(SchemaMismatchError):
        rb.extend(torch.zeros(2))


def test_leaves_whose_batch_sizes_differ_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="leading dimensions"):
        rb_of(make).extend({"a": torch.zeros(3), "b": torch.zeros(4)})
    rb = rb_of(make)
    rb.extend({"a": torch.zeros(3), "b": torch.zeros(3)})
    with pytest.raises(
        SchemaMismatchError, match="leaf 'b' has 4 items in this write, but other leaves have 3"
    ):
        rb.extend({"a": torch.zeros(3), "b": torch.zeros(4)})
    with pytest.raises(SchemaMismatchError, match=r"'b' is float32\[3\], but this write has"):
        rb.extend({"a": torch.zeros(3), "b": torch.zeros(4, 1)})


def test_one_item_is_not_taken_for_a_batch(make: Any) -> None:
    with pytest.raises(ValueError, match=r"add\(\) takes one item"):
        rb_of(make).extend(TensorDict({"a": torch.zeros(3)}, []))


def test_data_without_a_leaf_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="the data contain no tensor"):
        rb_of(make).extend(TensorDict({}, [3]))


def test_entries_that_a_sample_adds_are_not_stored(make: Any) -> None:
    rb = rb_of(make)
    data = TensorDict({"a": torch.zeros(3)}, [3])
    rb.extend(data)
    again = TensorDict(
        {
            "a": torch.ones(3),
            "index": torch.zeros(3, dtype=torch.int64),
            "_weight": torch.zeros(3),
            "priority_weight": torch.zeros(3),
            "index_generation": torch.zeros(3, dtype=torch.int64),
        },
        [3],
    )
    rb.extend(again)
    assert set(rb[:].keys()) == {"a"}
    assert rb[:]["a"].tolist() == [0, 0, 0, 1, 1, 1]
