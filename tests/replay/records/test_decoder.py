"""Records become items again, or one dense batch, in memory that nobody else has."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    lazy_stack,
)

from shmbuffer import CorruptBufferError
from shmbuffer.items.records.compression import Zstd
from shmbuffer.items.records.places import Places
from shmbuffer.memory import record_format
from shmbuffer.memory.format.record_batch import RecordBatch
from shmbuffer.tensors.form.batches import collate
from shmbuffer.tensors.records.decoder import Decoder
from shmbuffer.tensors.records.encoder import Encoder
from tests.kit.items import Point, Step, alike
from tests.replay.records.batches import as_read, joined, picked

pytestmark = pytest.mark.product(few=4)


def large(seed: int, *shape: int) -> torch.Tensor:
    """Numbers that zstd makes smaller."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) // (7 + seed)


ITEMS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: large(n, 3, 40).float(),
    "number": lambda n: torch.tensor(n),
    "empty": lambda n: torch.zeros(0, 3),
    "bfloat16": lambda n: large(n, 50).bfloat16(),
    "bool": lambda n: large(n, 100) % 2 == 0,
    "complex128": lambda n: TensorDict(
        {"a": torch.tensor(n, dtype=torch.int8), "z": large(n, 9).to(torch.complex128)}
    ),
    "array": lambda n: {
        "a": np.arange(30, dtype="i2") + n,
        "b": np.float32(n),
        "c": np.ones((2, 0)),
    },
    "odd array": lambda n: [
        np.array(["a", "bcd" * n]),
        np.array("2001-02-03", "M8[s]"),
        np.str_("x" * n),
    ],
    "values": lambda n: {
        "text": "\u00e9\ud800" * n,
        1: -((10**n) ** 5),
        "float": n / 7,
        (True, "x"): n > 1,
        "none": None,
        "bytes": b"\0" * n,
    },
    "nested": lambda n: [
        (large(n, 5), {"a": Point(n, [torch.tensor(n)])}),
        OrderedDict(z=True, a=()),
    ],
    "flat": lambda n: TensorDict({"obs": large(n, 20, 20), "reward": torch.tensor(float(n))}),
    "of batches": lambda n: TensorDict(
        {"obs": large(n, 3, 30), "next": TensorDict({"obs": large(n, 3, 2)}, [3])},
        [3],
        names=["time"],
        device="cpu",
    ),
    "with text": lambda n: TensorDict(
        {"text": "so long" * n, "data": NonTensorData([n, "x", None, {"a": 1}])}
    ),
    "text a step": lambda n: TensorDict(
        {"text": NonTensorStack("a", "b" * n), "all": NonTensorData("all", batch_size=[2])}, [2]
    ),
    "array as data": lambda n: TensorDict(
        {"array": NonTensorData(np.arange(n)), "tensor": NonTensorData(torch.arange(n))}
    ),
    "lazy": lambda n: TensorDict(
        {"stack": lazy_stack([TensorDict(a=torch.ones(k + n)) for k in range(2)])}
    ),
    "tensorclass": lambda n: Step(obs=large(n, 3, 4), text="x" * n, batch_size=[3]),
    "tensorclass inside": lambda n: TensorDict(
        {"step": Step(obs=large(n, 30), text="x", batch_size=[])}
    ),
    "nothing": lambda n: TensorDict(),
    "no entries": lambda n: {"a": {}, "b": [], "c": ()},
}
DENSE = sorted(ITEMS.keys() - {"odd array", "lazy"})

zstd = Zstd(threads=1)


def backwards(tensor: torch.Tensor) -> torch.Tensor:
    """A user's compression: the bytes in reverse, and two more."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return torch.cat([plain.reshape(-1).view(torch.uint8).flip(0), torch.zeros(2).byte()])


def forwards(chunk: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
    """Its decompression."""
    return chunk[:-2].flip(0).view(about["dtype"]).reshape(about["shape"])


WAYS: dict[str, Callable[[], Encoder]] = {
    "raw": Encoder,
    "zstd": lambda: Encoder(zstd=zstd),
    "own": lambda: Encoder(own=backwards),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Encoder:
    """Each way to store."""
    return WAYS[request.param]()


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(zstd.expand, own=forwards, where="run/buffer")


def written(items: Sequence[Any], encoder: Encoder | None = None) -> RecordBatch:
    return as_read((encoder or Encoder()).encode(list(items), single=False))


def damaged(batch: RecordBatch, chunk: int, content: bytes) -> RecordBatch:
    """Other bytes at the start of a leaf of the first record."""
    at = int(record_format.locate(batch, "here")[0].offsets[0, chunk])
    data = batch.data.copy()
    data[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return replace(batch, data=data)


# -- items -------------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("name", ITEMS)
def test_items_come_back_as_they_were(name: str, way: Encoder, decoder: Decoder) -> None:
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    found = decoder.items(written(items, way))
    assert alike(found, items)


def test_items_of_several_forms_come_back_in_their_order(decoder: Decoder) -> None:
    items = [ITEMS[name](n) for n in (1, 2) for name in ITEMS]
    assert alike(decoder.items(written(items)), items)


def test_batch_sizes_may_differ_between_items(way: Encoder, decoder: Decoder) -> None:
    items = [
        TensorDict(
            {"obs": torch.ones(n, 2), "next": TensorDict({"obs": torch.ones(n, 3)}, [n, 3])},
            [n],
            names=["time"],
        )
        for n in (3, 0, 2)
    ]
    assert alike(decoder.items(written(items, way)), items)


def test_an_empty_list_of_records_has_no_items(decoder: Decoder) -> None:
    none = np.zeros(0, np.int64)
    assert decoder.items(RecordBatch(np.zeros(0, np.uint8), none, none)) == []


@pytest.mark.parametrize(
    "shape", [lambda n: (100, 100), lambda n: (3000 + n,), lambda n: (n, 3000)]
)
def test_raw_leaves_are_not_copied_where_that_is_cheaper(
    shape: Callable[[int], tuple[int, ...]], decoder: Decoder
) -> None:
    batch = written([{"frame": torch.full(shape(n), n), "n": n} for n in (1, 2, 3)])
    assert alike(
        [item["frame"] for item in decoder.items(batch)],
        [torch.full(shape(n), n) for n in (1, 2, 3)],
    )
    found = decoder.items(batch)
    memory = batch.data.ctypes.data
    assert all(memory <= item["frame"].data_ptr() < memory + len(batch.data) for item in found)


@pytest.mark.product
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2000,), (40, 50)])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_change_of_one_item_reaches_no_other(
    shape: tuple[int, ...], ragged: bool, way: Encoder, decoder: Decoder
) -> None:
    leaves = [torch.ones(n + 1 if ragged else 2, *shape) for n in range(4)]
    batch = written([{"a": leaf, "b": torch.ones(shape)} for leaf in leaves], way)
    found = decoder.items(picked(batch, [0, 1, 1, 2, 3, 3]))
    for at, item in enumerate(found):
        for leaf in item.values():
            leaf.fill_(-at)
    assert [{float(x) for leaf in item.values() for x in leaf.reshape(-1)} for item in found] == [
        {-at} for at in range(6)
    ]


def test_records_that_lie_on_each_other_become_items_of_their_own(decoder: Decoder) -> None:
    batch = written([torch.arange(3000.0), torch.zeros(3000)])
    twice = replace(batch, starts=batch.starts[[0, 0, 1]], sizes=batch.sizes[[0, 0, 1]])
    first, second, _ = decoder.items(twice)
    first.zero_()
    assert torch.equal(second, torch.arange(3000.0))


def test_records_may_lie_in_any_order(decoder: Decoder) -> None:
    items = [{"a": torch.arange(n), "b": torch.full((90, 90), n)} for n in (5, 3, 4)]
    batch = written(items)
    back = replace(batch, starts=batch.starts[::-1].copy(), sizes=batch.sizes[::-1].copy())
    assert alike(decoder.items(back), items[::-1])


def test_items_share_no_containers(decoder: Decoder) -> None:
    items = [TensorDict({"n": TensorDict(), "d": NonTensorData([1])}) for _ in range(2)]
    one, other = decoder.items(written(items))
    one["n"]["new"] = torch.ones(1)
    one["d"].append(2)
    one["more"] = torch.ones(1)
    assert alike(other, items[1])


def test_a_tensordict_is_as_its_constructor_makes_it(decoder: Decoder) -> None:
    (found,) = decoder.items(written([TensorDict({"a": torch.ones(2), "t": "text"})]))
    made = TensorDict({"a": torch.ones(2), "t": "text"})
    assert vars(found).keys() == vars(made).keys()
    assert type(found._tensordict) is type(made._tensordict)
    assert vars(found.get("t")).keys() == vars(made.get("t")).keys()
    found["b"] = torch.ones(3)
    found.batch_size = []
    assert found.lock_().is_locked
    assert found.clone()["t"] == "text"


def test_read_only_bytes_are_read(decoder: Decoder) -> None:
    batch = written([torch.arange(5000)])
    batch.data.flags.writeable = False
    (found,) = decoder.items(batch)
    found.zero_()
    assert torch.equal(decoder.items(batch)[0], torch.arange(5000))


def test_the_device_is_that_of_the_tensordicts_that_have_one() -> None:
    items = [TensorDict({"a": torch.ones(2)}, device=device) for device in ("cpu", None)]
    found = Decoder(device=torch.device("meta")).items(written(items))
    assert [item.device for item in found] == [torch.device("meta"), None]
    assert {item["a"].device.type for item in found} == {"meta"}
    dense = Decoder(device=torch.device("meta")).dense(written(items[:1]))
    assert (dense.device, dense["a"].device) == (torch.device("meta"),) * 2


def test_a_class_that_is_not_here_comes_back_as_what_it_holds(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = written([(Step(obs=torch.ones(2), text="x", batch_size=[]), Point(1, 2))])
    for family in ("tensors.form", "items.records"):
        monkeypatch.setattr(f"shmbuffer.{family}.containers.class_of", lambda name: None)
    ((step, point),) = decoder.items(batch)
    assert alike(step, TensorDict({"obs": torch.ones(2), "text": "x"}))
    assert point == (1, 2)
    assert type(point) is tuple


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.lists(st.integers(-9, 9), max_size=9).map(torch.tensor),
)
trees = st.recursive(
    leaves,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inside, max_size=3),
    ),
    max_leaves=8,
)


@given(st.lists(trees, min_size=1, max_size=5), st.sampled_from(["raw", "zstd"]))
def test_nested_data_come_back(items: list[Any], way: str) -> None:
    assert alike(Decoder(zstd.expand).items(written(items, WAYS[way]())), items)


# -- a dense batch -----------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_batch_is_what_the_items_are_stacked_to(
    name: str, way: Encoder, decoder: Decoder
) -> None:
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    stack = torch.stack if is_tensor_collection(items[0]) else collate
    assert alike(decoder.dense(written(items, way)), stack(items))


def test_a_dense_batch_has_memory_of_its_own(way: Encoder, decoder: Decoder) -> None:
    batch = written([{"a": torch.ones(30, 30), "b": torch.ones(())} for _ in range(3)], way)
    dense = decoder.dense(batch)
    batch.data.fill(0)
    assert all(leaf.is_contiguous() and leaf.eq(1).all() for leaf in dense.values())
    assert len({leaf.untyped_storage().data_ptr() for leaf in dense.values()}) == 2


@pytest.mark.parametrize("nbytes", [2**22 - 1, 2**22, 2**22 + 1])
def test_a_large_batch_is_as_a_small_one(nbytes: int, decoder: Decoder) -> None:
    items = [torch.arange(nbytes).byte(), torch.arange(nbytes).flip(0).byte()]
    assert alike(decoder.dense(written(items)), torch.stack(items))


@pytest.mark.parametrize(
    "items",
    [
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), torch.ones(2).double()],
        [TensorDict(a=torch.ones(2)), TensorDict(b=torch.ones(2))],
        [TensorDict({}, [2]), TensorDict({}, [3])],
        [ITEMS["lazy"](1), ITEMS["lazy"](1)],
        [np.array(["a"]), np.array(["a"])],
        [(1, 2), (1, 2, 3)],
        [torch.ones(2), {"a": torch.ones(2)}],
        [10**30, 1],
    ],
    ids=lambda items: str(items)[:20],
)
def test_items_that_cannot_be_stacked_are_no_dense_batch(
    items: list[Any], decoder: Decoder
) -> None:
    assert decoder.dense(written(items)) is None


def test_an_empty_list_of_records_is_no_dense_batch(decoder: Decoder) -> None:
    none = np.zeros(0, np.int64)
    assert decoder.dense(RecordBatch(np.zeros(0, np.uint8), none, none)) is None


@pytest.mark.parametrize("name", DENSE)
def test_records_that_differ_only_in_how_they_are_stored_are_one_batch(
    name: str, decoder: Decoder
) -> None:
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    parts = [written([one], WAYS[way]()) for one, way in zip(items, WAYS, strict=True)]
    stack = torch.stack if is_tensor_collection(items[0]) else collate
    assert alike(decoder.dense(joined(*parts)), stack(items))


def test_the_rows_of_a_mixed_batch_are_in_their_order(decoder: Decoder) -> None:
    batch = joined(*(written([large(n, 40) for n in (0, 1)], WAYS[way]()) for way in WAYS))
    rows = [3, 0, 5, 2, 1, 4]
    found = decoder.dense(picked(batch, rows))
    assert torch.equal(found, torch.stack([large(n % 2, 40) for n in rows]))


# -- a lazy stack ------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_records_of_tensordicts_are_a_lazy_stack_along_any_dim(
    dim: int, way: Encoder, decoder: Decoder
) -> None:
    items = [ITEMS["of batches"](n) for n in (3, 1, 2)]
    found = decoder.stack(written(items, way), dim)
    assert found.batch_size == lazy_stack(items, dim).batch_size
    assert alike(found.clone(recurse=False), lazy_stack(items, dim))


def test_a_lazy_stack_may_hold_items_of_several_forms(decoder: Decoder) -> None:
    items = [
        TensorDict({"a": torch.ones(2)}, [2]),
        TensorDict({"b": torch.ones(3)}, [3]),
        TensorDict({"a": torch.ones(2), "t": "text"}, [2]),
    ]
    found = decoder.stack(written(items))
    assert found.batch_size == torch.Size([3, -1])
    assert alike(list(found.tensordicts), items)


@pytest.mark.parametrize(
    ("items", "dim"),
    [
        ([torch.ones(2)], 0),
        ([{"a": 1}], 0),
        ([ITEMS["tensorclass"](1)], 0),
        ([TensorDict(), {}], 0),
        ([TensorDict({}, []), TensorDict({}, [1])], 0),
        ([TensorDict({}, device="cpu"), TensorDict({})], 0),
        ([TensorDict({}, [2])], 2),
        ([TensorDict({}, [2])], -3),
        ([], 0),
    ],
)
def test_other_data_than_a_lazy_stack_are_taken_as_items(
    items: list[Any], dim: int, decoder: Decoder
) -> None:
    assert decoder.stack(written(items), dim) is None


def test_a_lazy_stack_of_what_is_no_record_is_refused_at_once(decoder: Decoder) -> None:
    batch = written([TensorDict({"a": torch.ones(2)})])
    batch.data[24] = 99
    with pytest.raises(CorruptBufferError, match=r"^run/buffer: record 0"):
        decoder.stack(batch)


def test_damage_in_a_compressed_leaf_is_seen_at_the_first_look(decoder: Decoder) -> None:
    batch = written([TensorDict({"a": large(0, 900)})], Encoder(zstd=zstd))
    found = decoder.stack(damaged(batch, 0, b"no frame"))
    for _ in range(2):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer"):
            found["a"]


# -- some entries ------------------------------------------------------------------------------


def test_some_entries_are_read_without_the_others(way: Encoder) -> None:
    steps = [
        TensorDict(
            {
                "obs": large(n, 30, 30),
                "done": torch.tensor(n > 1),
                "next": {"id": n * torch.ones(2)},
            }
        )
        for n in range(3)
    ]
    asked: list[int] = []

    def expand(places: Places, where: str) -> None:
        asked.append(len(places.at))
        zstd.expand(places, where)

    def own(chunk: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        asked.append(about["shape"].numel())
        return forwards(chunk, about)

    found = Decoder(expand, own=own).entries(written(steps, way), [("done",), ("next", "id")])
    assert found[0].tolist() == [False, False, True]
    assert found[1].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert 900 not in asked
    assert sum(asked) <= 6 + 3


def test_an_entry_that_an_item_does_not_have_is_none(decoder: Decoder) -> None:
    items = [
        {"a": 1, "b": {1: np.arange(2)}},
        TensorDict({"a": torch.ones(2), "b": TensorDict()}),
        Step(obs=torch.zeros(1), text="x", batch_size=[]),
        torch.ones(2),
        {"a": "text", "b": None},
        TensorDict({"a": "text"}),
    ]
    a, b, obs = decoder.entries(written(items), [("a",), ("b", 1), ("obs",)])
    assert alike(a, [1, torch.ones(2), None, None, None, None])
    assert alike(b, [np.arange(2), None, None, None, None, None])
    assert alike(obs, [None, None, torch.zeros(1), None, None, None])


# -- what a user's function gives --------------------------------------------------------------


def test_a_users_function_is_told_what_it_compressed() -> None:
    told: list[dict[str, Any]] = []

    def own(chunk: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        told.append(about)
        return forwards(chunk, about)

    items = [{"a": torch.ones(2, 3), "b": b"abc", "c": np.array(["x"])}]
    assert alike(Decoder(own=own).items(written(items, Encoder(own=backwards))), items)
    assert {(one["type"], str(one["device"])) for one in told} == {("tensor", "cpu")}
    assert [(list(one["shape"]), one["dtype"]) for one in told] == [
        ([2, 3], torch.float32),
        ([3], torch.uint8),
        ([4], torch.uint8),
    ]


def test_a_users_function_may_give_the_bytes_of_a_tensor() -> None:
    items = [torch.ones(2, 3, dtype=torch.float64)]
    batch = written(items, Encoder(own=backwards))
    assert alike(Decoder(own=lambda chunk, _: chunk[:-2].flip(0)).items(batch), items)


def test_a_users_function_that_gives_something_else_is_refused() -> None:
    batch = written([torch.ones(2, 3)], Encoder(own=backwards))
    with pytest.raises(RuntimeError, match="gives the tensor that was compressed, got list"):
        Decoder(own=lambda chunk, _: [1]).items(batch)
    words = r"gave int64\[7\] for what was float32\[2, 3\] when it was compressed"
    with pytest.raises(RuntimeError, match=words):
        Decoder(own=lambda chunk, _: torch.ones(7, dtype=torch.int64)).dense(batch)


def test_a_users_compression_needs_the_users_decompression() -> None:
    batch = written([torch.ones(2, 3)], Encoder(own=backwards))
    with pytest.raises(RuntimeError, match="with the decompression_fn that belongs to it"):
        Decoder().items(batch)


def test_zstd_needs_its_decompressor() -> None:
    batch = written([large(0, 90)], Encoder(zstd=zstd))
    with pytest.raises(RuntimeError, match=r"run/b: its records are compressed with zstd"):
        Decoder(where="run/b").dense(batch)


# -- damage ------------------------------------------------------------------------------------


def test_an_invalid_record_is_refused_by_name(decoder: Decoder) -> None:
    batch = written([torch.ones(2)])
    batch.data[24] = 99
    for read in (decoder.items, decoder.dense, lambda one: decoder.entries(one, [()])):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer: record 0"):
            read(batch)


def test_a_damaged_frame_is_refused_by_name(decoder: Decoder) -> None:
    batch = damaged(written([large(0, 900)], Encoder(zstd=zstd)), 0, b"no frame")
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer"):
            read(batch)


@pytest.mark.parametrize(
    ("item", "content", "words"),
    [("text", b"\xff", "can't decode byte 0xff"), (True, b"\2", "a bool is 0 or 1, found 2")],
)
def test_bytes_that_are_no_value_are_refused(
    item: Any, content: bytes, words: str, decoder: Decoder
) -> None:
    batch = damaged(written([item]), 0, content)
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match=words) as caught:
            read(batch)
        assert caught.value.path == "run/buffer"


def test_a_class_that_has_other_fields_now_is_an_error_that_says_so(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = written([Point(1, 2)])
    other = namedtuple("Point", ["x", "y", "z"])
    for family in ("tensors.form", "items.records"):
        monkeypatch.setattr(f"shmbuffer.{family}.containers.class_of", lambda name: other)
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match="other fields here than where it was written"):
            read(batch)


@given(st.data())
def test_a_record_with_other_bytes_is_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ITEMS)))
    way = data.draw(st.sampled_from(["raw", "zstd"]))
    batch = written([ITEMS[name](n) for n in (2, 1)], WAYS[way]())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(24, len(batch.data) - 1))
        batch.data[at] = data.draw(st.integers(0, 255))
    for read in (Decoder(zstd.expand).items, Decoder(zstd.expand).dense):
        try:
            repr(read(batch))
        except CorruptBufferError as error:
            assert "this buffer" in str(error)  # noqa: PT017 - it need not be raised
