"""Items are compressed when they are written and come back unchanged."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from shmbuffer import (
    CompressedListStorage,
    CorruptBufferError,
    ListStorage,
    ReplayBuffer,
    SchemaMismatchError,
)
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)


def there_and_back(item: Any, **options: Any) -> Any:
    storage = CompressedListStorage(3, **options)
    storage.set(0, item)
    return storage.get(0)


# -- exactly ---------------------------------------------------------------------------------------


def test_every_leaf_of_a_nested_tensordict_is_compressed_and_comes_back() -> None:
    item = TensorDict(
        {
            "a": torch.zeros(4, 1000),
            "n": TensorDict({"b": torch.ones(4, 2, 1000), "m": {"c": torch.zeros(4, 2)}}, [4, 2]),
            "text": NonTensorStack("w", "x", "y", "z"),
            "same": NonTensorData("all", batch_size=[4]),
        },
        [4],
        names=["time"],
    )
    storage = CompressedListStorage(3)
    storage.set(0, item)
    found = storage.get(0)
    assert (found == item).all()
    assert found.batch_size == torch.Size([4])
    assert found["n"].batch_size == torch.Size([4, 2])
    assert found.names == ["time"]
    assert found.device is found["n"].device is None
    assert found["text"] == ["w", "x", "y", "z"]
    assert found["same"] == "all"
    assert storage.bytes() < 300


# -- the codec -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 3, 10, 19, 22])
def test_every_level_of_zstd_works(level: int) -> None:
    storage = CompressedListStorage(3, compression_level=level)
    tensor = torch.arange(3000) % 17
    storage.set(0, tensor)
    assert torch.equal(storage.get(0), tensor)
    assert 0 < storage.bytes() < tensor.nbytes / 10
    chunk = storage.compression_fn(tensor).numpy().tobytes()
    assert zstandard.ZstdDecompressor().decompress(chunk) == tensor.numpy().tobytes()


@pytest.mark.parametrize("level", [0, 23, -1, 3.5, "3", None])
def test_another_level_is_refused_by_its_value(level: Any) -> None:
    with pytest.raises(ValueError, match=rf"1 to 22, got {level!r}"):
        CompressedListStorage(3, compression_level=level)


def test_a_higher_level_gives_no_more_bytes() -> None:
    sizes = []
    for level in (1, 19):
        storage = CompressedListStorage(3, compression_level=level)
        storage.set(0, (torch.arange(20_000) ** 2 % 251).to(torch.uint8))
        sizes.append(storage.bytes())
    assert sizes[1] <= sizes[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) ^ 255


def test_a_custom_codec_may_give_bytes_or_the_tensor() -> None:
    seen = []

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tensor.dtype, tuple(tensor.shape)))
        return as_bytes(tensor)

    def with_metadata(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        assert metadata["device"] == torch.device("cpu")
        return (chunk ^ 255).view(metadata["dtype"]).reshape(metadata["shape"])

    def without(chunk: torch.Tensor) -> torch.Tensor:
        return chunk ^ 255

    item = {"a": torch.arange(6.0).reshape(2, 3), "n": TensorDict(b=torch.ones(2)), "x": "text"}
    for decompress in (with_metadata, without, lambda *both: without(both[0])):
        seen.clear()
        found = there_and_back(item, compression_fn=compress, decompression_fn=decompress)
        assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["n"]["b"].tolist() == [1, 1]
        assert found["x"] == "text"
        assert seen == [(torch.float32, (2, 3)), (torch.float32, (2,))]


def test_a_second_argument_with_a_default_is_the_functions_own() -> None:
    def decompress(chunk: torch.Tensor, mask: int = 255) -> torch.Tensor:
        return chunk ^ mask

    def knows(chunk: torch.Tensor, metadata: Any = None) -> torch.Tensor:
        return (chunk ^ 255).view(metadata["dtype"])

    for function in (decompress, knows):
        found = there_and_back(
            torch.arange(3.0), compression_fn=as_bytes, decompression_fn=function
        )
        assert found.tolist() == [0, 1, 2]


def test_a_codec_that_gives_something_else_is_named() -> None:
    for gives, found in (
        (lambda tensor: tensor.float(), r"torch\.float32"),
        (lambda tensor: b"x", "bytes"),
        (lambda tensor: None, "NoneType"),
    ):
        storage = CompressedListStorage(3, compression_fn=gives)
        with pytest.raises(TypeError, match=rf"must return a uint8 tensor, got {found}"):
            storage.set(0, torch.zeros(2))
        assert len(storage) == ring_of(storage).write_count == 0
    for wrong, words in (
        (lambda chunk: chunk.float(), r"returned float32\[8\], but int64\[1\] was compressed"),
        (lambda chunk: b"", "must return the tensor that was compressed, got bytes"),
    ):
        storage = CompressedListStorage(3, compression_fn=as_bytes, decompression_fn=wrong)
        storage.set(0, torch.zeros(1, dtype=torch.int64))
        with pytest.raises(RuntimeError, match=words):
            storage.get(0)


def test_bytes_that_zstd_has_not_written_are_named() -> None:
    storage = CompressedListStorage(3, compression_fn=as_bytes)
    storage.set(0, torch.zeros(100))
    with pytest.raises(CorruptBufferError, match="cannot be decompressed"):
        storage.get(0)
    good = CompressedListStorage(3)
    shorter = {"shape": torch.Size([99]), "dtype": torch.float32}
    with pytest.raises(CorruptBufferError, match="400 bytes instead of 396"):
        good.decompression_fn(good.compression_fn(torch.zeros(100)), shorter)


# -- what is no record -----------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["zstd", "a function"])
def test_an_item_that_is_no_record_is_stored_as_the_object_that_it_is(
    tmp_path: Path, own: bool
) -> None:
    seen: list[torch.Tensor] = []

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return as_bytes(tensor)

    functions: Any = {
        "compression_fn": compress,
        "decompression_fn": lambda chunk: chunk ^ 255,
    }
    storage = CompressedListStorage(4, **functions if own else {})
    odd = {"a": torch.arange(1000), "z": 1 - 2j}
    storage.append([{"a": torch.zeros(1000)}, odd])
    storage.append(odd, True)
    assert len(seen) == own
    assert storage.get([0, 1])[1]["a"] is storage.get(2)["a"] is odd["a"]
    size = storage.bytes()
    storage.set(0, odd)
    assert size > storage.bytes() == 0
    storage.set(0, {"a": torch.zeros(1000)})
    storage.dumps(tmp_path)
    loads: list[Any] = [
        lambda other: other.loads(tmp_path),
        lambda other: other.load_state_dict(storage.state_dict()),
    ]
    for load in loads:
        other = CompressedListStorage(4, **functions if own else {})
        load(other)
        assert other.get(0)["a"].tolist() == [0.0] * 1000
        assert torch.equal(other.get(1)["a"], odd["a"])
        assert other.get(2)["a"] is not odd["a"]
        assert other.get(2)["z"] == 1 - 2j
        assert other.bytes() == size


def test_without_a_device_what_is_on_the_cpu_is_compressed_and_what_is_not_stays() -> None:
    storage = CompressedListStorage(8, device=None)
    storage.append(torch.zeros(1000), True)
    assert 0 < (size := storage.bytes()) < 100
    elsewhere = torch.zeros(1000, device="meta")
    storage.append([elsewhere, torch.zeros(1000)])
    storage.append({"n": [elsewhere]}, True)
    storage.append(TensorDict({}, device="meta"), True)
    storage.append(TensorDict({"a": torch.zeros(2, 1000, device="meta")}, [2]))
    assert storage.bytes() == 2 * size
    assert storage.get(1) is storage.get(3)["n"][0] is elsewhere
    assert storage.get(2).tolist() == [0.0] * 1000
    assert storage.get(4).device == storage.get(6)["a"].device == torch.device("meta")
    storage.set(0, TensorDict(a=torch.zeros(1), device="cpu"))
    assert storage.get(0).device == torch.device("cpu")


# -- copies, states and saves ----------------------------------------------------------------------


def test_contents_can_be_copied_out_and_in_without_touching_the_bytes() -> None:
    storage = CompressedListStorage(10)
    storage.set(range(4), torch.arange(8).reshape(4, 2))
    items, moment = storage.copy_out()
    slots = np.flatnonzero(moment.tickets >= 0)
    other = CompressedListStorage(10)
    other.copy_in(items, slots, cursor=moment.head % 10, write_count=moment.write_count)
    assert torch.equal(torch.stack(other.get(slice(None))), torch.arange(8).reshape(4, 2))
    assert other.copy_out()[0][2] is items[2]
    assert ring_of(other).write_count == 4


def test_a_state_keeps_items_compressed() -> None:
    rb = ReplayBuffer(storage=CompressedListStorage(10), batch_size=2)
    rb.extend([{"a": torch.zeros(1000), "s": "x"}, {"a": torch.ones(1000), "s": "y"}])
    state = rb.state_dict()
    assert sum(one["shmbuffer.record"].numel() for one in state["_storage"]["_list"]) < 300
    other = ReplayBuffer(storage=CompressedListStorage(10), batch_size=2)
    other.load_state_dict(state)
    assert other[1]["a"].tolist() == [1.0] * 1000
    assert other[:]["s"] == ["x", "y"]


def test_the_byte_stream_of_tensors_arrays_and_bytes_is_their_bytes() -> None:
    stream = CompressedListStorage(3).to_bytestream
    assert stream(torch.tensor([1, 2], dtype=torch.int16)) == b"\1\0\2\0"
    assert stream(torch.tensor([1.0], dtype=torch.bfloat16)) == b"\x80\x3f"
    assert stream(torch.arange(4, dtype=torch.uint8).reshape(2, 2).t()) == b"\0\2\1\3"
    assert stream(np.array([258], dtype=np.uint16)) == b"\2\1"
    assert stream(b"ab") == stream(bytearray(b"ab")) == b"ab"
    assert pickle.loads(stream({"k": "others are pickled"})) == {"k": "others are pickled"}


# -- in a buffer -----------------------------------------------------------------------------------


def test_the_example_of_the_document_runs() -> None:
    storage = CompressedListStorage(max_size=1000, compression_level=3)
    rb = ReplayBuffer(storage=storage, batch_size=5)
    images = torch.randn(10, 3, 84, 84)
    assert rb.extend(TensorDict({"obs": images}, batch_size=[10])).tolist() == list(range(10))
    with pytest.warns(UserWarning, match="batch_size=3"):  # the batch has another size
        sample, info = rb.sample(3, return_info=True)
    assert sample["obs"].shape == torch.Size([3, 3, 84, 84])
    assert torch.equal(sample["obs"], images[info["index"]])


@pytest.mark.parametrize("way", ["add", "items", "batch"])
def test_a_function_of_the_user_is_called_once_for_each_tensor(way: str) -> None:
    compressed: list[Any] = []
    expanded: list[Any] = []

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        compressed.append((tensor.dtype, tuple(tensor.shape)))
        return as_bytes(tensor)

    def decompress(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        expanded.append((metadata["dtype"], tuple(metadata["shape"])))
        return chunk ^ 255

    functions = {"compression_fn": compress, "decompression_fn": decompress}
    rb = ReplayBuffer(storage=CompressedListStorage(4, **functions))
    batch = TensorDict(
        {"x": torch.rand(2, 3), "n": {"y": torch.zeros(2, 0), "z": torch.ones(2).bfloat16()}}, [2]
    )
    items = list(batch.unbind(0))
    if way == "batch":
        rb.extend(batch)
    elif way == "items":
        rb.extend(items)
    else:
        rb.add(items[0])
        rb.add(items[1])
    once = [(torch.float32, (3,)), (torch.bfloat16, ())]  # an empty tensor has no bytes
    assert sorted(compressed, key=str) == sorted(once * 2, key=str)
    assert rb[1]["x"].tolist() == items[1]["x"].tolist()
    assert expanded == once
    assert rb[:].batch_size == torch.Size([2])
    assert len(expanded) == 6


@pytest.mark.parametrize("by", ["file", "state"])
@pytest.mark.parametrize("kind", [CompressedListStorage, ListStorage])
def test_items_of_an_unknown_compression_fn_are_refused_before_anything_changes(
    tmp_path: Path, by: str, kind: type[Any]
) -> None:
    functions = {"compression_fn": as_bytes, "decompression_fn": lambda chunk: chunk ^ 255}
    saved = CompressedListStorage(4, **functions)
    saved.set(range(2), [torch.arange(100), torch.ones(3, 4)])
    into = kind(4)
    into.set(0, torch.zeros(2))
    saved.dumps(tmp_path)
    state = saved.state_dict()
    load = partial(into.loads, tmp_path) if by == "file" else partial(into.load_state_dict, state)
    with pytest.raises(SchemaMismatchError, match=r"with a compression_fn; load it into a storage"):
        load()
    assert into.get(0).tolist() == [0, 0]
    zstd = CompressedListStorage(4)
    zstd.set(range(2), [torch.arange(100), torch.ones(3, 4)])
    other = CompressedListStorage(4, **functions)
    other.load_state_dict(zstd.state_dict())  # zstd needs no user function
    assert torch.equal(other.get(0), torch.arange(100))
