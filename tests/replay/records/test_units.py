"""Leaves with partly equal content share a zstd frame and are read back one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import CorruptBufferError
from shmbuffer.items.records.compression import Zstd
from shmbuffer.memory import record_format
from shmbuffer.memory.mapped.record_batch import RecordBatch, join
from shmbuffer.memory.record_format import Codec
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.frames import transitions
from tests.kit.items import alike
from tests.replay.records.batches import as_read

KEYS = ("obs", "reward", "next", "noise")


def steps(count: int, *, size: int = 3000, seed: int = 0) -> TensorDict:
    """Makes items of noise whose ``next`` differs from ``obs`` in a few bytes only."""
    rng = torch.Generator().manual_seed(seed)
    obs = torch.randint(0, 256, (count, size), generator=rng, dtype=torch.uint8)
    following = obs.clone()
    following[:, -9:] += 1
    noise = torch.randint(0, 256, (count, size), generator=rng, dtype=torch.uint8)
    rewards = torch.rand(count, generator=rng)
    return TensorDict(dict(zip(KEYS, (obs, rewards, following, noise), strict=True)), [count])


def chunks(batch: RecordBatch) -> list[tuple[str, int | None]]:
    (one,) = record_format.locate(as_read(batch), "here")
    return [(chunk.codec.name, chunk.joined) for chunk in one.form.chunks]


def encoder() -> TensorEncoder:
    return TensorEncoder(zstd=Zstd())


def decoder() -> TensorDecoder:
    return TensorDecoder(Zstd().expand)


def pairs(count: int) -> TensorDict:
    return steps(count).exclude("noise")


JOINED = [("ZSTD", None), ("RAW", None), ("JOINED", 0)]


@pytest.mark.parametrize("count", [1, 7, 64])
def test_bytes_that_an_item_holds_twice_are_stored_once(count: int) -> None:
    data = pairs(count)
    batch = encoder().encode(data)
    assert chunks(batch) == JOINED
    assert batch.sizes.sum() < 1.1 * data["obs"].nbytes
    assert all(map(alike, decoder().items(as_read(batch)), data.unbind(0)))
    assert alike(decoder().dense(as_read(batch)), data)


def test_a_list_and_single_items_are_stored_as_a_batch_is() -> None:
    data = pairs(40)
    batch = encoder().encode(data)
    assert encoder().encode(list(data.unbind(0))).data.tobytes() == batch.data.tobytes()
    alone = encoder()
    for row, item in enumerate(data.unbind(0)):
        record = alone.encode(item, single=True)
        assert record.body(0).tobytes() == batch.body(row).tobytes()


def test_leaves_that_differ_are_not_joined() -> None:
    noise = steps(40).select("obs", "noise")
    assert chunks(encoder().encode(noise)) == [("RAW", None)] * 2
    zeros = TensorDict({"a": torch.zeros(40, 500), "b": torch.zeros(40, 500).int()}, [40])
    assert chunks(encoder().encode(zeros)) == [("ZSTD", None)] * 2
    mixed = steps(40)
    found = chunks(encoder().encode(mixed))
    assert found[KEYS.index("next")] in (("JOINED", 0), ("RAW", None))
    assert alike(decoder().dense(as_read(encoder().encode(mixed))), mixed)


def test_stacks_of_frames_are_joined_and_take_less() -> None:
    data = transitions(64, seed=3)
    together = encoder().encode(data)
    apart = [encoder().encode(one) for one in (data["observation"], data["next", "observation"])]
    assert ("JOINED", 0) in chunks(together)
    assert together.sizes.sum() < 0.75 * sum(int(one.sizes.sum()) for one in apart)
    assert alike(decoder().dense(as_read(together)), data)


def test_one_of_the_joined_is_read_without_the_other() -> None:
    data = pairs(20)
    batch = as_read(encoder().encode(data))
    for key in ("next", "obs"):
        (found,) = decoder().entries(batch, [(key,)])
        assert np.array_equal(found, data[key])


def test_sizes_may_differ_between_items_and_between_the_joined() -> None:
    rng = np.random.default_rng(5)
    items = []
    for number in range(30):
        text = torch.from_numpy(rng.integers(0, 256, 2000 + number * (number % 3), np.uint8))
        items.append({"a": text, "b": text[: len(text) - number % 4 * (number > 0)].clone()})
    items.append({"a": torch.zeros(0).byte(), "b": items[0]["a"]})
    items.append({"a": items[0]["a"], "b": torch.zeros(0).byte()})
    items.append({"a": torch.zeros(0).byte(), "b": torch.zeros(0).byte()})
    batch = encoder().encode(items)
    assert chunks(batch) == [("ZSTD", None), ("JOINED", 0)]
    assert all(map(alike, decoder().items(as_read(batch)), items))
    for key in ("a", "b"):
        (found,) = decoder().entries(as_read(batch), [(key,)])
        assert all(map(torch.equal, found, [item[key] for item in items]))
    nothing = encoder()
    nothing.encode(items)
    assert all(map(alike, decoder().items(as_read(nothing.encode(items[-1:]))), items[-1:]))
    assert alike(decoder().items(as_read(nothing.encode(items[-1], single=True)))[0], items[-1])


def test_records_that_are_joined_and_others_are_one_batch() -> None:
    data = pairs(24)
    plain = TensorEncoder(zstd=Zstd(), keys=["obs"]).encode(data[:9])
    joined = encoder().encode(data[9:])
    rows = [batch.body(row).tobytes() for batch in (plain, joined) for row in range(len(batch))]
    assert alike(decoder().dense(join(rows)), data)


def test_a_frame_of_another_size_is_refused() -> None:
    data = pairs(4)
    batch = as_read(encoder().encode(data))
    (one,) = record_format.locate(batch, "here")
    assert one.form.chunks[0].codec is Codec.ZSTD
    at, size = int(one.offsets[2, 0]), int(one.sizes[2, 0])
    frame = Zstd().compress([b"x" * 10])[0]
    batch.data[at : at + size] = np.frombuffer(frame + bytes(size - len(frame)), np.uint8)
    with pytest.raises(CorruptBufferError, match="10 bytes instead of 6000"):
        decoder().dense(batch)
