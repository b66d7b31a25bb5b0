"""Frames that are stacked along the last dimension are stored as planes and come back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer._native import _core
from shmbuffer.items.records.compression import Zstd
from shmbuffer.items.records.planes import Planes, turned, turned_one
from shmbuffer.memory import RecordBatch, record_format
from shmbuffer.memory.record_format import Chunk, Codec
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.frames import transitions

zstd = Zstd()
DECODER = TensorDecoder(zstd.expand)


def steps(count: int, *, last: bool, seed: int = 0) -> TensorDict:
    """Makes steps of a game whose frames are stacked along the first or the last dimension."""
    made = transitions(count, seed=seed)
    stacks = {"obs": made["observation"], "next": made["next", "observation"]}
    if last:
        stacks = {key: stack.permute(0, 2, 3, 1).contiguous() for key, stack in stacks.items()}
    return TensorDict({**stacks, "action": made["action"]}, batch_size=[count])


def written(encoder: TensorEncoder, data: Any, single: bool = False) -> RecordBatch:
    batch = encoder.encode(data, single).consolidate()
    return RecordBatch(batch.data.copy(), batch.starts, batch.sizes)


def chunks_of(batch: RecordBatch) -> tuple[Chunk, ...]:
    (located,) = record_format.locate(batch, "here")
    return located.form.chunks


@pytest.mark.parametrize("planes", range(1, 18))
def test_planes_are_split_and_joined_byte_by_byte(planes: int) -> None:
    rng = np.random.default_rng(planes)
    leaves = [rng.integers(0, 256, (size, planes), np.uint8) for size in (0, 1, 15, 16, 17, 700)]
    at = np.array([leaf.ctypes.data for leaf in leaves])
    sizes = np.array([leaf.size for leaf in leaves])
    memory, to = turned(at[:, None], sizes[:, None], [planes])
    expected = np.concatenate([leaf.T.ravel() for leaf in leaves])
    assert memory.tobytes() == expected.tobytes()
    back = np.empty_like(memory)
    places = to[:, 0] - memory.ctypes.data + back.ctypes.data
    at, sizes, count = map(np.ascontiguousarray, (to[:, 0], sizes, np.full(len(sizes), planes)))
    _core.join_planes(*(one.ctypes.data for one in (at, sizes, count, places)), len(sizes))
    assert back.tobytes() == np.concatenate([leaf.ravel() for leaf in leaves]).tobytes()
    one = turned_one(leaves[-1].ctypes.data, leaves[-1].size, planes)
    assert one.tobytes() == leaves[-1].T.tobytes()


@pytest.mark.parametrize("single", [False, True])
def test_stacks_along_the_last_dim_take_as_many_bytes_as_along_the_first(single: bool) -> None:
    found = []
    for last in (False, True):
        encoder, data = TensorEncoder(zstd=zstd), steps(96, last=last)
        for _ in range(2):
            encoder.encode(data)  # the encoder learns which codecs pay off
        for item in data:
            encoder.encode(item, True)
        given = data[7] if single else data
        batch = written(encoder, given, single)
        planar = [chunk.planar for chunk in chunks_of(batch)]
        assert planar == [last, last, False]
        found.append(len(batch.data))
        assert (DECODER.items(batch)[0] == data[7 if single else 0]).all()
    assert found[0] == found[1]


def test_what_was_stored_as_planes_comes_back_as_it_was() -> None:
    encoder, data = TensorEncoder(zstd=zstd), steps(64, last=True)
    encoder.encode(data)
    batch = written(encoder, data)
    assert [chunk.planar for chunk in chunks_of(batch)] == [True, True, False]
    dense = DECODER.dense(batch)
    assert (dense == data).all()
    assert dense["obs"].is_contiguous()
    assert all((one == other).all() for one, other in zip(DECODER.items(batch), data, strict=True))
    (entries,) = DECODER.entries(batch, [("next",)])
    assert np.array_equal(entries, data["next"])


def test_records_of_both_ways_make_one_batch() -> None:
    data = steps(40, last=True)
    raw, planes = TensorEncoder(), TensorEncoder(zstd=zstd)
    parts = []
    for encoder, rows in ((raw, slice(0, 5)), (planes, slice(5, 40))):
        parts.append(written(encoder, data[rows]))
    offsets = np.cumsum([0, *(len(part.data) for part in parts)])
    batch = RecordBatch(
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.starts + at for part, at in zip(parts, offsets, strict=False)]),
        np.concatenate([part.sizes for part in parts]),
    )
    planar = [one.form.chunks[0].planar for one in record_format.locate(batch, "here")]
    assert planar == [False, True]
    assert (DECODER.dense(batch) == data).all()


@pytest.mark.parametrize("single", [False, True])
def test_planes_that_zstd_makes_no_smaller_are_stored_as_they_were(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planes, "pays", lambda *_: True)
    data = torch.from_numpy(_noise(np.random.default_rng(0)))
    encoder = TensorEncoder(zstd=zstd)
    batch = written(encoder, data[0] if single else data, single)
    assert [(chunk.codec, chunk.planar) for chunk in chunks_of(batch)] == [(Codec.RAW, False)]
    assert torch.equal(torch.stack(DECODER.items(batch)), data[:1] if single else data)


def _noise(rng: np.random.Generator) -> Any:
    return rng.integers(0, 256, (64, 40, 40, 4), np.uint8)


def _wide(rng: np.random.Generator) -> Any:
    return np.tile(rng.integers(0, 9, (64, 40, 17), np.uint8), 3)


def _words(rng: np.random.Generator) -> Any:
    return np.repeat(rng.integers(0, 9, (64, 40, 40, 4), np.int16), 2, axis=1)


@pytest.mark.parametrize("made", [_noise, _wide, _words])
def test_leaves_that_gain_nothing_by_it_stay_as_they_are(made: Callable[..., Any]) -> None:
    data = torch.from_numpy(made(np.random.default_rng(0)))
    encoder = TensorEncoder(zstd=zstd)
    batch = written(encoder, data)
    assert not any(chunk.planar for chunk in chunks_of(batch))
    assert torch.equal(DECODER.dense(batch), data)


def test_whether_planes_pay_is_seen_from_the_first_items_only() -> None:
    asked = []

    def measure() -> tuple[int, int, int]:
        asked.append(1)
        return 16, 1000, 900

    planes = Planes([Chunk("tensor", "uint8", 3, Codec.RAW)], (0,))
    assert [planes.pays(0, 4, 4096, measure) for _ in range(5)] == [True] * 5
    assert len(asked) == 2
    assert not planes.pays(0, 1, 4096, measure)
    assert not planes.pays(0, 17, 4097, measure)
    assert not planes.pays(0, 4, 200, measure)
