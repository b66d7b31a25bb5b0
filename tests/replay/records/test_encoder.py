"""Items become records, raw or compressed, and are read back exactly as they were."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
    lazy_stack,
)

from shmbuffer.items.records.columns import Columns
from shmbuffer.items.records.compression import Zstd
from shmbuffer.memory import record_format
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.memory.record_format import Codec
from shmbuffer.tensors.form.tensor_batches import unbound
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.frames import sequences, transitions
from tests.kit.items import ITEMS, Point, Step, alike, raw
from tests.replay.records.batches import as_read
from tests.replay.records.ways import WAYS, backwards, decoder, forwards, zstd

pytestmark = [
    pytest.mark.product(few=4),
    pytest.mark.filterwarnings("ignore:nothing is compressed"),
]


class Color(enum.IntEnum):
    RED = 1


ENCODERS: dict[str, Callable[[], TensorEncoder]] = {
    "raw": WAYS["raw"],
    "zstd": WAYS["zstd"],
    "zstd of all": lambda: TensorEncoder(zstd=zstd, keys=["a", "obs", "next", "text", "tokens"]),
}
EVERY_WAY = {**ENCODERS, "own": WAYS["own"]}


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> TensorEncoder:
    return ENCODERS[request.param]()


def read(batch: RecordBatch) -> list[Any]:
    return decoder().items(as_read(batch))


def codecs(batch: RecordBatch) -> dict[Any, list[str]]:
    """Returns the codecs of the leaves for each layout in a batch of records."""
    return {
        tuple(one.rows.tolist()): [chunk.codec.name for chunk in one.form.chunks]
        for one in record_format.locate(as_read(batch), "here")
    }


# -- there and back ----------------------------------------------------------------------------


@pytest.mark.product(few=16)
@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("name", ITEMS)
def test_a_list_of_items_comes_back_exactly(name: str, way: str) -> None:
    encoder = EVERY_WAY[way]()
    items = [ITEMS[name](n) for n in range(1, 9)]
    for _ in range(2):  # the second time, the encoder has chosen all codecs
        found = read(encoder.encode(items))
        assert all(map(alike, found, items))
        assert len(found) == len(items)


def test_items_of_many_kinds_come_back_in_their_order(encoder: TensorEncoder) -> None:
    items = [ITEMS[name](n) for n in range(1, 5) for name in ITEMS]
    batch = encoder.encode(items)
    assert all(map(alike, read(batch), items))
    assert (np.diff(batch.starts) > 0).all()


def test_nothing_gives_no_records(encoder: TensorEncoder) -> None:
    for nothing in ([], torch.zeros(0, 3), TensorDict({"a": torch.zeros(0, 2)}, [0]), iter(())):
        batch = encoder.encode(nothing)
        assert len(batch) == len(batch.sizes) == len(batch.data) == 0
        assert read(batch) == []


def test_a_generator_gives_its_items(encoder: TensorEncoder) -> None:
    assert read(encoder.encode(n for n in range(3))) == [0, 1, 2]


def test_the_items_are_copied_and_not_kept(encoder: TensorEncoder) -> None:
    data = TensorDict({"a": torch.ones(4, 100)}, [4])
    batch = encoder.encode(data)
    data["a"].zero_()
    assert all((one["a"] == 1).all() for one in read(batch))


@pytest.mark.product(few=2)
def test_many_threads_use_one_encoder(encoder: TensorEncoder) -> None:
    items = [ITEMS[name](n) for n in range(1, 4) for name in ITEMS]
    failed: list[int] = []

    def run(turn: int) -> None:
        mine = items[turn:] + items[:turn]
        if not all(all(map(alike, read(encoder.encode(mine)), mine)) for _ in range(5)):
            failed.append(turn)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# -- dense batches -----------------------------------------------------------------------------


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * 120, dtype=torch.int32).reshape(count, 2, 60) // 5


BATCHES: dict[str, Callable[[int], Any]] = {
    "tensor": rows,
    "numbers": torch.arange,
    "array": lambda n: rows(n).numpy(),
    "array of numbers": np.arange,
    "array of objects": lambda n: np.array([{"a": k} for k in range(n)]),
    "array of text": lambda n: np.array(["x" * k for k in range(n)]),
    "flat": lambda n: TensorDict({"a": rows(n), "b": torch.arange(n)}, [n]),
    "two dims": lambda n: TensorDict({"a": rows(n)}, [n, 2], names=["time", "lane"]),
    "named": lambda n: TensorDict({"a": rows(n)}, [n], names=["time"], device="cpu"),
    "nested": lambda n: TensorDict(
        {"a": rows(n), "next": TensorDict({"a": rows(n)}, [n, 2], names=[None, "x"])}, [n]
    ),
    "strided": lambda n: TensorDict({"a": rows(2 * n)[::2], "b": rows(n).transpose(1, 2)}, [n]),
    "expanded": lambda n: TensorDict({"a": torch.zeros(1, 50).expand(n, 50)}, [n]),
    "columns": lambda n: TensorDict({"a": torch.arange(3 * n).reshape(3, n).T[:, 1]}, [n]),
    "complex": lambda n: TensorDict({"a": rows(n).to(torch.complex64).conj()}, [n]),
    "imaginary": lambda n: TensorDict({"a": torch.zeros(n).to(torch.complex64).conj().imag}, [n]),
    "empty leaves": lambda n: TensorDict({"a": torch.zeros(n, 0), "b": torch.zeros(n, 2, 0)}, [n]),
    "no leaves": lambda n: TensorDict({}, [n]),
    "grad": lambda n: TensorDict({"a": torch.zeros(n, 3, requires_grad=True)}, [n]),
    "parameter": lambda n: TensorDict({"a": torch.nn.Parameter(torch.zeros(n, 3))}, [n]),
    "one object": lambda n: TensorDict(
        {
            "a": rows(n),
            "text": NonTensorData("long" * 30, [n]),
            "l": NonTensorData([1, {}], [n, 3]),
        },
        [n],
    ),
    "objects": lambda n: TensorDict(
        {
            "text": NonTensorStack(*[NonTensorData("x" * k) for k in range(n)]),
            "int": NonTensorStack(*[NonTensorData(10**k) for k in range(n)]),
            "a": rows(n),
        },
        [n],
    ),
    "unlike objects": lambda n: TensorDict(
        {"x": NonTensorStack(*[NonTensorData([k, "x", None][k % 3]) for k in range(n)])}, [n]
    ),
    "stacks of objects": lambda n: TensorDict(
        {
            "x": NonTensorStack(
                *[NonTensorStack(NonTensorData("x"), NonTensorData("y")) for _ in range(n)]
            )
        },
        [n],
    ),
    "tensorclass": lambda n: Step(obs=rows(n), text="x", batch_size=[n]),
    "lazy": lambda n: lazy_stack([TensorDict({"a": torch.arange(k)}) for k in range(n)]),
    "lazy inside": lambda n: TensorDict(
        {"a": rows(n), "r": lazy_stack([TensorDict({"x": torch.arange(k)}) for k in range(n)])}, [n]
    ),
    "lazy behind": lambda n: LazyStackedTensorDict(
        TensorDict({"a": rows(n)}, [n]), TensorDict({"a": rows(n)}, [n]), stack_dim=1
    ),
}


@pytest.mark.product("encoder name", few=16)
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_gives_the_records_of_its_items(
    name: str, count: int, encoder: TensorEncoder
) -> None:
    data = BATCHES[name](count)
    items = unbound(data)
    batch, listed = encoder.encode(data), encoder.encode(items)
    assert all(map(alike, read(batch), items))
    assert len(batch) == count
    assert batch.starts.tolist() == listed.starts.tolist()
    assert batch.data.tobytes() == listed.data.tobytes()


def test_a_dense_batch_is_not_taken_apart(
    encoder: TensorEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = transitions(20, seed=1)
    items = list(data.unbind(0))
    with monkeypatch.context() as patched:
        for kind in (TensorDict, torch.Tensor):
            patched.setattr(kind, "unbind", lambda *_: pytest.fail("it was taken apart"))
        batch = encoder.encode(data)
    assert all(map(alike, read(batch), items))


def test_games_and_sequences_come_back_exactly(encoder: TensorEncoder) -> None:
    game = transitions(64, seed=1)
    assert all(map(alike, read(encoder.encode(game)), game.unbind(0)))
    spoken = sequences(60, seed=1, text=True)
    assert all(map(alike, read(encoder.encode(spoken)), spoken))


@settings(max_examples=settings().max_examples // 2)  # each example is a whole list of items
@given(data=st.data())
def test_nested_data_come_back_exactly(data: st.DataObject) -> None:
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**80), 2**80),
        st.floats(),
        st.text(st.characters(exclude_categories=()), max_size=90),
        st.binary(max_size=90),
        st.lists(st.integers(0, 3), max_size=3).map(lambda s: torch.ones(s) * len(s)),
        st.sampled_from(["<f4", ">i2", "S2", "?"]).map(lambda d: np.zeros((2, 30), d)),
    )
    keys = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.booleans(), st.none())
    nests = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.builds(Point, inner, inner),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(NonTensorData, inner.filter(lambda one: not is_tensorclass(one))),
        ),
        max_leaves=8,
    )
    items = data.draw(st.lists(nests, max_size=6))
    name = data.draw(st.sampled_from(sorted(ENCODERS)))
    assert all(map(alike, read(ENCODERS[name]().encode(items)), items))


# -- one item --------------------------------------------------------------------------------


@pytest.mark.product(few=10)
@pytest.mark.parametrize("kind", EVERY_WAY)
@pytest.mark.parametrize("name", [*BATCHES, *ITEMS])
def test_a_single_item_gives_the_record_of_a_list_of_one(name: str, kind: str) -> None:
    if name in ITEMS:
        items = [ITEMS[name](n) for n in range(1, 4)]
    else:
        data = BATCHES[name](3)
        items = list(data) if isinstance(data, np.ndarray) else list(data.unbind(0))
    make = EVERY_WAY[kind]
    alone, listed = make(), make()
    for item in items * 25:  # more than the encoder needs to choose its codecs
        one, other = alone.encode(item, single=True), listed.encode([item])
        assert one.data.tobytes() == other.data.tobytes()
        assert (one.starts.tolist(), one.sizes.tolist()) == ([0], other.sizes.tolist())
        assert one.data.flags.writeable


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_single_item_takes_no_arrays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, items = ENCODERS[kind](), list(transitions(70, seed=1).unbind(0))
    items += sequences(9, seed=1, text=True)
    monkeypatch.setattr(Columns, "__init__", lambda *_, **__: pytest.fail("these are arrays"))
    for item in items:
        encoder.encode(item, single=True)


def test_batches_are_stored_as_if_no_item_had_been_alone() -> None:
    data, make = transitions(70, seed=1), ENCODERS["zstd"]
    mixed = make()
    for one in data.unbind(0):
        mixed.encode(one, single=True)
    batch = mixed.encode(data)
    assert batch.data.tobytes() == make().encode(data).data.tobytes()
    alone = make()
    for one in data.unbind(0):
        expected = alone.encode(one, single=True)
    assert mixed.encode(one, single=True).data.tobytes() == expected.data.tobytes()


# -- what is compressed ------------------------------------------------------------------------


def test_leaves_from_64_bytes_on_are_compressed_where_they_get_smaller() -> None:
    data = TensorDict(
        {
            "zeros": torch.zeros(40, 16),
            "small": torch.zeros(40, 15),
            "noise": torch.randint(0, 256, (40, 64), dtype=torch.uint8),
            "text": NonTensorData("so long" * 30, [40]),
            "word": NonTensorData("word", [40]),
        },
        [40],
    )
    batch = TensorEncoder(zstd=Zstd()).encode(data)
    assert codecs(batch) == {tuple(range(40)): ["ZSTD", "RAW", "RAW", "ZSTD", "RAW"]}


def test_a_decision_on_the_first_items_holds_for_later_ones() -> None:
    encoder = TensorEncoder(zstd=Zstd())
    zeros, noise = torch.zeros(40, 400).byte(), torch.randint(0, 256, (40, 400)).byte()
    assert codecs(encoder.encode(zeros)) == codecs(encoder.encode(noise))
    batch = encoder.encode(noise)
    assert codecs(batch) == {tuple(range(40)): ["ZSTD"]}
    assert all(map(alike, read(batch), noise))
    encoder = TensorEncoder(zstd=Zstd())
    assert codecs(encoder.encode(noise)) == codecs(encoder.encode(zeros)) != codecs(batch)


def test_a_first_item_alone_decides_nothing() -> None:
    encoder = TensorEncoder(zstd=Zstd())
    noise = torch.randint(0, 256, (400,)).byte()
    assert codecs(encoder.encode(noise, single=True)) == {(0,): ["RAW"]}
    found = [encoder.encode(torch.zeros(400).byte(), single=True) for _ in range(40)]
    assert codecs(found[-1]) == {(0,): ["ZSTD"]}


def test_a_leaf_that_grows_is_looked_at_when_it_is_large_enough() -> None:
    encoder = TensorEncoder(zstd=Zstd())
    for _ in range(50):
        assert codecs(encoder.encode(torch.zeros(63).byte(), single=True)) == {(0,): ["RAW"]}
    assert codecs(encoder.encode(torch.zeros(64).byte(), single=True)) == {(0,): ["ZSTD"]}


def test_named_leaves_and_all_that_is_in_them_are_compressed_and_no_others() -> None:
    item = TensorDict(
        {
            "obs": torch.zeros(200),
            "tiny": torch.zeros(1),
            "rest": torch.zeros(200),
            "next": TensorDict(
                {"obs": torch.zeros(200), "info": NonTensorData({"a": "x", "b": 1})}
            ),
            "deep": TensorDict({"obs": torch.zeros(200), "rest": torch.zeros(200)}),
        }
    )
    encoder = TensorEncoder(zstd=Zstd(), keys=["tiny", "next", ("deep", "obs")])
    assert codecs(encoder.encode([item])) == {
        (0,): ["RAW", "ZSTD", "RAW", "ZSTD", "ZSTD", "RAW", "JOINED", "RAW"]
    }


def test_unknown_keys_are_named() -> None:
    encoder = TensorEncoder(zstd=Zstd(), keys=["obz", ("next", "obs")])
    item = TensorDict({"obs": torch.zeros(9), "next": TensorDict({"obz": torch.zeros(9)})})
    with pytest.warns(
        UserWarning, match=r"no leaf under the keys \[\('next', 'obs'\), \('obz',\)\]"
    ) as said:
        encoder.encode([item])
    assert "its leaves are [('obs',), ('next', 'obz')]" in str(said[0].message)
    encoder.encode([item])  # once


def test_keys_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"for the single key 'obs' pass \['obs'\]"):
        TensorEncoder(zstd=Zstd(), keys="obs")


def test_without_zstd_nothing_is_compressed() -> None:
    batch = TensorEncoder().encode(transitions(8, seed=0))
    assert set(codecs(batch)[tuple(range(8))]) == {"RAW"}


# -- dictionaries ------------------------------------------------------------------------------


def test_samples_are_what_would_be_compressed() -> None:
    data = TensorDict({"obs": torch.arange(300).reshape(3, 100), "r": torch.zeros(3)}, [3])
    encoder = TensorEncoder(zstd=Zstd())
    assert encoder.samples(data) == [raw(one) for one in data["obs"]]
    assert encoder.samples(data[0], single=True) == [raw(data["obs"][0])]
    assert TensorEncoder(zstd=Zstd(), keys=["r"]).samples(data) == [bytes(4)] * 3
    assert TensorEncoder().samples(data) == []


def test_a_dictionary_can_be_put_in_at_any_time() -> None:
    spoken = [one.to_dict() for one in sequences(200, seed=3, shortest=20, longest=60)]
    encoder = TensorEncoder(zstd=Zstd())
    before = encoder.encode(spoken)
    encoder.zstd = zstd = Zstd(dictionary=Zstd.train(encoder.samples(spoken), 2048))
    after = encoder.encode(spoken)
    assert after.data.nbytes < before.data.nbytes
    for batch in (before, after):
        assert all(map(alike, TensorDecoder(zstd.expand).items(batch), spoken))


# -- the user's functions ----------------------------------------------------------------------


def test_the_users_functions_are_called_with_each_tensor_and_what_is_stored_of_it() -> None:
    asked: list[torch.Tensor] = []
    told: list[dict[str, Any]] = []

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return backwards(tensor)

    def expand(chunk: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        told.append(about)
        return forwards(chunk, about)

    item = {
        "tensor": torch.arange(3),
        "empty": torch.zeros(0, 2),
        "array": np.arange(2, dtype=np.float32),
        "times": np.array(["2001-02-03"], "M8[D]"),
        "number": np.float32(1),
        "bytes": b"ab",
        "text": "text" * 30,
        "int": 1,
    }
    encoder = TensorEncoder(own=compress)
    batch = encoder.encode([item])
    assert [(one.dtype, tuple(one.shape)) for one in asked] == [
        (torch.int64, (3,)),
        (torch.float32, (2,)),
        (torch.uint8, (8,)),
        (torch.float32, ()),
        (torch.uint8, (2,)),
    ]
    ((located),) = record_format.locate(batch, "here")
    assert [chunk.codec.name for chunk in located.form.chunks] == ["OWN"] * 6 + ["RAW"] * 2
    stored = [
        batch.data[start : start + size].tobytes()
        for start, size in zip(located.offsets[0], located.sizes[0], strict=True)
    ]
    expected = [raw(backwards(one)) for one in asked]
    assert stored[:6] == [expected[0], b"", *expected[1:]]
    assert alike(TensorDecoder(own=expand).items(as_read(batch)), [item])
    assert [(one["dtype"], tuple(one["shape"])) for one in told] == [
        (one.dtype, tuple(one.shape)) for one in asked
    ]
    assert {(one["type"], str(one["device"])) for one in told} == {("tensor", "cpu")}


def test_the_users_function_is_called_with_named_tensors_only() -> None:
    encoder = TensorEncoder(own=backwards, keys=["a"])
    data = TensorDict({"a": torch.zeros(5, 3), "b": torch.zeros(5, 3)}, [5])
    assert codecs(encoder.encode(data)) == {tuple(range(5)): ["OWN", "RAW"]}


def test_batches_of_the_users_function_are_those_of_their_items() -> None:
    encoder, data = TensorEncoder(own=backwards), BATCHES["one object"](4)
    assert (
        encoder.encode(data).data.tobytes() == encoder.encode(list(data.unbind(0))).data.tobytes()
    )


def test_the_users_function_may_make_nothing_of_something() -> None:
    data = torch.arange(5)
    batch = TensorEncoder(own=lambda tensor: torch.zeros(0 if tensor == 0 else 9).byte()).encode(
        data
    )
    asked: list[int] = []

    def expand(chunk: torch.Tensor, _: Any) -> torch.Tensor:
        asked.append(chunk.numel())
        return torch.tensor(chunk.numel())

    found = TensorDecoder(own=expand).items(as_read(batch))
    assert asked == [0, 9, 9, 9, 9] == [int(one) for one in found]


def test_the_users_function_excludes_zstd() -> None:
    with pytest.raises(ValueError, match="compression_fn and zstd cannot be combined"):
        TensorEncoder(own=backwards, zstd=Zstd())


# -- refusals ----------------------------------------------------------------------------------


def test_an_unsupported_value_is_refused_by_its_place(encoder: TensorEncoder) -> None:
    for data, words in (
        ([1, {"a": 1j}], "entry 'a' is a builtins.complex"),
        (TensorDict({"x": NonTensorData({"k": Color.RED}, [3])}, [3]), "entry 'x' -> 'k' is a "),
        (
            TensorDict({"x": NonTensorStack(*[NonTensorData(k) for k in (1, 2, 1j)])}, [3]),
            "entry 'x' is a builtins.complex",
        ),
        (np.array([object()]), "an item is a builtins.object"),
        (np.zeros(3, "i4,i4"), "an item is a numpy void of [('f0', '<i4'), ('f1', '<i4')]"),
    ):
        with pytest.raises(TypeError) as caught:
            encoder.encode(data)
        assert str(caught.value).startswith(words)
        assert "a record can contain tensors" in str(caught.value)


@pytest.mark.parametrize("tree", [{"a": 1}, (torch.zeros(3),), "text"], ids=str)
def test_a_pytree_is_not_a_batch(tree: Any, encoder: TensorEncoder) -> None:
    with pytest.raises(TypeError, match=r"extend\(\) of a list storage needs a list of items"):
        encoder.encode(tree)


def test_a_batch_of_one_is_laid_out_as_that_item(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = transitions(3)
    steps["note"] = NonTensorStack("a", "b", "c")
    steps.names = ["time"]
    item = steps[1]
    expected = TensorEncoder().encode(item, single=True)
    assert expected.body(0).tobytes() == TensorEncoder().encode(steps).body(1).tobytes()

    def apart(self: TensorEncoder, data: Any) -> Any:
        raise AssertionError("columns of one item")

    monkeypatch.setattr(TensorEncoder, "columns", apart)
    for batch in (steps[1:2], [item], iter([item]), lazy_stack([item])):
        found = TensorEncoder().encode(batch)
        assert found.data.tobytes() == expected.data.tobytes(), type(batch)
        assert found.sizes.tolist() == expected.sizes.tolist()


def test_data_without_a_dimension_are_no_batch(encoder: TensorEncoder) -> None:
    for data in (torch.tensor(1), np.array(1), TensorDict({"a": torch.zeros(3)})):
        with pytest.raises(RuntimeError, match="without a batch dimension is one item"):
            encoder.encode(data)


def test_a_tensor_that_only_stands_for_one_is_refused(encoder: TensorEncoder) -> None:
    stand_in = torch._efficientzerotensor((100,))
    for data, single in (([{"a": stand_in}], False), ({"a": stand_in}, True)):
        with pytest.raises(TypeError, match=r"the leaf \('a',\) has no memory"):
            encoder.encode(data, single)


def test_an_item_larger_than_a_record_may_be_is_refused(encoder: TensorEncoder) -> None:
    with pytest.raises(ValueError, match="5000 leaves, but the limit is 4096"):
        encoder.encode([list(range(5000))])
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ValueError, match="64"):
        encoder.encode([deep])


@pytest.mark.product(few=6)
@pytest.mark.parametrize(
    "item",
    [
        {"a": 1j},
        np.zeros((), "i4,i4"),
        list(range(5000)),
        torch.zeros(0, 2**33),
        torch.zeros(0, 2**20, 2**30),
    ],
    ids=["complex", "void", "leaves", "dim", "volume"],
)
def test_a_single_item_is_refused_in_the_same_words(item: Any, encoder: TensorEncoder) -> None:
    with pytest.raises((TypeError, ValueError)) as listed:
        encoder.encode([item])
    with pytest.raises(listed.type) as alone:
        encoder.encode(item, single=True)
    assert str(alone.value) == str(listed.value)


def test_codecs_are_those_of_the_format() -> None:
    assert [one.name for one in Codec] == ["RAW", "ZSTD", "OWN", "JOINED"]
