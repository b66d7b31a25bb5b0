"""Records are decoded into items or one dense batch, in memory that is not used elsewhere."""

from __future__ import annotations

from collections import namedtuple
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
    TensorDict,
    is_tensor_collection,
    lazy_stack,
)

from shmbuffer import CorruptBufferError
from shmbuffer.items.records.places import Places
from shmbuffer.memory import record_format
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.tensors.form.tensor_batches import collate
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.kit.items import ITEMS, Point, Step, alike, large
from tests.replay.records.batches import as_read, joined, picked
from tests.replay.records.ways import WAYS, backwards, decoder, forwards, zstd

pytestmark = pytest.mark.product(few=4)


DENSE = sorted(ITEMS.keys() - {"odd array", "lazy", "lazy stack", "ragged"})


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> TensorEncoder:
    """Runs the test for each way to store leaves."""
    return WAYS[request.param]()


@pytest.fixture(name="decoder")
def make_decoder() -> TensorDecoder:
    return decoder()


def written(items: Sequence[Any], encoder: TensorEncoder | None = None) -> RecordBatch:
    return as_read((encoder or TensorEncoder()).encode(list(items), single=False))


def damaged(batch: RecordBatch, chunk: int, content: bytes) -> RecordBatch:
    """Overwrites the beginning of a leaf of the first record."""
    at = int(record_format.locate(batch, "here")[0].offsets[0, chunk])
    data = batch.data.copy()
    data[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return replace(batch, data=data)


# -- items -------------------------------------------------------------------------------------


def test_batch_sizes_may_differ_between_items(way: TensorEncoder, decoder: TensorDecoder) -> None:
    items = [
        TensorDict(
            {"obs": torch.ones(n, 2), "next": TensorDict({"obs": torch.ones(n, 3)}, [n, 3])},
            [n],
            names=["time"],
        )
        for n in (3, 0, 2)
    ]
    assert alike(decoder.items(written(items, way)), items)


@pytest.mark.parametrize(
    "shape", [lambda n: (100, 100), lambda n: (3000 + n,), lambda n: (n, 3000)]
)
def test_raw_leaves_are_not_copied_where_that_is_cheaper(
    shape: Callable[[int], tuple[int, ...]], decoder: TensorDecoder
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
    shape: tuple[int, ...], ragged: bool, way: TensorEncoder, decoder: TensorDecoder
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


def test_records_that_lie_on_each_other_become_items_of_their_own(decoder: TensorDecoder) -> None:
    batch = written([torch.arange(3000.0), torch.zeros(3000)])
    twice = replace(batch, starts=batch.starts[[0, 0, 1]], sizes=batch.sizes[[0, 0, 1]])
    first, second, _ = decoder.items(twice)
    first.zero_()
    assert torch.equal(second, torch.arange(3000.0))


def test_records_may_lie_in_any_order(decoder: TensorDecoder) -> None:
    items = [{"a": torch.arange(n), "b": torch.full((90, 90), n)} for n in (5, 3, 4)]
    batch = written(items)
    back = replace(batch, starts=batch.starts[::-1].copy(), sizes=batch.sizes[::-1].copy())
    assert alike(decoder.items(back), items[::-1])


def test_items_share_no_containers(decoder: TensorDecoder) -> None:
    items = [TensorDict({"n": TensorDict(), "d": NonTensorData([1])}) for _ in range(2)]
    one, other = decoder.items(written(items))
    one["n"]["new"] = torch.ones(1)
    one["d"].append(2)
    one["more"] = torch.ones(1)
    assert alike(other, items[1])


def test_a_tensordict_is_as_its_constructor_makes_it(decoder: TensorDecoder) -> None:
    (found,) = decoder.items(written([TensorDict({"a": torch.ones(2), "t": "text"})]))
    made = TensorDict({"a": torch.ones(2), "t": "text"})
    assert vars(found).keys() == vars(made).keys()
    assert type(found._tensordict) is type(made._tensordict)
    assert vars(found.get("t")).keys() == vars(made.get("t")).keys()
    found["b"] = torch.ones(3)
    found.batch_size = []
    assert found.lock_().is_locked
    assert found.clone()["t"] == "text"


def test_read_only_bytes_are_read(decoder: TensorDecoder) -> None:
    batch = written([torch.arange(5000)])
    batch.data.flags.writeable = False
    (found,) = decoder.items(batch)
    found.zero_()
    assert torch.equal(decoder.items(batch)[0], torch.arange(5000))


def test_the_device_is_that_of_the_tensordicts_that_have_one() -> None:
    items = [TensorDict({"a": torch.ones(2)}, device=device) for device in ("cpu", None)]
    found = TensorDecoder(device=torch.device("meta")).items(written(items))
    assert [item.device for item in found] == [torch.device("meta"), None]
    assert {item["a"].device.type for item in found} == {"meta"}
    dense = TensorDecoder(device=torch.device("meta")).dense(written(items[:1]))
    assert (dense.device, dense["a"].device) == (torch.device("meta"),) * 2


def test_a_class_that_is_not_here_comes_back_as_what_it_holds(
    decoder: TensorDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = written([(Step(obs=torch.ones(2), text="x", batch_size=[]), Point(1, 2))])
    for module in ("tensors.form.tensor_containers", "items.records.containers"):
        monkeypatch.setattr(f"shmbuffer.{module}.class_of", lambda name: None)
    ((step, point),) = decoder.items(batch)
    assert alike(step, TensorDict({"obs": torch.ones(2), "text": "x"}))
    assert point == (1, 2)
    assert type(point) is tuple


# -- a dense batch -----------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_batch_is_what_the_items_are_stacked_to(
    name: str, way: TensorEncoder, decoder: TensorDecoder
) -> None:
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    stack = torch.stack if is_tensor_collection(items[0]) else collate
    assert alike(decoder.dense(written(items, way)), stack(items))


def test_a_dense_batch_has_memory_of_its_own(way: TensorEncoder, decoder: TensorDecoder) -> None:
    batch = written([{"a": torch.ones(30, 30), "b": torch.ones(())} for _ in range(3)], way)
    dense = decoder.dense(batch)
    batch.data.fill(0)
    assert all(leaf.is_contiguous() and leaf.eq(1).all() for leaf in dense.values())
    assert len({leaf.untyped_storage().data_ptr() for leaf in dense.values()}) == 2


@pytest.mark.parametrize("nbytes", [2**22 - 1, 2**22, 2**22 + 1])
def test_a_large_batch_is_as_a_small_one(nbytes: int, decoder: TensorDecoder) -> None:
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
    items: list[Any], decoder: TensorDecoder
) -> None:
    assert decoder.dense(written(items)) is None


def test_an_empty_list_of_records_is_no_dense_batch(decoder: TensorDecoder) -> None:
    none = np.zeros(0, np.int64)
    assert decoder.dense(RecordBatch(np.zeros(0, np.uint8), none, none)) is None


@pytest.mark.parametrize("name", DENSE)
def test_records_that_differ_only_in_how_they_are_stored_are_one_batch(
    name: str, decoder: TensorDecoder
) -> None:
    items = [ITEMS[name](n) for n in (3, 1, 2)]
    parts = [written([one], WAYS[way]()) for one, way in zip(items, WAYS, strict=True)]
    stack = torch.stack if is_tensor_collection(items[0]) else collate
    assert alike(decoder.dense(joined(*parts)), stack(items))


def test_the_rows_of_a_mixed_batch_are_in_their_order(decoder: TensorDecoder) -> None:
    batch = joined(*(written([large(n, 40) for n in (0, 1)], WAYS[way]()) for way in WAYS))
    rows = [3, 0, 5, 2, 1, 4]
    found = decoder.dense(picked(batch, rows))
    assert torch.equal(found, torch.stack([large(n % 2, 40) for n in rows]))


# -- a lazy stack ------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_records_of_tensordicts_are_a_lazy_stack_along_any_dim(
    dim: int, way: TensorEncoder, decoder: TensorDecoder
) -> None:
    items = [ITEMS["of batches"](n) for n in (3, 1, 2)]
    found = decoder.stack(written(items, way), dim)
    assert found.batch_size == lazy_stack(items, dim).batch_size
    assert alike(found.clone(recurse=False), lazy_stack(items, dim))


def test_a_lazy_stack_may_hold_items_of_several_forms(decoder: TensorDecoder) -> None:
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
    items: list[Any], dim: int, decoder: TensorDecoder
) -> None:
    assert decoder.stack(written(items), dim) is None


def test_a_lazy_stack_of_what_is_no_record_is_refused_at_once(decoder: TensorDecoder) -> None:
    batch = written([TensorDict({"a": torch.ones(2)})])
    batch.data[24] = 99
    with pytest.raises(CorruptBufferError, match=r"^run/buffer: record 0"):
        decoder.stack(batch)


def test_damage_in_a_compressed_leaf_is_seen_at_the_first_look(decoder: TensorDecoder) -> None:
    batch = written([TensorDict({"a": large(0, 900)})], TensorEncoder(zstd=zstd))
    found = decoder.stack(damaged(batch, 0, b"no frame"))
    for _ in range(2):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer"):
            found["a"]


# -- some entries ------------------------------------------------------------------------------


def test_some_entries_are_read_without_the_others(way: TensorEncoder) -> None:
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

    found = TensorDecoder(expand, own=own).entries(written(steps, way), [("done",), ("next", "id")])
    assert found[0].tolist() == [False, False, True]
    assert found[1].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert 900 not in asked
    assert sum(asked) <= 6 + 3


def test_an_entry_that_an_item_does_not_have_is_none(decoder: TensorDecoder) -> None:
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


def test_a_dense_batch_of_something_else_than_was_compressed_is_refused() -> None:
    batch = written([torch.ones(2, 3)], TensorEncoder(own=backwards))
    words = r"returned int64\[7\], but float32\[2, 3\] was compressed"
    with pytest.raises(RuntimeError, match=words):
        TensorDecoder(own=lambda chunk, _: torch.ones(7, dtype=torch.int64)).dense(batch)


def test_zstd_needs_its_decompressor() -> None:
    batch = written([large(0, 90)], TensorEncoder(zstd=zstd))
    with pytest.raises(RuntimeError, match=r"run/b: the records are compressed with zstd"):
        TensorDecoder(where="run/b").dense(batch)


# -- damage ------------------------------------------------------------------------------------


def test_an_invalid_record_is_refused_by_name(decoder: TensorDecoder) -> None:
    batch = written([torch.ones(2)])
    batch.data[24] = 99
    for read in (decoder.items, decoder.dense, lambda one: decoder.entries(one, [()])):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer: record 0"):
            read(batch)


def test_a_damaged_frame_is_refused_by_name(decoder: TensorDecoder) -> None:
    batch = damaged(written([large(0, 900)], TensorEncoder(zstd=zstd)), 0, b"no frame")
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match=r"^run/buffer"):
            read(batch)


@pytest.mark.parametrize(
    ("item", "content", "words"),
    [("text", b"\xff", "can't decode byte 0xff"), (True, b"\2", "a bool must be 0 or 1, got 2")],
)
def test_bytes_that_are_no_value_are_refused(
    item: Any, content: bytes, words: str, decoder: TensorDecoder
) -> None:
    batch = damaged(written([item]), 0, content)
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match=words) as caught:
            read(batch)
        assert caught.value.path == "run/buffer"


def test_a_class_that_has_other_fields_now_is_an_error_that_says_so(
    decoder: TensorDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = written([Point(1, 2)])
    other = namedtuple("Point", ["x", "y", "z"])
    for module in ("tensors.form.tensor_containers", "items.records.containers"):
        monkeypatch.setattr(f"shmbuffer.{module}.class_of", lambda name: other)
    for read in (decoder.items, decoder.dense):
        with pytest.raises(CorruptBufferError, match="differ from those in the program that"):
            read(batch)


@given(st.data())
def test_a_record_with_other_bytes_is_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ITEMS)))
    way = data.draw(st.sampled_from(["raw", "zstd"]))
    batch = written([ITEMS[name](n) for n in (2, 1)], WAYS[way]())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(24, len(batch.data) - 1))
        batch.data[at] = data.draw(st.integers(0, 255))
    for read in (TensorDecoder(zstd.expand).items, TensorDecoder(zstd.expand).dense):
        try:
            repr(read(batch))
        except CorruptBufferError as error:
            assert "this buffer" in str(error)  # noqa: PT017 - it need not be raised
