"""``sample(out=...)`` draws the same sample into existing tensors."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.kit.rings import ring_of


def items(count: int) -> TensorDict:
    number = torch.arange(count)
    return TensorDict(
        {
            "obs": number[:, None].float().expand(-1, 3).clone(),
            "next": {"obs": number.double(), "deeper": {"done": number % 2 == 0}},
            "td_error": 1 + number.float(),
        },
        [count],
    )


@pytest.fixture(params=["uniform", "prioritized", "float64 weights", "directory"])
def rb(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    storage = LazyTensorStorage(100)
    if request.param == "directory":
        storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "buffer")
    if request.param == "uniform":
        made: Any = TensorDictReplayBuffer(storage=storage)
    else:
        dtype = torch.float64 if "64" in request.param else torch.float32
        made = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, dtype=dtype)
    with made:
        made.extend(items(100))
        yield made


def leaves(data: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(data.items(include_nested=True, leaves_only=True))


def require_the_same(rb: Any, out: TensorDict, seed: int = 0, count: int = 32) -> None:
    """Checks that a draw into ``out`` equals the same draw without ``out``."""
    torch.manual_seed(seed)
    expected = rb.sample(count)
    torch.manual_seed(seed)
    assert rb.sample(count, out=out) is out
    assert set(leaves(out)) == set(leaves(expected))
    for key, value in leaves(expected).items():
        assert out[key].dtype is value.dtype
        assert torch.equal(out[key], value), key
    assert out.batch_size == expected.batch_size


def test_it_is_the_sample_that_would_have_been_drawn(rb: Any) -> None:
    out = rb.sample(32)
    for seed in range(5):
        require_the_same(rb, out, seed)


def test_its_tensors_stay_where_they_are(rb: Any) -> None:
    out = rb.sample(32)
    before = leaves(out)
    for _ in range(3):
        rb.sample(32, out=out)
        after = leaves(out)
        assert before.keys() == after.keys()
        assert all(before[key] is after[key] for key in before)


def test_any_tensordict_of_that_size_will_do(rb: Any) -> None:
    require_the_same(rb, TensorDict(batch_size=[32]))
    require_the_same(rb, TensorDict({"other": torch.zeros(32), "next": torch.ones(32)}, [32]))
    nested = TensorDict({"next": TensorDict({"obs": torch.zeros(32, 1)}, [32, 1])}, [32])
    require_the_same(rb, nested)
    require_the_same(rb, rb.sample(32).clone(), 1)


def test_a_tensor_that_fits_is_filled_where_it_is(rb: Any) -> None:
    mine = torch.zeros(32, 3)
    out = TensorDict({"obs": mine}, [32])
    require_the_same(rb, out)
    assert out["obs"] is mine


@pytest.mark.product(few=8)
@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(32, 3, dtype=torch.float64),
        torch.zeros(32, 4),
        torch.zeros(3, 32).t(),
        torch.zeros(1, 3).expand(32, 3),
        torch.zeros(32, 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(32, 3)),
        torch.zeros(32, 3, device="meta"),
        torch.conj(torch.zeros(32, 3, dtype=torch.complex64)).imag,
    ],
    ids=["dtype", "shape", "strided", "expanded", "gradient", "parameter", "device", "negative"],
)
def test_entries_that_do_not_fit_are_replaced(rb: Any, other: torch.Tensor) -> None:
    out = rb.sample(32)
    out._tensordict["obs"] = other
    require_the_same(rb, out)
    assert out["obs"] is not other
    assert not other.any() if other.device.type != "meta" else True


def test_entries_set_in_a_reused_sample_are_not_in_the_next_one(rb: Any) -> None:
    out = rb.sample(32)
    require_the_same(rb, out)
    out["loss"] = torch.ones(32)
    out["next", "extra"] = torch.ones(32)
    require_the_same(rb, out, 1)
    out["td_error"] = torch.ones(32, dtype=torch.float64)
    out["note"] = NonTensorData("mine", [32])
    require_the_same(rb, out, 2)
    del out["obs"], out["next", "deeper"]
    require_the_same(rb, out, 3)


def test_priorities_go_back_in_it() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, eps=0.0, storage=LazyTensorStorage(100), batch_size=32
    )
    rb.extend(items(100))
    out = rb.sample()
    for step in range(1, 4):
        rb.sample(out=out)
        index = out["index"].clone()
        out["td_error"] = torch.full((32,), float(step))
        rb.update_tensordict_priority(out)
        assert (ring_of(rb.sampler).tree.priorities(index.numpy()) == step).all()


def test_the_info_has_the_tensors_of_out(rb: Any) -> None:
    out = TensorDict(batch_size=[8])
    data, info = rb.sample(8, return_info=True, out=out)
    assert data is out
    assert info.keys() == rb.sample(8, return_info=True)[1].keys()
    assert all(out[key] is value for key, value in info.items())


def test_a_graph_that_needs_what_was_there_says_so(rb: Any) -> None:
    out = rb.sample(32)
    weight = torch.ones(3, requires_grad=True)
    loss = (out["obs"] * weight).sum()
    rb.sample(32, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.product(few=2)
def test_several_take_turns(rb: Any) -> None:
    outs = [TensorDict(batch_size=[32]) for _ in range(20)]
    for seed, out in enumerate(outs * 2):
        require_the_same(rb, out, seed)
    small = TensorDict(batch_size=[3])
    require_the_same(rb, small, count=3)
    assert len(rb.plan.fast_read.refills._known) <= 16
    del outs, out, small
    gc.collect()
    assert not rb.plan.fast_read.refills._known, "what nobody has any more is not kept"


def test_a_locked_one_is_filled_and_not_changed(rb: Any) -> None:
    out = rb.sample(32).lock_()
    require_the_same(rb, out)
    locked = TensorDict({"other": torch.zeros(32)}, [32]).lock_()
    with pytest.raises(RuntimeError, match="locked"):
        rb.sample(32, out=locked)
    assert set(locked.keys()) == {"other"}


def test_another_size_or_kind_is_refused(rb: Any) -> None:
    with pytest.raises(ValueError, match=r"batch size of out= must be \[32\] .* got \[31\]"):
        rb.sample(32, out=rb.sample(31))
    with pytest.raises(TypeError, match="takes a TensorDict, got a dict"):
        rb.sample(32, out={})


def test_an_empty_buffer_has_no_sample() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    out = TensorDict(batch_size=[4])
    with pytest.raises(EmptyBufferError):
        rb.sample(4, out=out)
    rb.extend(items(5))
    require_the_same(rb, out, count=4)
    rb.empty()
    with pytest.raises(EmptyBufferError):
        rb.sample(4, out=out)


def test_a_buffer_that_filled_one_can_be_sent(tmp_path: Any) -> None:
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "buffer")
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(items(100))
        out = rb.sample(32)
        rb.sample(32, out=out)
        with pickle.loads(pickle.dumps(rb)) as other:
            require_the_same(other, out)


@pytest.mark.parametrize(
    "how",
    [
        {"transform": lambda data: data},
        {"collate_fn": lambda data: data},
        {"prefetch": 1, "batch_size": 4},
        {"storage": lambda: LazyTensorStorage(12, ndim=2)},
        {"storage": lambda: ListStorage(10)},
        {"storage": lambda: LazyStackStorage(10)},
        {"storage": lambda: TensorStorage(items(10))},
        {"sampler": RandomSampler(replacement=False)},
        {"sample_unit": Sequence(length=2, done_key=None)},
    ],
    ids=["transform", "collate", "prefetch", "lanes", "list", "stack", "held", "passes", "unit"],
)
def test_where_no_native_call_makes_the_sample_it_is_refused(how: dict[str, Any]) -> None:
    rb = TensorDictReplayBuffer(**{"storage": LazyTensorStorage(10), **how})
    data = items(10)
    if rb.storage.ndim == 2:
        data = data.reshape(5, 2)
    rb.extend(data)
    with pytest.raises(
        ValueError, match=r"no sample_unit \(except .* Call sample\(\) without out="
    ):
        rb.sample(4, out=TensorDict(batch_size=[4]))
    with pytest.raises(ValueError, match=r"Call sample\(\) without out="):
        rb.sample(4, include_info=False, out=TensorDict(batch_size=[4]))
