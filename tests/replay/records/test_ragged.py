"""Items that differ in shape become one batch: padded with a mask, or nested.

Every such test runs on records and on TensorDicts of this process, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
)

from shmbuffer import CorruptBufferError, EmptyBufferError, densify, pad
from shmbuffer.items.records.compression import Zstd
from shmbuffer.memory import record_format
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.memory.record_format import Chunk
from shmbuffer.tensors.records.tensor_decoder import RawBatch, TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.frames import sequences
from tests.kit.items import Step, alike
from tests.replay.records.batches import as_read, joined

pytestmark = pytest.mark.product(few=4)

Make = Callable[..., Any]

zstd = Zstd(threads=1)
decoder = TensorDecoder(zstd.expand, where="run/buffer")


def item(length: int, seed: int = 0) -> TensorDict:
    """Makes a sequence of tokens and log-probabilities, with a reward and text."""
    return TensorDict(
        {
            "tokens": torch.arange(length) % 7 + seed,
            "logp": -torch.ones(length, 2) * length,
            "reward": torch.tensor(float(length)),
            "text": "x" * length,
        }
    )


def episode(length: int) -> TensorDict:
    """Makes an episode, which has a batch dimension."""
    return TensorDict(
        {
            "obs": torch.full((length, 2), float(length)),
            "next": TensorDict({"reward": torch.arange(length).float()}, [length]),
            "said": NonTensorStack(*map(str, range(length))),
            "who": NonTensorData("me", batch_size=[length]),
        },
        [length],
        names=["time"],
    )


def written(items: Sequence[Any], encoder: TensorEncoder | None = None) -> RecordBatch:
    return as_read((encoder or TensorEncoder()).encode(list(items), single=False))


def of_items(make: Make) -> Make:
    return lambda items, **how: make(items, **how)


def of_records(make: Make, encoder: Callable[[], TensorEncoder]) -> Make:
    return lambda items, **how: make(RawBatch(written(items, encoder()), decoder), **how)


ENCODERS: dict[str, Callable[[], TensorEncoder]] = {
    "raw": TensorEncoder,
    "zstd": lambda: TensorEncoder(zstd=zstd, keys=["tokens", "logp", "a", "obs", "next", "text"]),
}
SOURCES = ["list", "stack", *ENCODERS]


def padded_by(source: str) -> Make:
    if source in ENCODERS:
        return of_records(pad, ENCODERS[source])
    return of_items(pad) if source == "list" else lambda items, **how: pad(lazy_stack(items), **how)


def nested_by(source: str) -> Make:
    if source in ENCODERS:
        return of_records(densify, ENCODERS[source])
    if source == "list":
        return of_items(densify)
    return lambda items, **how: densify(lazy_stack(items), **how)


@pytest.fixture(params=SOURCES)
def padding(request: pytest.FixtureRequest) -> Make:
    """Pads items that are TensorDicts, or that were written as records of one layout."""
    return padded_by(request.param)


@pytest.fixture(params=SOURCES)
def nesting(request: pytest.FixtureRequest) -> Make:
    """Nests items that are TensorDicts, or that were written as records of one layout."""
    return nested_by(request.param)


@pytest.fixture(params=["padded", "nested"])
def making(request: pytest.FixtureRequest) -> Make:
    """Makes a padded or nested batch from a list of items."""
    return pad if request.param == "padded" else densify


# -- padded ------------------------------------------------------------------------------------


def test_shorter_leaves_are_padded_and_masked(padding: Make) -> None:
    batch = padding([item(3), item(1), item(2)])
    assert batch.batch_size == torch.Size([3])
    assert batch["tokens"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
    assert batch["logp"].shape == torch.Size([3, 3, 2])
    assert batch["logp"][1].tolist() == [[-1, -1], [0, 0], [0, 0]]
    assert batch["reward"].tolist() == [3, 1, 2]
    assert batch["mask"].dtype is torch.bool
    assert batch["mask"].tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert isinstance(batch.get("text"), NonTensorStack)
    assert batch["text"] == ["xxx", "x", "xx"]


def test_it_is_what_tensordict_pads(padding: Make) -> None:
    items = [TensorDict({"a": torch.rand(n, 3), "b": torch.arange(n)}) for n in (4, 2, 5)]
    batch = padding(items, mask_key="m", value=7.0)
    theirs = tensordict.pad_sequence(items, padding_value=7.0, return_mask=True)
    assert alike(batch["a"], theirs["a"])
    assert alike(batch["b"], theirs["b"])
    assert alike(batch["m"], theirs["masks", "b"])


def test_sequences_of_ten_to_ten_thousand_tokens_are_padded(padding: Make) -> None:
    items = sequences(12, shortest=10, longest=10_000)
    batch = padding(items)
    for at, one in enumerate(items):
        length = len(one["tokens"])
        assert torch.equal(batch["tokens"][at, :length], one["tokens"])
        assert torch.equal(batch["logprobs"][at][batch["mask"][at]], one["logprobs"])
        assert not batch["tokens"][at, length:].any()
    assert batch["mask"].sum(1).tolist() == [len(one["tokens"]) for one in items]


def test_the_padding_value_can_be_chosen(padding: Make) -> None:
    batch = padding([item(2, 1), item(1, 1)], value=-1)
    assert batch["tokens"].tolist() == [[1, 2], [1, -1]]
    assert batch["logp"][1, 1].tolist() == [-1, -1]


def test_each_leaf_may_have_its_own_end(padding: Make) -> None:
    batch = padding([item(2, 1), item(1, 1)], value={"tokens": 50256})
    assert batch["tokens"].tolist() == [[1, 2], [1, 50256]]
    assert batch["logp"][1, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bool, True), (torch.uint8, 255), (torch.bfloat16, 0.5), (torch.complex64, 2.0)],
)
def test_leaves_of_any_dtype_are_padded(dtype: torch.dtype, value: float, padding: Make) -> None:
    items = [TensorDict({"a": torch.ones(n, 3).to(dtype)}) for n in (2, 4)]
    batch = padding(items, value=value)
    assert batch["a"].dtype is dtype
    assert torch.equal(batch["a"][0, 2:], torch.full((2, 3), value).to(dtype))
    assert torch.equal(batch["a"][1], items[1]["a"])


def test_the_mask_has_the_place_that_it_is_given(padding: Make) -> None:
    batch = padding([item(2), item(1)], mask_key=("info", "is_token"))
    assert batch["info", "is_token"].tolist() == [[True, True], [True, False]]
    assert "mask" not in batch


def test_there_may_be_no_mask(padding: Make) -> None:
    assert set(padding([item(2), item(1)], mask_key=None).keys()) == set(item(1).keys())


def test_leaves_of_other_lengths_have_masks_of_their_own(padding: Make) -> None:
    items = [
        TensorDict({"a": torch.ones(n), "n": {"b": torch.ones(3 - n)}, "c": torch.ones(2)})
        for n in (1, 2)
    ]
    batch = padding(items)
    assert set(batch["mask"].keys(True, True)) == {"a", ("n", "b")}
    assert batch["mask"].batch_size == torch.Size([2])
    assert batch["mask", "a"].tolist() == [[True, False], [True, True]]
    assert batch["mask", "n", "b"].tolist() == [[True, True], [True, False]]


def test_masks_can_be_said_beforehand(padding: Make) -> None:
    masks = {"a": "mask", "b": "mask", ("n", "c"): "other"}
    for lengths in [(1, 3), (2, 2)]:
        items = [
            TensorDict({"a": torch.ones(n), "b": torch.ones(n, 2), "n": {"c": torch.ones(4)}})
            for n in lengths
        ]
        batch = padding(items, mask_key=masks)
        assert batch["mask"].sum(1).tolist() == list(lengths)
        assert batch["other"].tolist() == [[True] * 4] * 2


def test_items_that_happen_to_be_equally_long_are_masked_too(padding: Make) -> None:
    batch = padding([item(2), item(2)])
    assert batch["mask"].tolist() == [[True, True], [True, True]]
    assert batch["tokens"].tolist() == [[0, 1], [0, 1]]


def test_scalars_alone_need_no_mask(padding: Make) -> None:
    batch = padding([TensorDict(a=torch.ones(())), TensorDict(a=torch.zeros(()))])
    assert alike(batch, TensorDict({"a": torch.tensor([1.0, 0.0])}, [2]))


def test_any_dim_may_be_the_one_that_differs(padding: Make) -> None:
    items = [TensorDict(a=torch.arange(2.0 * n * 3).reshape(2, n, 3)) for n in (1, 3, 2)]
    batch = padding(items, value=-1)
    assert batch["a"].shape == torch.Size([3, 2, 3, 3])
    assert batch["mask"].shape == torch.Size([3, 2, 3])
    for at, one in enumerate(items):
        assert torch.equal(batch["a"][at][batch["mask"][at]], one["a"].reshape(-1, 3))
    assert batch["a"][~batch["mask"]].eq(-1).all()


def test_several_dims_may_differ_at_once(padding: Make) -> None:
    shapes = [(1, 4, 2), (3, 2, 2), (0, 5, 2), (2, 3, 2)]
    items = [TensorDict(a=torch.rand(shape) + 1) for shape in shapes]
    batch = padding(items)
    assert batch["a"].shape == torch.Size([4, 3, 5, 2])
    assert batch["mask"].shape == torch.Size([4, 3, 5])
    for at, (one, (rows, columns, _)) in enumerate(zip(items, shapes, strict=True)):
        assert torch.equal(batch["a"][at, :rows, :columns], one["a"])
        assert batch["mask"][at, :rows, :columns].all()
        assert batch["mask"][at].sum() == rows * columns
    assert not batch["a"][~batch["mask"]].any()


def test_an_empty_leaf_is_all_padding(padding: Make) -> None:
    batch = padding([item(0), item(2), item(0)])
    assert batch["mask"].tolist() == [[False, False], [True, True], [False, False]]
    assert not batch["tokens"][[0, 2]].any()
    nothing = padding([TensorDict(a=torch.ones(0, 2)), TensorDict(a=torch.ones(0, 3))])
    assert nothing["a"].shape == torch.Size([2, 0, 3])


def test_episodes_keep_their_batch_dim(padding: Make) -> None:
    batch = padding([episode(2), episode(3)])
    assert batch.batch_size == torch.Size([2, 3])
    assert batch.names == [None, "time"]
    assert batch["next"].batch_size == torch.Size([2, 3])
    assert batch["mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["obs"][0].tolist() == [[2, 2], [2, 2], [0, 0]]
    assert batch["said"] == [["0", "1", None], ["0", "1", "2"]]
    assert batch["who"] == [["me", "me", None], ["me"] * 3]
    assert batch[:, 0]["said"] == ["0", "0"]


def test_a_mask_has_all_dims_of_the_batch(padding: Make) -> None:
    items = [
        TensorDict({"a": torch.ones(n, 2, 4), "b": torch.ones(n, 2, 5 - n)}, [n, 2]) for n in (1, 3)
    ]
    batch = padding([one.select("a") for one in items])
    assert batch.batch_size == torch.Size([2, 3, 2])
    assert batch["mask"][:, :, 0].tolist() == [[True, False, False], [True, True, True]]
    assert batch["mask"].shape == torch.Size([2, 3, 2])
    both = padding(items)
    assert both["mask"].batch_size == torch.Size([2, 3, 2])
    assert both["mask", "a"].shape == torch.Size([2, 3, 2])
    assert both["mask", "b"].shape == torch.Size([2, 3, 2, 4])


def test_a_tensorclass_becomes_a_tensordict_where_a_mask_is_added(padding: Make) -> None:
    steps = [Step(obs=torch.ones(n), text=str(n), batch_size=[]) for n in (1, 2)]
    batch = padding(steps)
    assert type(batch) is TensorDict
    assert batch["mask"].tolist() == [[True, False], [True, True]]
    assert batch["text"] == ["1", "2"]
    kept = padding(steps, mask_key=None)
    assert type(kept) is Step
    assert kept.obs.tolist() == [[1, 0], [1, 1]]
    assert kept.text == ["1", "2"]


def test_lazy_stacks_in_the_items_stay_lazy(padding: Make) -> None:
    items = [
        TensorDict(a=torch.ones(n), turns=lazy_stack([TensorDict(b=torch.ones(k)) for k in (n, 3)]))
        for n in (1, 2)
    ]
    items = [TensorDict({"a": one["a"], "n": TensorDict({"t": one.get("turns")})}) for one in items]
    batch = padding(items)
    assert [one["b"].shape[0] for one in batch["n", "t"].unbind(0)[1].tensordicts] == [2, 3]


def test_items_may_be_lazy_stacks_themselves(padding: Make) -> None:
    items = [lazy_stack([item(n), item(n)]) for n in (1, 2)]
    batch = padding(items)
    assert batch.batch_size == torch.Size([2, 2])
    assert batch["tokens"].tolist() == [[[0, 0]] * 2, [[0, 1]] * 2]
    assert batch["mask"].tolist() == [[[True, False]] * 2, [[True, True]] * 2]


def test_a_tensorclass_of_a_lazy_stack_stays_lazy(padding: Make) -> None:
    turns = [Step(obs=torch.ones(k), text="x", batch_size=[]) for k in (1, 2)]
    batch = padding([TensorDict({"a": torch.ones(n), "t": lazy_stack(turns)}) for n in (1, 2)])
    assert type(batch.get("t")) is Step
    assert batch.get("t").batch_size == torch.Size([2, 2])


def test_the_arguments_are_not_changed(padding: Make) -> None:
    items = [item(2), item(1)]
    batch = padding(items)
    batch["tokens"].fill_(9)
    assert alike(items, [item(2), item(1)])


# -- nested ------------------------------------------------------------------------------------


def test_leaves_that_differ_are_nested_and_the_rest_dense(nesting: Make) -> None:
    items = [item(3), item(1), item(2)]
    batch = nesting(items)
    assert batch.batch_size == torch.Size([3])
    assert batch["tokens"].layout is torch.jagged
    assert [one.tolist() for one in batch["tokens"].unbind()] == [[0, 1, 2], [0], [0, 1]]
    assert batch["logp"].dim() == 3
    assert batch["reward"].tolist() == [3, 1, 2]
    assert batch["text"] == ["xxx", "x", "xx"]


@pytest.mark.parametrize("make", [item, episode])
def test_it_is_what_tensordict_densifies(make: Make, nesting: Make) -> None:
    items = [make(n) for n in (3, 1, 2)]
    theirs = lazy_stack(items).densify(layout=torch.jagged)
    batch = nesting(items)
    assert batch.batch_size == theirs.batch_size
    assert set(batch.keys(True, True)) == set(theirs.keys(True, True))
    for key in batch.keys(True, True):
        one, other = batch.get(key), theirs.get(key)
        assert alike(one, other) if isinstance(one, torch.Tensor) else batch[key] == theirs[key]


def test_leaves_of_one_length_can_be_computed_with_together(nesting: Make) -> None:
    batch = nesting([TensorDict(a=torch.ones(n), b=torch.arange(n)) for n in (3, 1)])
    assert [one.tolist() for one in (batch["a"] + batch["b"]).unbind()] == [[1, 2, 3], [1]]


def test_nested_leaves_say_how_long_they_are(nesting: Make) -> None:
    tokens = nesting([item(3), item(1), item(0)])["tokens"]
    assert tokens.offsets().tolist() == [0, 3, 4, 4]
    assert tokens.to_padded_tensor(0).tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]


def test_a_leaf_is_nested_along_the_dim_that_differs(nesting: Make) -> None:
    items = [TensorDict(a=torch.arange(2.0 * n * 3).reshape(2, n, 3)) for n in (1, 3, 2)]
    batch = nesting(items)
    assert alike(list(batch["a"].unbind()), [one["a"] for one in items])


def test_equal_lengths_are_nested_where_that_is_asked_for(nesting: Make) -> None:
    items = [item(2), item(2)]
    assert not nesting(items)["tokens"].is_nested
    batch = nesting(items, keys=["tokens"])
    assert batch["tokens"].is_nested
    assert not batch["logp"].is_nested
    assert alike(list(batch["tokens"].unbind()), [one["tokens"] for one in items])


def test_a_leaf_that_differs_in_two_dims_is_not_nested(nesting: Make) -> None:
    items = [TensorDict(a=torch.ones(shape)) for shape in ((1, 2), (2, 1))]
    with pytest.raises(RuntimeError, match=r"differ in dimensions \[0, 1\] of 'a'.*pad"):
        nesting(items)


def test_a_tensorclass_stays_one_when_it_is_nested(nesting: Make) -> None:
    batch = nesting([Step(obs=torch.ones(n), text=str(n), batch_size=[]) for n in (1, 2)])
    assert type(batch) is Step
    assert [len(one) for one in batch.obs.unbind()] == [1, 2]
    assert batch.text == ["1", "2"]


# -- the same from everywhere ------------------------------------------------------------------

dims = st.integers(0, 4)


@given(st.lists(st.tuples(dims, dims), min_size=1, max_size=6), st.sampled_from(sorted(ENCODERS)))
def test_records_give_what_their_items_give(sizes: list[tuple[int, int]], name: str) -> None:
    items = [
        TensorDict(
            {
                "a": torch.rand(one, 2),
                "obs": torch.rand(3, other, 2).bfloat16(),
                "n": {"b": torch.arange(one * other).reshape(one, other), "c": torch.tensor(one)},
            }
        )
        for one, other in sizes
    ]
    batch = padded_by(name)(items, value={"a": 1.5, ("n", "b"): -1})
    assert alike(batch, pad(items, value={"a": 1.5, ("n", "b"): -1}))
    ours = nested_by(name)([one.exclude(("n", "b")) for one in items])
    assert alike(ours, densify([one.exclude(("n", "b")) for one in items]))


def test_records_that_differ_in_how_they_are_stored_make_one_batch() -> None:
    items = [item(n) for n in (30, 5)]
    parts = [written([one], ENCODERS[way]()) for one, way in zip(items, ENCODERS, strict=True)]
    assert alike(pad(RawBatch(joined(*parts), decoder)), pad(items))
    assert alike(densify(RawBatch(joined(*parts), decoder)), densify(items))


@pytest.mark.product
def test_a_missing_leaf_has_length_zero(padding: Make, nesting: Make) -> None:
    items = [
        TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(1, 2)}, "t": "text"}),
        TensorDict({"c": torch.ones(3)}),
    ]
    batch = padding(items)
    assert batch["a"].tolist() == [[1, 1], [0, 0]]
    assert batch["n", "b"].tolist() == [[[1, 1]], [[0, 0]]]
    assert batch["mask", "n", "b"].tolist() == [[True], [False]]
    assert batch["t"] == ["text", None]
    assert [len(one) for one in nesting(items)["c"].unbind()] == [0, 3]


def test_a_scalar_cannot_be_missing(padding: Make) -> None:
    with pytest.raises(RuntimeError, match="some items do not have 'a', which has no dim"):
        padding([TensorDict(a=torch.ones(())), TensorDict()])


def test_a_dense_batch_is_taken_apart_along_its_first_dim() -> None:
    batch = torch.stack([item(2), item(2)])
    assert alike(pad(batch), pad([item(2), item(2)]))
    assert alike(densify(batch, ["tokens"]), densify([item(2), item(2)], ["tokens"]))


def test_a_lazy_stack_of_a_tensorclass_is_one_of_its_items() -> None:
    steps = [Step(obs=torch.ones(n), text=str(n), batch_size=[]) for n in (1, 2)]
    assert alike(pad(lazy_stack(steps)), pad(steps))
    assert alike(densify(lazy_stack(steps)), densify(steps))


def test_arbitrary_objects_are_kept_in_one_process() -> None:
    thing = object()
    batch = pad([TensorDict({"a": torch.ones(n), "x": NonTensorData(thing)}) for n in (1, 2)])
    assert batch["x"][0] is thing


def test_flags_and_strides_of_the_items_are_followed() -> None:
    odd = [torch.ones(3, n, dtype=torch.complex64).mul(1j).T.conj() for n in (2, 4)]
    items = [TensorDict({"a": one, "b": one.imag[::2]}) for one in odd]
    plain = [
        TensorDict({key: leaf.clone().resolve_conj() for key, leaf in one.items()}) for one in items
    ]
    assert alike(pad(items), pad(plain))
    assert pad(items)["a"][0, 0, 0] == -1j


def test_gradients_go_through_where_the_items_have_some() -> None:
    leaves = [torch.ones(n, requires_grad=True) for n in (1, 3)]
    scale = torch.ones((), requires_grad=True)
    items = [TensorDict(a=leaf, b=torch.ones(len(leaf)), c=scale) for leaf in leaves]
    batch = pad(items)
    (batch["a"] * torch.tensor([1.0, 2, 3])).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[1], [1, 2, 3]]
    batch["c"].sum().backward()
    assert scale.grad == 2
    assert batch["mask"].sum() == 4
    dense = densify(items)
    torch.nested.to_padded_tensor(dense["a"] * 2, 0.0).sum().backward()
    assert leaves[0].grad.tolist() == [3]
    assert [len(one) for one in dense["b"].unbind()] == [1, 3]


def test_the_device_of_a_decoder_is_that_of_its_batches() -> None:
    meta = TensorDecoder(device=torch.device("meta"))
    items = [TensorDict({"a": torch.ones(n), "t": "x"}, device="cpu") for n in (1, 2)]
    batch = pad(RawBatch(written(items), meta))
    assert batch.device == torch.device("meta")
    assert {leaf.device.type for leaf in (batch["a"], batch["mask"])} == {"meta"}


# -- what is refused ---------------------------------------------------------------------------


def test_an_empty_list_of_items_is_no_batch(making: Make) -> None:
    with pytest.raises(EmptyBufferError, match="no items"):
        making([])


def test_an_empty_list_of_records_is_no_batch() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(EmptyBufferError, match="no items"):
        pad(RawBatch(RecordBatch(np.zeros(0, np.uint8), none, none), decoder))


@pytest.mark.parametrize(
    "items", [[torch.ones(2)], [{"a": torch.ones(2)}], [item(1), 3], "text", 5]
)
def test_only_tensordicts_are_padded_or_nested(items: Any, making: Make) -> None:
    with pytest.raises(TypeError, match="must be TensorDicts or tensorclasses"):
        making(items)


@pytest.mark.parametrize("make", [pad, densify])
def test_only_records_of_tensordicts_are_padded_or_nested(make: Make) -> None:
    for items in ([torch.ones(2)], [{"a": torch.ones(2)}], [item(1), 3]):
        with pytest.raises(TypeError, match="must be TensorDicts or tensorclasses"):
            make(RawBatch(written(items), decoder))


def test_one_tensordict_without_a_batch_dim_is_no_batch(making: Make) -> None:
    with pytest.raises(TypeError, match="pass a list"):
        making(item(2))


def test_a_stack_along_another_dim_has_other_items(making: Make) -> None:
    with pytest.raises(RuntimeError, match=r"stacked along dimension 1; pass"):
        making(lazy_stack([episode(2), episode(2)], 1))


def test_leaves_of_several_dtypes_are_refused(making: Make) -> None:
    items = [TensorDict(n={"a": torch.ones(2)}), TensorDict(n={"a": torch.ones(3).double()})]
    with pytest.raises(
        RuntimeError, match=r"\('n', 'a'\) differs in dtype.*float32\[2\] and float64"
    ):
        making(items)


def test_leaves_of_several_ranks_are_refused(making: Make) -> None:
    items = [TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3, 1))]
    with pytest.raises(
        RuntimeError, match=r"in the number of dimensions.*float32\[2\] and float32\[3"
    ):
        making(items)


def test_items_of_several_batch_dims_are_refused(making: Make) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be joined to one batch.*\(\), \(2,\)"):
        making([TensorDict({}), TensorDict({}, [2])])


@pytest.mark.parametrize(
    "values", [(torch.ones(2), "text"), (torch.ones(2), TensorDict()), ("text", TensorDict())]
)
def test_a_leaf_that_is_not_a_tensor_in_some_items_is_refused(values: Any, making: Make) -> None:
    with pytest.raises(TypeError, match=r"'a' is a \w+ in some items and a \w+ in others"):
        making([TensorDict(a=value) for value in values])


def test_a_lazy_stack_that_some_items_do_not_have_is_refused(making: Make) -> None:
    with pytest.raises(RuntimeError, match="some items have a lazy stack in 'a', but others do"):
        making([TensorDict({"a": lazy_stack([TensorDict()])}), TensorDict()])


def test_nested_leaves_stay_in_a_stack(making: Make) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match="'a' is a nested or sparse tensor"):
        making([TensorDict({"a": jagged}), TensorDict({"a": jagged})])


@pytest.mark.parametrize("how", [{"value": {"b": 1}}, {"mask_key": {"b": "mask"}}])
def test_a_key_that_no_item_has_is_refused(how: Any, padding: Make) -> None:
    with pytest.raises(KeyError, match=r"'b' is not a tensor in the items\. Their tensors are 'a'"):
        padding([TensorDict(a=torch.ones(1))], **how)


def test_a_key_to_be_nested_that_no_item_has_is_refused(nesting: Make) -> None:
    with pytest.raises(KeyError, match=r"'b' is not a tensor in the items\. Their tensors are 'a'"):
        nesting([TensorDict(a=torch.ones(1))], keys=["b"])


@pytest.mark.parametrize("key", ["mask", ("n", "mask"), ("mask", "x"), {"a": "mask"}])
def test_a_mask_does_not_cover_an_entry(key: Any, padding: Make) -> None:
    items = [
        TensorDict(a=torch.ones(n), mask=torch.ones(1), n={"mask": torch.ones(1)}) for n in (1, 2)
    ]
    with pytest.raises(KeyError, match=r"the items already have an entry .*mask_key"):
        padding(items, mask_key=key)


def test_a_leaf_that_differs_must_be_named_where_leaves_are_named(padding: Make) -> None:
    with pytest.raises(RuntimeError, match=r"'logp' differs in shape .*mask_key does not contain"):
        padding([item(1), item(2)], mask_key={"tokens": "mask"})


def test_leaves_of_one_mask_have_one_length(padding: Make) -> None:
    items = [TensorDict(a=torch.ones(n), b=torch.ones(3 - n)) for n in (1, 2)]
    with pytest.raises(RuntimeError, match="shares the mask 'm' with another leaf"):
        padding(items, mask_key={"a": "m", "b": "m"})


def test_a_scalar_has_no_mask(padding: Make) -> None:
    with pytest.raises(RuntimeError, match="'a' has no dimensions that could be masked"):
        padding([TensorDict(a=torch.ones(()))], mask_key={"a": "mask"})


def test_a_scalar_is_not_nested(nesting: Make) -> None:
    with pytest.raises(RuntimeError, match="'a' has no dimension along which it could be nested"):
        nesting([TensorDict(a=torch.ones(()))], keys=["a"])


def test_lazy_stacks_in_episodes_are_not_padded(padding: Make) -> None:
    items = [TensorDict({"a": lazy_stack([TensorDict(b=torch.ones(1))] * n)}, [n]) for n in (1, 2)]
    with pytest.raises(RuntimeError, match="lazy stacks in TensorDicts whose batch sizes differ"):
        padding(items)


def test_a_shape_that_would_take_terabytes_is_refused_before_anything_is_allocated() -> None:
    chunk = Chunk("tensor", "uint8", 2)
    tree = ["tensordict", ["dims", 0], None, None, [["a", ["chunk", 0]]]]
    form = record_format.encode_form(tree, [chunk])
    sizes = np.array([[2**32 - 1, 0], [1, 0]], np.int64)
    nothing = np.zeros((2, 1), np.int64)
    batch = record_format.assemble(form, np.zeros((2, 0), np.int64), [sizes], nothing, nothing)
    huge = RecordBatch(batch.data, batch.starts, batch.sizes)
    assert pad(RawBatch(huge, decoder), mask_key=None)["a"].shape == torch.Size([2, 2**32 - 1, 0])
    with pytest.raises(RuntimeError, match=r"'a' contains no numbers.*the shape \[4294967295\]"):
        pad(RawBatch(huge, decoder))
    wide = [TensorDict(a=torch.empty(1, 1).expand(2**20, 0)), TensorDict(a=torch.ones(1, 2**17))]
    with pytest.raises(RuntimeError, match=r"'a' would be padded to .* bytes per item"):
        pad(RawBatch(written(wide), decoder))


def test_damage_is_refused_by_name() -> None:
    batch = written([item(300), item(200)], ENCODERS["zstd"]())
    (located,) = record_format.locate(batch, "here")
    at = int(located.offsets[0, 0])
    batch.data[at : at + 4] = 0
    for make in (pad, densify):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer"):
            make(RawBatch(batch, decoder))


@given(st.data())
def test_records_with_other_bytes_are_refused_or_made_a_batch(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([item, episode]))
    way = data.draw(st.sampled_from(sorted(ENCODERS)))
    batch = written([make(n) for n in (2, 40, 1)], ENCODERS[way]())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(24, len(batch.data) - 1))
        batch.data[at] = data.draw(st.integers(0, 255))
    for read in (pad, densify):
        try:
            repr(read(RawBatch(batch, decoder)))
        except (CorruptBufferError, RuntimeError, TypeError) as error:
            assert str(error)  # noqa: PT017 - it need not be raised
